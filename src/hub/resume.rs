//! Going on with a download that was cut.
//!
//! The client writes a file front to back into `blobs/<etag>.incomplete` and starts from nothing at the
//! next try. So each download leaves a note of its etag and size; the next try fetches the missing
//! ranges itself and puts the blob in place, where the client finds it.

use std::{
    fs::{self, File},
    io::{self, Write},
    ops::Range,
    path::{Path, PathBuf},
};

use hf_hub::{HFError, HFResult};
use serde::{Deserialize, Serialize};

/// Bytes asked for at once: what a second cut can lose, and what is held in memory.
const CHUNK: u64 = 8 << 20;

/// Which blob a file's download writes to.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    etag: String,
    size: u64,
}

/// The unfinished download of one file, if there is one.
pub(super) struct Partial {
    /// `models--<owner>--<name>` in the cache.
    repo: PathBuf,
    note: PathBuf,
}

impl Partial {
    pub(super) fn new(repo: &Path, file: &str) -> Self {
        let name = file.replace('/', "--");
        Self { repo: repo.to_owned(), note: repo.join(".engraft").join(format!("{name}.json")) }
    }

    pub(super) fn is_noted(&self) -> bool {
        self.note.exists()
    }

    /// Notes the blob that the client has just begun: the one that is still empty. With two of them
    /// (another process at work) nothing is noted, which costs a second download and no more.
    pub(super) fn note(&self, size: u64) {
        let Ok(entries) = fs::read_dir(self.repo.join("blobs")) else { return };
        let mut begun = entries.flatten().filter_map(|entry| {
            let name = entry.file_name().to_str()?.strip_suffix(".incomplete")?.to_owned();
            entry.metadata().is_ok_and(|metadata| metadata.len() == 0).then_some(name)
        });
        if let (Some(etag), None) = (begun.next(), begun.next())
            && let Ok(text) = serde_json::to_string(&Note { etag, size })
            && let Some(folder) = self.note.parent()
        {
            let _ = fs::create_dir_all(folder).and_then(|()| fs::write(&self.note, text));
        }
    }

    pub(super) fn forget(&self) {
        let _ = fs::remove_file(&self.note);
        if let Some(folder) = self.note.parent() {
            // Only when it is empty.
            let _ = fs::remove_dir(folder);
        }
    }

    /// Fetches what is missing through `fetch` and turns the incomplete file into the blob.
    ///
    /// A note that fits nothing is dropped: the client then starts anew.
    pub(super) fn finish<B: AsRef<[u8]>>(
        &self,
        locks: &Path,
        fetch: impl Fn(Range<u64>) -> HFResult<B>,
        report: impl Fn(u64, u64),
    ) -> HFResult<()> {
        let note = fs::read(&self.note).ok().and_then(|text| serde_json::from_slice::<Note>(&text).ok());
        let Some(note) = note.filter(|note| is_file_name(&note.etag)) else {
            self.forget();
            return Ok(());
        };
        let _lock = self.lock(locks, &note.etag)?;
        let blob = self.repo.join("blobs").join(&note.etag);
        let incomplete = self.repo.join("blobs").join(format!("{}.incomplete", note.etag));
        let begun = fs::metadata(&incomplete).map_or(0, |metadata| metadata.len());
        if blob.exists() || begun == 0 || begun > note.size {
            self.forget();
            return Ok(());
        }
        let mut file = File::options().append(true).open(&incomplete)?;
        let mut bytes = begun;
        report(bytes, note.size);
        while bytes < note.size {
            let range = bytes..note.size.min(bytes + CHUNK);
            let chunk = fetch(range.clone())?;
            if chunk.as_ref().len() as u64 != range.end - range.start {
                // The server knows no ranges.
                self.forget();
                return Ok(());
            }
            file.write_all(chunk.as_ref())?;
            bytes = range.end;
            report(bytes, note.size);
        }
        file.sync_all()?;
        fs::rename(&incomplete, &blob)?;
        self.forget();
        Ok(())
    }

    /// The lock that every program on this cache takes before it writes the blob.
    fn lock(&self, locks: &Path, etag: &str) -> HFResult<File> {
        let name = self.repo.file_name().ok_or_else(|| HFError::Io(io::ErrorKind::InvalidInput.into()))?;
        Ok(lock_file(&locks.join(name), etag)?)
    }
}

/// Waits for the lock `<folder>/<name>.lock` and holds it while the file lives.
pub(super) fn lock_file(folder: &Path, name: &str) -> io::Result<File> {
    fs::create_dir_all(folder)?;
    let file = File::create(folder.join(format!("{name}.lock")))?;
    file.lock()?;
    Ok(file)
}

/// A note could have been tampered with; an etag is letters and digits.
fn is_file_name(etag: &str) -> bool {
    !etag.is_empty() && etag.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}
