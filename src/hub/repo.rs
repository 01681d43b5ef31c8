//! One repository of the hub: its files, fetched into the shared cache or found there.

use std::{
    cell::OnceCell,
    fs::{self, File},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, mpsc::Sender},
    time::Duration,
};

use hf_hub::{
    HFClient, HFError, HFRepositorySync, HFResult,
    progress::{DownloadEvent, FileStatus, ProgressEvent, ProgressHandler},
    repository::RepoTypeModel,
};

use super::{
    HubOptions, Progress,
    explain::Asked,
    resume::{Partial, lock_file},
};
use crate::error::{Error, Result};

/// No header can carry this, so the client sends none: without a token of its own it would look for one
/// in the environment and in the user's home.
const NO_TOKEN: &str = "\n";

/// A model repository, asked for one file after the other.
pub(super) struct Repo<'a> {
    id: &'a str,
    options: &'a HubOptions,
    model: HFRepositorySync<RepoTypeModel>,
    sender: Sender<Option<Progress>>,
    /// The commit that the first file came from; all others must come from it too.
    commit: OnceCell<String>,
    /// One of our processes at a time: the client takes links away for a moment while it renews them.
    _lock: Option<File>,
}

impl<'a> Repo<'a> {
    pub(super) fn open(
        id: &'a str,
        options: &'a HubOptions,
        sender: Sender<Option<Progress>>,
    ) -> Result<Self> {
        let mut client = HFClient::builder()
            .cache_dir(&options.cache)
            .token(options.token.as_deref().unwrap_or(NO_TOKEN))
            .user_agent(concat!("engraft/", env!("CARGO_PKG_VERSION")))
            .retry_max_attempts(3)
            .retry_base_delay(Duration::from_millis(200));
        if let Some(endpoint) = &options.endpoint {
            client = client.endpoint(endpoint);
        }
        let client = client.build_sync().map_err(|cause| {
            let endpoint = options.endpoint.as_deref().unwrap_or("of the client library");
            Error::input(format!("the hub's address {endpoint} cannot be used: {cause}; check HF_ENDPOINT"))
        })?;
        let (owner, name) = hf_hub::split_id(id);
        let model = client.model(owner, name);
        // A cache that nobody may write can still be read.
        let lock = || lock_file(&options.cache.join(".locks").join(folder_name(id)), "engraft").ok();
        let lock = if options.offline { None } else { lock() };
        Ok(Self { id, options, model, sender, commit: OnceCell::new(), _lock: lock })
    }

    /// The local path of `file`, fetched when it is not there; `None` when the repository (offline: the
    /// cache) does not hold it.
    pub(super) fn get(&self, file: &str) -> Result<Option<PathBuf>> {
        match self.current(file) {
            Some(Ok(path)) => {
                self.pin(file, &path);
                return Ok(Some(path));
            }
            Some(Err(HFError::EntryNotFound { .. })) => return Ok(None),
            // Without a network what the cache holds will do.
            Some(Err(cause)) => {
                let cached =
                    self.download(file, true, None).map_err(|_| self.asked().explain(file, &cause))?;
                self.pin(file, &cached);
                return Ok(Some(cached));
            }
            None => {}
        }
        self.resume(file)?;
        let watch = Arc::new(Watch::new(self, file));
        match self.download(file, self.options.offline, Some(Arc::clone(&watch))) {
            Ok(path) => {
                self.check_size(file, &path, watch.total())?;
                self.partial(file).forget();
                self.pin(file, &path);
                Ok(Some(path))
            }
            Err(HFError::EntryNotFound { .. } | HFError::LocalEntryNotFound { .. }) => Ok(None),
            Err(cause) => Err(self.asked().explain(file, &cause)),
        }
    }

    fn download(&self, file: &str, cached_only: bool, watch: Option<Arc<Watch>>) -> HFResult<PathBuf> {
        let call = self.model.download_file().filename(file).revision(self.revision());
        call.local_files_only(cached_only).maybe_progress(watch).send()
    }

    /// `file` of the commit that the revision stands for now, when the cache holds it. Asks the hub, but
    /// unlike a download touches no link that another process may be reading through. The errors are those
    /// that a download could not mend: no such file, no network.
    fn current(&self, file: &str) -> Option<HFResult<PathBuf>> {
        if self.options.offline || self.commit.get().is_some() {
            return None;
        }
        let commit = match self.model.get_file_metadata().filepath(file).revision(self.revision()).send() {
            Ok(found) => found.commit_hash,
            Err(cause) => {
                return matches!(cause, HFError::EntryNotFound { .. } | HFError::Request { .. })
                    .then_some(Err(cause));
            }
        };
        let path = self.folder().join("snapshots").join(&commit).join(file);
        path.exists().then(|| {
            // Offline runs find the commit there; a cache that nobody may write stays as it is.
            let _ = self.write_ref(&commit);
            Ok(path)
        })
    }

