//! Storage of rows: flat 32-bit numbers, in memory up to 1 MiB, else in a mapped file.

use std::{
    fmt,
    fs::File,
    io::{self, Write},
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use memmap2::Mmap;
use tempfile::TempPath;

use super::batch::RowRef;
use crate::{
    device::page_cache::AROUND as AROUND_BYTES,
    error::{Error, Result},
};

/// Words that are kept in memory before they go to the file; data of fewer words get no file. 1 MiB.
const WAITING: usize = 256 << 10;

/// Words read in one pass before their pages are given back: 8 MiB.
const READ: usize = 2 << 20;

/// Words before and after a touched one that a system may map with it where they are in its cache: 2 MiB.
const AROUND: usize = AROUND_BYTES / 4;

// The file holds little-endian numbers and is read without conversion.
const _: () = assert!(cfg!(target_endian = "little"), "rows are mapped as little-endian numbers");

/// The numbers of all rows as 32-bit words.
///
/// For each row of length `t` its ids, targets and starts, `3 t` words; after the last row the
/// index: for each row, and for the end, the word where it begins, as two words, the low one first.
struct Store {
    words: Words,
    rows: usize,
    /// A file that can still be kept, with its temporary name; it is removed with the store.
    unkept: Mutex<Option<(File, TempPath)>>,
}

enum Words {
    Heap(Vec<u32>),
    /// A file without a name: the system deletes it when the process ends.
    Mapped(Mmap),
}

impl Store {
    fn words(&self) -> &[u32] {
        match &self.words {
            Words::Heap(words) => words,
            // SAFETY: every four bytes are a u32; a mapping begins on a page, so nothing is left over
            // before it, and after it only if the file were no whole number of words.
            Words::Mapped(map) => unsafe { map.align_to::<u32>() }.1,
        }
    }

    /// The words of row `index`.
    fn range(&self, index: usize) -> Range<usize> {
        self.offset(index)..self.offset(index + 1)
    }

    /// The word where row `index` begins; for the number of rows that where the index begins.
    fn offset(&self, index: usize) -> usize {
        let words = self.words();
        let entries = words[words.len() - 2 * (self.rows + 1)..].as_chunks::<2>().0;
        let [low, high] = entries[index];
        (u64::from(high) << 32 | u64::from(low)) as usize
    }

    fn row(&self, index: usize) -> RowRef<'_> {
        let words = &self.words()[self.range(index)];
        let (ids, rest) = words.split_at(words.len() / 3);
        let (targets, starts) = rest.split_at(ids.len());
        RowRef { ids, targets: signed(targets), starts }
    }

    /// Unmaps the pages of `words`: they stay in the system's cache of the file and are mapped
    /// again when read. Without it a pass over the rows would hold the whole file.
    fn release(&self, words: Range<usize>) {
        #[cfg(unix)]
        if let Words::Mapped(map) = &self.words {
            // SAFETY: the mapping is of a file, shared and read-only, so that pages given back are
            // read again with the same bytes.
            let advised = unsafe {
                map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    4 * words.start,
                    4 * words.len(),
                )
            };
            // Refused advice costs memory, nothing else.
            drop(advised);
        }
        #[cfg(not(unix))]
        drop(words);
    }
}

