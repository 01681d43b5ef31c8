//! The cache folder: copies and a fingerprint for each source, found by the source's identity.
//!
//! `<cache>/<key>/model.safetensors` is the FP16 copy (absent when the source itself is mapped) and
//! `<cache>/<key>/fingerprint` its fingerprint, written last; `model-q8.safetensors` and `fingerprint-q8` are the same
//! with 8-bit codes, `-nf4` with 4-bit codes. All appear by rename, so whoever reads them sees a whole file or none.

use std::{
    fs::{self, File, Metadata, TryLockError},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use engraft_util::unfinished::{self, Unfinished};
use tempfile::NamedTempFile;

use super::{
    base_dtype::BaseDType,
    convert::{FORM as FINGERPRINT_FORM, Sink},
    names::Wanted,
    source::Source,
};
use crate::error::{Error, Result};

/// Changes whenever the files under a key would change for the same source.
const FORM: &[u8] = b"engraft cache 2";

/// The beginning of the names of unfinished files.
const PARTIAL: &str = ".partial-";
/// The file that a converting process locks.
const LOCK: &str = ".lock";

/// The place of one source in the cache.
pub(super) struct Entry {
    folder: PathBuf,
    dtype: BaseDType,
    /// Folder of the source, for people.
    origin: Option<PathBuf>,
}

impl Entry {
    /// Where `source`, read as `wanted`, is kept in `dtype`: keyed by the path, size and times of each of its files.
    pub(super) fn of(cache: &Path, source: &Source, wanted: &[Wanted], dtype: BaseDType) -> Result<Self> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(FORM);
        let first = source.files.first().and_then(|file| file.path.parent());
        let origin = first.and_then(|folder| folder.canonicalize().ok());
        for file in &source.files {
            let read = |cause| Error::reading(&file.path, &cause);
            let path = file.path.canonicalize().map_err(read)?;
            let metadata = fs::metadata(&path).map_err(read)?;
            hasher.update(format!("{path:?} {} {:?}\n", metadata.len(), times(&metadata)).as_bytes());
        }
        // The same files under another config.json are another base.
        hasher.update(described(wanted).as_bytes());
        let key = hasher.finalize().to_hex();
        Ok(Self { folder: cache.join(&key.as_str()[..32]), dtype, origin })
    }

    /// The file of the copy.
    pub(super) fn model(&self) -> PathBuf {
        self.folder.join(match self.dtype {
            BaseDType::F16 => "model.safetensors",
            BaseDType::Q8 => "model-q8.safetensors",
            BaseDType::Nf4 => "model-nf4.safetensors",
        })
    }

    fn record(&self) -> PathBuf {
        self.folder.join(match self.dtype {
            BaseDType::F16 => "fingerprint",
            BaseDType::Q8 => "fingerprint-q8",
            BaseDType::Nf4 => "fingerprint-nf4",
        })
    }

    /// The fingerprint that was kept, if one was and the copy is still the file it was kept for.
    pub(super) fn fingerprint(&self) -> Option<String> {
        let text = fs::read_to_string(self.record()).ok()?;
        let (fingerprint, copy) = text.strip_suffix('\n')?.split_once('\n')?;
        (fingerprint.starts_with(FINGERPRINT_FORM) && copy == self.copy()).then(|| fingerprint.to_owned())
    }

    /// Size and times of the copy, `none` without one: a copy that was written to is made anew.
    fn copy(&self) -> String {
        match fs::metadata(self.model()) {
            Ok(metadata) => format!("{} {:?}", metadata.len(), times(&metadata)),
            Err(_) => "none".to_owned(),
        }
    }

    /// Keeps the fingerprint, of the copy if there is one.
    pub(super) fn keep(&self, fingerprint: &str) -> Result<()> {
        self.note_origin();
        let path = self.record();
        let (mut file, _unfinished) = self.temporary(&path)?;
        let written = file.write_all(format!("{fingerprint}\n{}\n", self.copy()).as_bytes());
        written.map_err(|cause| Error::writing(&path, &cause))?;
        finish(file, &path)
    }

    /// Notes for people where the source is. Nothing reads it to decide anything, so a failure is passed over.
    fn note_origin(&self) {
        let path = self.folder.join("source");
        if let Some(origin) = &self.origin
            && !path.exists()
            && let Ok((mut file, _unfinished)) = self.temporary(&path)
            && writeln!(file, "{}", origin.display()).is_ok()
        {
            let _ = finish(file, &path);
        }
    }

    /// Writes the copy through `write`, which returns its fingerprint.
    pub(super) fn write_model(&self, write: impl FnOnce(&mut Sink) -> Result<String>) -> Result<String> {
        let path = self.model();
        let (mut file, _unfinished) = self.temporary(&path)?;
        let mut buffered = BufWriter::with_capacity(1 << 20, file.as_file_mut());
        let fingerprint = write(&mut Sink { file: &mut buffered, path: &path, at: 0 })?;
        buffered.flush().map_err(|cause| Error::writing(&path, &cause))?;
        drop(buffered);
        finish(file, &path)?;
        Ok(fingerprint)
    }

    /// A file beside `path` that vanishes unless it is finished; its mode comes from the umask.
    fn temporary(&self, path: &Path) -> Result<(NamedTempFile, Unfinished)> {
        let failed = |cause| Error::writing(path, &cause);
        fs::create_dir_all(&self.folder).map_err(failed)?;
        let mut builder = tempfile::Builder::new();
        builder.prefix(PARTIAL);
        #[cfg(unix)]
        builder.permissions(<fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666));
        let make = || builder.tempfile_in(&self.folder);
        unfinished::file(make, |file| file.path().to_owned()).map_err(failed)
    }
}

