//! Parquet files as JSON lines: each row becomes an object with a key for each column.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parquet::{
    file::reader::{FileReader, SerializedFileReader},
    record::reader::RowIter,
};

use crate::error::{Error, Result};

/// The rows of the file at `path`, an object in JSON a line; row n is line n. `counter` counts up to the bytes of
/// the file, evenly over its rows.
///
/// # Errors
/// When it cannot be opened, or is no Parquet file.
pub(super) fn open(path: &Path, counter: Arc<AtomicU64>) -> Result<Box<dyn Read + Send>> {
    let failed = |cause| Error::reading(path, &cause);
    let file = File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    let reader = SerializedFileReader::new(file).map_err(|cause| {
        Error::input(format!(
            "{}: is no whole Parquet file ({cause}); fetch it again, or give --data-format",
            path.display()
        ))
    })?;
    let count = reader.metadata().file_metadata().num_rows().max(0) as u64;
    let rows = RowIter::from_file_into(Box::new(reader));
    Ok(Box::new(Rows { rows, line: Vec::new(), read: 0, count, done: 0, bytes, counter }))
}

struct Rows {
    rows: RowIter<'static>,
    /// The row that is read, as a line.
    line: Vec<u8>,
    /// Bytes of `line` that were read.
    read: usize,
    /// Rows of the file.
    count: u64,
    /// Rows brought so far, with the one in `line`.
    done: u64,
    /// Bytes of the file.
    bytes: u64,
    counter: Arc<AtomicU64>,
}

impl Rows {
    /// Brings the next row; false after the last one.
    fn next(&mut self) -> io::Result<bool> {
        let Some(row) = self.rows.next() else { return Ok(false) };
        let damaged = |cause| io::Error::new(io::ErrorKind::InvalidData, cause);
        let value = row.map_err(damaged)?.to_json_value();
        self.line.clear();
        self.read = 0;
        serde_json::to_writer(&mut self.line, &value)?;
        self.line.push(b'\n');
        let share =
            |rows: u64| (u128::from(self.bytes) * u128::from(rows) / u128::from(self.count.max(1))) as u64;
        self.counter.fetch_add(share(self.done + 1) - share(self.done), Ordering::Relaxed);
        self.done += 1;
        Ok(true)
    }
}

impl Read for Rows {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.read == self.line.len() && !self.next()? {
            return Ok(0);
        }
        let read = (&self.line[self.read..]).read(bytes)?;
        self.read += read;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::Value;

    use super::*;
    use crate::data::{
        Split, load,
        testing::{options, tokenizer},
    };

    const FILES: [(&str, &str); 6] = [
        ("pairs", "pairs_plain"),
        ("pairs", "pairs_snappy"),
        ("pairs", "pairs_gzip"),
        ("pairs", "pairs_zstd"),
        ("pairs", "pairs_lz4"),
        ("turns", "turns_snappy"),
    ];

    fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/parquet").join(name)
    }

    fn values(lines: &str) -> Vec<Value> {
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Files of PyArrow (tests/golden/make_parquet.py), each packed in another way, in groups of 4 rows.
    #[test]
    fn rows_are_the_records_that_were_written() {
        for (records, file) in FILES {
            let path = golden(&format!("{file}.parquet"));
            let counter = Arc::new(AtomicU64::new(0));
            let mut lines = String::new();
            open(&path, Arc::clone(&counter)).unwrap().read_to_string(&mut lines).unwrap();
            let expected = std::fs::read_to_string(golden(&format!("{records}.jsonl"))).unwrap();
            assert_eq!(values(&lines), values(&expected), "{file}");
            assert_eq!(counter.load(Ordering::Relaxed), path.metadata().unwrap().len(), "{file}");
        }
    }

    #[test]
    fn they_train_as_the_same_records_in_lines_do() {
        let tokenizer = tokenizer();
        for (records, file) in FILES {
            let rows = |name: String| {
                load(&[golden(&name)], Split::Train, Some(&tokenizer), &options(64)).unwrap().fingerprint
            };
            assert_eq!(rows(format!("{file}.parquet")), rows(format!("{records}.jsonl")), "{file}");
        }
    }

    #[test]
    fn a_file_that_is_cut_or_damaged_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        let whole = std::fs::read(golden("pairs_gzip.parquet")).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let error = open(&path, Arc::default()).err().unwrap();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(
            text.contains("a.parquet: is no whole Parquet file (") && text.contains("fetch it again"),
            "{text}"
        );
        // The middle of the first packed page.
        let mut damaged = whole;
        damaged[60..80].fill(0xAA);
        std::fs::write(&path, damaged).unwrap();
        let read = open(&path, Arc::default()).map(|mut from| from.read_to_end(&mut Vec::new()));
        assert!(read.is_err() || read.is_ok_and(|read| read.is_err()));
    }
}