/// Two's complement, as [`Writer::push`] wrote it.
fn signed(words: &[u32]) -> &[i32] {
    // SAFETY: u32 and i32 have the same size and alignment, and every bit pattern is valid for both.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}

/// The bytes of `words`, little-endian.
pub(super) fn bytes_of(words: &[u32]) -> &[u8] {
    // SAFETY: a u32 is four bytes without padding, and a byte needs no alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

/// The rows of a data set, in the order of the files, or a part of them; never changed once made.
///
/// A clone and a part share the numbers.
#[derive(Clone)]
pub struct Rows {
    store: Arc<Store>,
    /// Rows of the store, ascending, some perhaps several times; `None`: all.
    part: Option<Arc<[u32]>>,
    longest: usize,
}

impl Rows {
    fn new(store: Arc<Store>, part: Option<Arc<[u32]>>) -> Self {
        let mut rows = Self { store, part, longest: 0 };
        rows.longest = rows.iter().map(|row| row.ids.len()).max().unwrap_or(0);
        rows
    }

    /// `rows` rows from a file of `bytes` bytes that [`Rows::persist`] wrote.
    ///
    /// # Errors
    /// When it cannot be mapped, or has another length.
    pub(super) fn open(path: &Path, rows: usize, bytes: u64) -> io::Result<Self> {
        let file = File::open(path)?;
        let index = 8 * (rows as u64 + 1);
        if file.metadata()?.len() != bytes || !bytes.is_multiple_of(4) || bytes < index {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: nobody writes to a file of the cache: it is put there whole by a rename, and only ever unlinked.
        let words = Words::Mapped(unsafe { Mmap::map(&file) }?);
        let store = Store { words, rows, unkept: Mutex::default() };
        if store.offset(rows) as u64 * 4 + index != bytes {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self::new(Arc::new(store), None))
    }

    /// Keeps the file of the rows as `path`.
    ///
    /// # Errors
    /// When they are in no file that can be kept, or it cannot be moved.
    pub(super) fn persist(&self, path: &Path) -> io::Result<()> {
        let unkept = self.store.unkept.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (file, name) = unkept.ok_or(io::ErrorKind::NotFound)?;
        // A machine that stops may else leave a file of the right length without its bytes.
        file.sync_all()?;
        name.persist(path).map_err(|error| error.error)
    }

    /// Rows of the set or of the part.
    pub fn len(&self) -> usize {
        self.part.as_ref().map_or(self.store.rows, |part| part.len())
    }

    /// Whether it has no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Row `index`; like a slice it panics unless `index < len()`.
    pub fn get(&self, index: usize) -> RowRef<'_> {
        self.store.row(self.place(index))
    }

    /// Releases the pages of row `index`, and those that the system mapped together with them.
    pub(super) fn release(&self, index: usize) {
        let row = self.store.range(self.place(index));
        let end = self.store.words().len().min(row.end + AROUND);
        self.store.release(row.start.saturating_sub(AROUND)..end);
    }

    /// All rows in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = RowRef<'_>> + '_ {
        (0..self.len()).map(|index| self.get(index))
    }

    /// Positions of the longest row.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Calls `visit` with every row in order, holding few of the pages it has read.
    pub(super) fn for_each(&self, mut visit: impl FnMut(RowRef)) {
        let mut read = 0..0;
        for index in 0..self.len() {
            let range = self.store.range(self.place(index));
            visit(self.get(index));
            read.end = range.end;
            if read.len() >= READ {
                self.store.release(read.clone());
                read.start = read.end;
            }
        }
        // Rows that are left, and the index.
        self.store.release(0..self.store.words().len());
    }

    /// The rows at `indices` (ascending, an index may come again), with the same numbers.
    pub(super) fn part(&self, indices: impl Iterator<Item = usize>) -> Self {
        let part = indices.map(|index| self.place(index) as u32).collect();
        Self::new(self.store.clone(), Some(part))
    }

    /// Bytes these rows hold: on the heap, and mapped from a file. Parts of the same rows share
    /// either, so that only their lists of rows (4 bytes a row) add up.
    pub fn memory(&self) -> (usize, usize) {
        let list = self.part.as_ref().map_or(0, |part| size_of_val(&part[..]));
        match &self.store.words {
            Words::Heap(words) => (list + words.capacity() * size_of::<u32>(), 0),
            Words::Mapped(map) => (list, map.len()),
        }
    }

    /// Row `index` in the store.
    fn place(&self, index: usize) -> usize {
        self.part.as_ref().map_or(index, |part| part[index] as usize)
    }
}

impl PartialEq for Rows {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl Eq for Rows {}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (heap, mapped) = self.memory();
        write!(f, "Rows({} rows, {heap} bytes on the heap, {mapped} mapped)", self.len())
    }
}

/// Writes rows one by one.
#[derive(Debug)]
pub(super) struct Writer {
    /// Folder for a file; `None`: everything stays in memory.
    folder: Option<PathBuf>,
    /// Whether the file has a name until the rows are dropped, so that it can be kept.
    keep: bool,
    file: Option<(File, Option<TempPath>)>,
    /// Words not yet in the file.
    waiting: Vec<u32>,
    /// Positions of each row: 4 bytes a row are in memory until the index is written.
    lengths: Vec<u32>,
}

