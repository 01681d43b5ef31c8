//! A file that grows by whole records and survives a process that is killed in the middle of one.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// A file to which whole records are appended, each in one write.
#[derive(Debug)]
pub struct Appender {
    path: PathBuf,
    file: File,
    /// Bytes of all whole records.
    len: u64,
}

impl Appender {
    /// Opens the file at `path`, or makes it; what lies beyond `len` bytes is cut off.
    ///
    /// # Errors
    /// Those of the system.
    pub fn open(path: &Path, len: u64) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let there = file.metadata()?.len();
        if there > len {
            file.set_len(len)?;
        }
        Ok(Self { path: path.to_owned(), file, len: there.min(len) })
    }

    /// Appends a record. When that fails, what was written of it is cut off: the next record follows a whole one.
    ///
    /// # Errors
    /// Those of the system, such as a full disk.
    pub fn append(&mut self, record: &[u8]) -> io::Result<()> {
        match self.file.write_all(record) {
            Ok(()) => {
                self.len += record.len() as u64;
                Ok(())
            }
            Err(cause) => {
                let _ = self.file.set_len(self.len);
                Err(cause)
            }
        }
    }

    /// Waits until all records are on the disk.
    ///
    /// # Errors
    /// Those of the system.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beyond_the_whole_records_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        std::fs::write(&path, "one\ntwo\nthr").unwrap();
        let mut file = Appender::open(&path, 8).unwrap();
        file.append(b"3\n").unwrap();
        file.append(b"4\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n3\n4\n");
    }
}