    /// Lets the revision stand for `commit` in the cache.
    fn write_ref(&self, commit: &str) -> std::io::Result<()> {
        let path = self.folder().join("refs").join(self.revision());
        if self.revision() == commit || fs::read_to_string(&path).is_ok_and(|text| text.trim() == commit) {
            return Ok(());
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        fs::create_dir_all(folder)?;
        let partial = folder.join(format!(".{}", std::process::id()));
        fs::write(&partial, commit)?;
        fs::rename(partial, path)
    }

    /// Why nothing of `files` was found: the repository, the revision, or only the file.
    pub(super) fn absent(&self, files: &str) -> Error {
        if self.options.offline {
            return self.asked().not_cached(files);
        }
        match self.model.info().revision(self.revision()).send() {
            Err(cause @ (HFError::RepoNotFound { .. } | HFError::RevisionNotFound { .. })) => {
                self.asked().explain(files, &cause)
            }
            _ => self.asked().no_file(files),
        }
    }

    fn asked(&self) -> Asked<'_> {
        Asked { id: self.id, options: self.options }
    }

    fn revision(&self) -> &str {
        let given = self.options.revision.as_deref().unwrap_or("main");
        self.commit.get().map_or(given, String::as_str)
    }

    /// Remembers the commit whose snapshot `path` lies in: `snapshots/<commit>/<file>`.
    fn pin(&self, file: &str, path: &Path) {
        let snapshot = path.ancestors().nth(Path::new(file).components().count());
        if let Some(commit) = snapshot.and_then(Path::file_name).and_then(|name| name.to_str()) {
            let _ = self.commit.set(commit.to_owned());
        }
    }

    /// The folder of this repository in the cache.
    fn folder(&self) -> PathBuf {
        self.options.cache.join(folder_name(self.id))
    }

    fn partial(&self, file: &str) -> Partial {
        Partial::new(&self.folder(), file)
    }

    /// Completes what an earlier try began, so that the client finds the file whole.
    fn resume(&self, file: &str) -> Result<()> {
        let partial = self.partial(file);
        if self.options.offline || !partial.is_noted() {
            return Ok(());
        }
        let locks = self.options.cache.join(".locks");
        let fetch = |range: std::ops::Range<u64>| {
            self.model.download_file_to_bytes().filename(file).revision(self.revision()).range(range).send()
        };
        let report = |bytes, total| {
            let _ = self.sender.send(Some(Progress { file: file.to_owned(), bytes, total }));
        };
        partial.finish(&locks, fetch, report).map_err(|cause| self.asked().explain(file, &cause))
    }

    /// The client stores whatever a server answers: a page of an error must not stay as a file.
    fn check_size(&self, file: &str, path: &Path, total: u64) -> Result<()> {
        let size = fs::metadata(path).map_err(|cause| Error::reading(path, &cause))?.len();
        if total == 0 || size == total {
            return Ok(());
        }
        if let Ok(blob) = path.canonicalize() {
            let _ = fs::remove_file(blob);
        }
        let _ = fs::remove_file(path);
        Err(Error::failed(format!(
            "{}: the hub sent {size} of the {total} bytes of {file}; try again",
            self.id
        )))
    }
}

fn folder_name(id: &str) -> String {
    format!("models--{}", id.replace('/', "--"))
}

/// Passes the client's events on, and notes the file it writes to for a later try.
struct Watch {
    file: String,
    sender: Sender<Option<Progress>>,
    partial: Partial,
    total: Mutex<u64>,
}

impl Watch {
    fn new(repo: &Repo, file: &str) -> Self {
        Self {
            file: file.to_owned(),
            sender: repo.sender.clone(),
            partial: repo.partial(file),
            total: Mutex::new(0),
        }
    }

    fn total(&self) -> u64 {
        *self.total.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, bytes: u64, total: u64) {
        let _ = self.sender.send(Some(Progress { file: self.file.clone(), bytes, total }));
    }
}

impl ProgressHandler for Watch {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(event) = event else { return };
        match event {
            DownloadEvent::Start { total_bytes, .. } => {
                *self.total.lock().unwrap_or_else(PoisonError::into_inner) = *total_bytes;
            }
            DownloadEvent::Progress { files } => {
                for file in files {
                    if file.status == FileStatus::Started {
                        self.partial.note(file.total_bytes);
                    }
                    self.send(file.bytes_completed, file.total_bytes);
                }
            }
            // Only the chunked protocol reports so, and it does not write front to back.
            DownloadEvent::AggregateProgress { bytes_completed, total_bytes, .. } => {
                self.partial.forget();
                self.send(*bytes_completed, *total_bytes);
            }
            DownloadEvent::Complete => {}
        }
    }
}
