//! Downloads one file of the hub into its cache, and continues a download that was cut.
//!
//! A file is written front to back into `blobs/<etag>.incomplete` and becomes `blobs/<etag>` when it is
//! whole. A second file notes that it was written so: other programs leave files of that name with gaps.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::client::{Client, Found, Refusal};

/// Bytes requested at a time when a download is continued: the most that a second cut can lose, and the most in memory.
const CHUNK: u64 = 8 << 20;

/// The blob that a download writes to.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Note {
    etag: String,
    size: u64,
}

/// The download of one file.
pub(super) struct Download<'a> {
    pub(super) client: &'a Client,
    pub(super) address: String,
    /// `models--<owner>--<name>` in the cache.
    pub(super) repo: &'a Path,
    /// Name of the file in its repository.
    pub(super) file: &'a str,
    pub(super) found: &'a Found,
    /// Called with the bytes on disk and the bytes of the whole file, 0 if that is unknown.
    pub(super) report: &'a dyn Fn(u64, u64),
}

impl Download<'_> {
    /// Downloads the blob unless it exists; waits for another process that downloads it.
    pub(super) fn run(&self) -> Result<PathBuf, Refusal> {
        let blobs = self.repo.join("blobs");
        let blob = blobs.join(&self.found.etag);
        if blob.exists() {
            return Ok(blob);
        }
        fs::create_dir_all(&blobs)?;
        let _lock = self.lock()?;
        if !blob.exists() {
            let incomplete = blobs.join(format!("{}.incomplete", self.found.etag));
            if !self.finish(&incomplete)? {
                self.fetch(&incomplete)?;
            }
            fs::rename(&incomplete, &blob)?;
        }
        self.forget();
        Ok(blob)
    }

    /// Fetches the whole file.
    fn fetch(&self, incomplete: &Path) -> Result<(), Refusal> {
        let answer = self.client.get(&self.address, None, self.found.size)?;
        let size = self.found.size.or(answer.length);
        let mut file = File::create(incomplete)?;
        if let Some(size) = size {
            self.note(size);
        }
        let mut body = answer.body.into_reader();
        let mut buffer = vec![0; 1 << 16];
        let mut bytes = 0;
        loop {
            (self.report)(bytes, size.unwrap_or(0));
            let read = body.read(&mut buffer).map_err(|cause| Refusal::cut(&cause))?;
            if read == 0 {
                break;
            }
            file.write_all(&buffer[..read])?;
            bytes += read as u64;
        }
        match size.filter(|&size| size != bytes) {
            None => Ok(file.sync_all()?),
            Some(size) => Err(Refusal::Cut(format!("{bytes} of {size} bytes came"))),
        }
    }

    /// Continues an earlier try, if there is one, and returns whether the file is complete. The bytes of a try that
    /// is cut are kept.
    fn finish(&self, incomplete: &Path) -> Result<bool, Refusal> {
        let Some(size) = self.found.size else { return Ok(false) };
        let note =
            fs::read(self.note_path()).ok().and_then(|text| serde_json::from_slice::<Note>(&text).ok());
        let mut bytes = fs::metadata(incomplete).map_or(0, |metadata| metadata.len());
        if note != Some(Note { etag: self.found.etag.clone(), size }) || bytes == 0 || bytes > size {
            return Ok(false);
        }
        let mut file = File::options().append(true).open(incomplete)?;
        (self.report)(bytes, size);
        while bytes < size {
            let range = bytes..size.min(bytes + CHUNK);
            let length = range.end - range.start;
            let answer = self.client.get(&self.address, Some(&range), Some(size))?;
            if !answer.partial {
                // The server knows no ranges.
                return Ok(false);
            }
            let mut chunk = Vec::new();
            let read = answer.body.into_reader().take(length + 1).read_to_end(&mut chunk);
            read.map_err(|cause| Refusal::cut(&cause))?;
            if chunk.len() as u64 != length {
                return Ok(false);
            }
            file.write_all(&chunk)?;
            bytes = range.end;
            (self.report)(bytes, size);
        }
        file.sync_all()?;
        Ok(true)
    }

    fn note_path(&self) -> PathBuf {
        self.repo.join(".engraft").join(format!("{}.json", self.file.replace('/', "--")))
    }

    /// Without the note the next try starts from the beginning, which is no reason to stop this one.
    fn note(&self, size: u64) {
        let path = self.note_path();
        let note = Note { etag: self.found.etag.clone(), size };
        if let Ok(text) = serde_json::to_string(&note)
            && let Some(folder) = path.parent()
        {
            let _ = fs::create_dir_all(folder).and_then(|()| fs::write(&path, text));
        }
    }

    fn forget(&self) {
        let path = self.note_path();
        let _ = fs::remove_file(&path);
        if let Some(folder) = path.parent() {
            // Only when it is empty.
            let _ = fs::remove_dir(folder);
        }
    }

    /// The lock that every program on this cache takes before it writes the blob.
    fn lock(&self) -> io::Result<File> {
        let name = self.repo.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let locks = self.repo.parent().unwrap_or(Path::new("")).join(".locks").join(name);
        fs::create_dir_all(&locks)?;
        let file = File::create(locks.join(format!("{}.lock", self.found.etag)))?;
        file.lock()?;
        Ok(file)
    }
}
