//! One repository of the hub: its files, fetched into the shared cache or found there.

use std::{
    cell::OnceCell,
    fs, io,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use hf_hub::{Cache, CacheRepo, Repo as Names, RepoType};

use super::{
    HubOptions, MAIN, Progress,
    client::{self, Client, Found, Head, Refusal},
    download::Download,
    explain::Asked,
};
use crate::error::{Error, Result};

/// A repository, asked for one file after the other.
pub(super) struct Repo<'a> {
    id: &'a str,
    kind: RepoType,
    options: &'a HubOptions,
    client: Client,
    progress: &'a dyn Fn(Progress),
    /// `models--<owner>--<name>` or `datasets--<owner>--<name>` in the cache.
    folder: PathBuf,
    cache: CacheRepo,
    /// The commit that the first file came from; all others must come from it too.
    commit: OnceCell<String>,
}

impl<'a> Repo<'a> {
    /// The repository of a model.
    pub(super) fn open(id: &'a str, options: &'a HubOptions, progress: &'a dyn Fn(Progress)) -> Result<Self> {
        Self::of_kind(RepoType::Model, id, options, progress)
    }

    /// The repository of a data set.
    pub(super) fn data_set(
        id: &'a str,
        options: &'a HubOptions,
        progress: &'a dyn Fn(Progress),
    ) -> Result<Self> {
        Self::of_kind(RepoType::Dataset, id, options, progress)
    }

    fn of_kind(
        kind: RepoType,
        id: &'a str,
        options: &'a HubOptions,
        progress: &'a dyn Fn(Progress),
    ) -> Result<Self> {
        let names = Names::new(id.to_owned(), kind);
        Ok(Self {
            id,
            kind,
            options,
            client: Client::new(options)?,
            progress,
            folder: options.cache.join(names.folder_name()),
            cache: Cache::new(options.cache.clone()).repo(names),
            commit: OnceCell::new(),
        })
    }

    /// The local path of `file`, fetched when it is not there; `None` when the repository (offline: the
    /// cache) does not hold it.
    pub(super) fn get(&self, file: &str) -> Result<Option<PathBuf>> {
        // A commit cannot change: what the cache holds of one is current.
        if let Some(path) = self.known_commit().and_then(|commit| self.snapshot(commit, file)) {
            return Ok(Some(path));
        }
        if self.options.offline {
            return Ok(self.cached(file));
        }
        match self.client.head(&self.address(file, self.revision())) {
            Ok(Head::File(found)) => {
                let path = self.fetch(file, &found).map_err(|refusal| self.explain(file, refusal))?;
                let _ = self.commit.set(found.commit);
                Ok(Some(path))
            }
            Ok(Head::Absent { commit }) => {
                self.note_absent(file, commit.as_deref());
                Ok(None)
            }
            // Without a network the cached file is used.
            Err(refusal) => match self.cached(file).filter(|_| refusal.is_passing()) {
                Some(path) => Ok(Some(path)),
                None => Err(self.explain(file, refusal)),
            },
        }
    }

    /// The error for `files` that were not found: no such repository, no such revision, or only no such file.
    pub(super) fn absent(&self, files: &str) -> Error {
        if self.options.offline {
            return self.asked().not_cached(files);
        }
        let address = self.client.address(&format!("api/{}", self.names(self.revision()).api_url()));
        match self.client.get(&address, None, None) {
            Err(Refusal::Status { status, code }) if status.as_u16() == 404 => {
                self.asked().no_revision(code.as_deref())
            }
            _ => self.asked().no_file(files),
        }
    }

    /// The path of `file` in the cache; the blob is fetched when the cache lacks it.
    fn fetch(&self, file: &str, found: &Found) -> Result<PathBuf, Refusal> {
        if let Some(path) = self.snapshot(&found.commit, file) {
            // Offline runs find the commit there; a cache that nobody may write stays as it is.
            let _ = self.write_ref(&found.commit);
            return Ok(path);
        }
        let report = |bytes, total| (self.progress)(Progress { file: file.to_owned(), bytes, total });
        let download = Download {
            client: &self.client,
            // The revision may stand for another commit by now.
            address: self.address(file, &found.commit),
            repo: &self.folder,
            file,
            found,
            report: &report,
        };
        let blob = download.run()?;
        let path = self.cache.pointer_path(&found.commit).join(file);
        link(&blob, &path, Path::new(file).components().count() + 1)?;
        self.write_ref(&found.commit)?;
        Ok(path)
    }