/// Removes from the folder `cache` the unfinished files of processes that were killed while they wrote. Where
/// that fails they stay for another time.
pub(super) fn remove_leftovers(cache: &Path) {
    let Ok(entries) = fs::read_dir(cache) else { return };
    for folder in entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir()) {
        let partial =
            |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PARTIAL));
        let files = fs::read_dir(&folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
        let leftovers: Vec<PathBuf> = files.filter(partial).collect();
        // A process that writes there holds the lock, wherever it runs; an id of a process would not be
        // known outside its container.
        if leftovers.is_empty() {
            continue;
        }
        if let Some(Hold { _lock: Some(_) }) = Hold::try_on(&folder) {
            leftovers.iter().for_each(|path| drop(fs::remove_file(path)));
        }
    }
}

/// Names and shapes of all tensors, in the words that keys were made of from the first version on.
fn described(wanted: &[Wanted]) -> String {
    let tensors =
        wanted.iter().map(|Wanted { name, shape }| format!("Wanted {{ name: {name:?}, shape: {shape:?} }}"));
    format!("[{}]", tensors.collect::<Vec<_>>().join(", "))
}

/// Puts a written file in its place, on disk before it is seen.
fn finish(file: NamedTempFile, path: &Path) -> Result<()> {
    file.as_file().sync_all().map_err(|cause| Error::writing(path, &cause))?;
    file.persist(path).map_err(|failure| Error::writing(path, &failure.error))?;
    Ok(())
}

/// One converting process at a time; the others wait and find the copy.
pub(super) struct Hold {
    _lock: Option<File>,
}

impl Hold {
    pub(super) fn on(entry: &Entry) -> Result<Self> {
        let path = entry.folder.join(LOCK);
        fs::create_dir_all(&entry.folder).map_err(|cause| Error::writing(&path, &cause))?;
        let file = File::create(&path).map_err(|cause| Error::writing(&path, &cause))?;
        // Where the file system knows no locks, two processes convert twice: wasteful, not wrong.
        Ok(Self { _lock: file.lock().is_ok().then_some(file) })
    }

    /// The hold on an entry whose lock nobody has now.
    pub(super) fn at_once(entry: &Entry) -> Option<Self> {
        fs::create_dir_all(&entry.folder).ok()?;
        Self::try_on(&entry.folder)
    }

    fn try_on(folder: &Path) -> Option<Self> {
        let file = File::create(folder.join(LOCK)).ok()?;
        match file.try_lock() {
            Ok(()) => Some(Self { _lock: Some(file) }),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Error(_)) => Some(Self { _lock: None }),
        }
    }
}

/// Modification time, and on Unix the change time, which no copying tool sets back.
fn times(metadata: &Metadata) -> (u128, i128) {
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    #[cfg(unix)]
    let changed = {
        use std::os::unix::fs::MetadataExt;
        i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec())
    };
    #[cfg(not(unix))]
    let changed = 0;
    (modified.unwrap_or_default().as_nanos(), changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies that earlier versions made are found under keys of this text.
    #[test]
    fn tensors_are_described_as_ever() {
        let tensor = |name: &str, shape: &[usize]| Wanted { name: name.into(), shape: shape.to_vec() };
        assert_eq!(
            described(&[tensor("a.weight", &[3, 4]), tensor("b", &[5])]),
            r#"[Wanted { name: "a.weight", shape: [3, 4] }, Wanted { name: "b", shape: [5] }]"#
        );
    }
}