impl Writer {
    pub(super) fn new(folder: Option<&Path>) -> Self {
        let folder = folder.map(Path::to_owned);
        Self { folder, keep: false, file: None, waiting: Vec::new(), lengths: Vec::new() }
    }

    /// A writer whose file in `folder` can be kept.
    pub(super) fn kept_in(folder: &Path) -> Self {
        Self { keep: true, ..Self::new(Some(folder)) }
    }

    /// Adds a row; all three slices have its length.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub(super) fn push(&mut self, row: RowRef) -> Result<()> {
        self.lengths.push(row.ids.len() as u32);
        self.waiting.extend_from_slice(row.ids);
        self.waiting.extend(row.targets.iter().map(|&target| target as u32));
        self.waiting.extend_from_slice(row.starts);
        self.relieve()
    }

    /// Number of rows so far.
    pub(super) fn len(&self) -> usize {
        self.lengths.len()
    }

    /// All rows that were pushed, in their order, mapped if they are in a file.
    ///
    /// # Errors
    /// When the folder cannot be written, or the file cannot be mapped.
    pub(super) fn finish(mut self) -> Result<Rows> {
        let rows = self.lengths.len();
        let mut begin = 0u64;
        for length in std::mem::take(&mut self.lengths).into_iter().chain([0]) {
            self.waiting.extend([begin as u32, (begin >> 32) as u32]);
            begin += 3 * u64::from(length);
            self.relieve()?;
        }
        let (words, unkept) = match self.file.take() {
            None => {
                self.waiting.shrink_to_fit();
                (Words::Heap(self.waiting), None)
            }
            Some((mut file, name)) => {
                let map = self.map(&mut file).map_err(|cause| self.refused(&cause))?;
                (Words::Mapped(map), name.map(|name| (file, name)))
            }
        };
        Ok(Rows::new(Arc::new(Store { words, rows, unkept: Mutex::new(unkept) }), None))
    }

    /// Writes the waiting words to the file once they are 1 MiB.
    fn relieve(&mut self) -> Result<()> {
        let Some(folder) = self.folder.as_deref().filter(|_| self.waiting.len() >= WAITING) else {
            return Ok(());
        };
        if self.file.is_none() {
            let made = match self.keep {
                true => {
                    let named = tempfile::Builder::new().prefix(".partial-").tempfile_in(folder);
                    named.map(|named| named.into_parts()).map(|(file, name)| (file, Some(name)))
                }
                false => tempfile::tempfile_in(nearest(folder)).map(|file| (file, None)),
            };
            self.file = Some(made.map_err(|cause| self.refused(&cause))?);
        }
        let waiting = bytes_of(&self.waiting);
        let written = self.file.as_mut().map_or(Ok(()), |(file, _)| file.write_all(waiting));
        written.map_err(|cause| self.refused(&cause))?;
        self.waiting.clear();
        Ok(())
    }

    /// Writes the rest and maps the file. It was written, not mapped for writing: a full disk is an
    /// error of `write`, where a page that finds no room on it would be a signal.
    fn map(&self, file: &mut File) -> io::Result<Mmap> {
        file.write_all(bytes_of(&self.waiting))?;
        // SAFETY: the file has no name, and no other process or part of this one holds it: nobody
        // writes to it or shortens it from here on.
        unsafe { Mmap::map(&*file) }
    }

    fn refused(&self, cause: &io::Error) -> Error {
        let folder = self.folder.as_deref().unwrap_or(Path::new("")).display();
        Error::failed(format!(
            "{folder}: cannot take the file of tokenised rows: {cause}; {}{}",
            engraft_util::atomic::remedy(cause),
            if self.keep { ", or give --no-token-cache" } else { "" }
        ))
    }
}

/// The folder, or the nearest above it that is there: rows are read before a run is planned, and one that
/// is refused then must leave no file.
fn nearest(folder: &Path) -> &Path {
    folder.ancestors().find(|above| above.exists()).unwrap_or(Path::new("."))
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