    /// The commit that files must come from, where it is known without asking.
    fn known_commit(&self) -> Option<&str> {
        let is_commit =
            |revision: &&str| revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit());
        self.commit.get().map(String::as_str).or_else(|| self.options.revision.as_deref().filter(is_commit))
    }

    /// `file` as the cache holds it for the revision, and its commit remembered.
    fn cached(&self, file: &str) -> Option<PathBuf> {
        let commit = match self.known_commit() {
            Some(commit) => commit.to_owned(),
            None => fs::read_to_string(self.ref_path()).ok()?.trim().to_owned(),
        };
        let path = self.snapshot(&commit, file)?;
        let _ = self.commit.set(commit);
        Some(path)
    }

    fn snapshot(&self, commit: &str, file: &str) -> Option<PathBuf> {
        Some(self.cache.pointer_path(commit).join(file)).filter(|path| path.exists())
    }

    fn ref_path(&self) -> PathBuf {
        self.folder.join("refs").join(self.options.revision.as_deref().unwrap_or(MAIN))
    }

    /// Notes in the cache that the revision is `commit`.
    fn write_ref(&self, commit: &str) -> io::Result<()> {
        let path = self.ref_path();
        if self.known_commit().is_some() || fs::read_to_string(&path).is_ok_and(|text| text.trim() == commit)
        {
            return Ok(());
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        fs::create_dir_all(folder)?;
        replace(&path, |partial| fs::write(partial, commit))
    }

    /// Notes where Python looks that the commit lacks the file.
    fn note_absent(&self, file: &str, commit: Option<&str>) {
        let Some(commit) = commit else { return };
        let path = self.folder.join(".no_exist").join(commit).join(file);
        if let Some(folder) = path.parent() {
            let _ = fs::create_dir_all(folder).and_then(|()| fs::write(&path, ""));
        }
    }

    fn explain(&self, file: &str, refusal: Refusal) -> Error {
        self.asked().explain(file, refusal)
    }

    fn asked(&self) -> Asked<'_> {
        let what = if matches!(self.kind, RepoType::Dataset) { "data set" } else { "model" };
        Asked { id: self.id, what, options: self.options }
    }

    fn revision(&self) -> &str {
        self.commit.get().map(String::as_str).or(self.options.revision.as_deref()).unwrap_or(MAIN)
    }

    /// Name of this repository in addresses.
    fn names(&self, revision: &str) -> Names {
        Names::with_revision(self.id.to_owned(), self.kind, client::encode(revision))
    }

    fn address(&self, file: &str, revision: &str) -> String {
        let names = self.names(revision);
        let (model, revision) = (names.url(), names.url_revision());
        self.client.address(&format!("{model}/resolve/{revision}/{}", client::encode(file)))
    }
}

/// Lets `path`, `depth` folders below that of the repository's parts, stand for `blob`.
fn link(blob: &Path, path: &Path, depth: usize) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new("")))?;
    let mut target = PathBuf::from("../".repeat(depth));
    target.push("blobs");
    target.push(blob.file_name().unwrap_or_default());
    // On systems without links, a copy is made.
    replace(path, |partial| symlink(&target, partial).or_else(|_| fs::copy(blob, partial).map(|_| ())))
}

#[cfg(unix)]
fn symlink(target: &Path, path: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

#[cfg(not(unix))]
fn symlink(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Creates with `make` and renames to `path`: others see the old content or all of the new.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    static MADE: AtomicU64 = AtomicU64::new(0);
    let made = MADE.fetch_add(1, Ordering::Relaxed);
    let partial = path.with_file_name(format!(".engraft-{}-{made}", process::id()));
    // A process that was killed may have left a file with the same number.
    let _ = fs::remove_file(&partial);
    make(&partial)?;
    fs::rename(&partial, path).inspect_err(|_| drop(fs::remove_file(&partial)))
}
