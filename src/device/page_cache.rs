//! Pages of mapped files: brought into memory before they are needed, and given back afterwards.
//!
//! A page that is given back is read again from the file (or from the system's file cache) when it is
//! touched, with the same bytes. So none of this can change a result, only when a page is in memory.

use std::sync::{
    Arc,
    mpsc::{Receiver, Sender, channel},
};

use memmap2::{Advice, MmapMut, UncheckedAdvice};

use super::{Bytes, arena::Chunk};
use crate::error::{Error, Result};

/// Smallest page of the systems that this runs on.
const PAGE: usize = 4096;

/// Bytes before and behind a touched one that a system may map with it: large pages of its file cache are
/// mapped as a whole.
pub const AROUND: usize = 2 << 20;

/// Bytes of a mapped file that are copied, written or hashed before their pages are given back; a whole number of elements of
/// each type.
pub const PIECE: usize = 8 << 20;

/// Whether the system gives large pages to memory of the process when it is asked to.
pub fn large_pages() -> bool {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    setting.is_ok_and(|setting| !setting.contains("[never]"))
}

/// A range of bytes whose pages can be fetched and released.
#[derive(Clone)]
pub struct Region {
    source: Source,
    start: usize,
    len: usize,
}

#[derive(Clone)]
enum Source {
    /// A read-only file, or bytes that are no file.
    Frozen(Arc<dyn Bytes>),
    /// An arena.
    Chunk(Arc<Chunk>),
}

impl Region {
    /// Some bytes of a mapped file, or of other bytes that nobody writes.
    pub fn of_file(source: Arc<dyn Bytes>, start: usize, len: usize) -> Self {
        Self { source: Source::Frozen(source), start, len }
    }

    pub(super) fn of_chunk(chunk: Arc<Chunk>, start: usize, len: usize) -> Self {
        Self { source: Source::Chunk(chunk), start, len }
    }

    /// `len` of its bytes from `start` on.
    pub fn part(&self, start: usize, len: usize) -> Self {
        Self { start: self.start + start, len: len.min(self.len - start), ..self.clone() }
    }

    /// Reads the pages into memory, if they are of a file; returns when they are there.
    pub fn fetch(&self) {
        if self.len == 0 {
            return;
        }
        let bytes = match &self.source {
            Source::Frozen(source) => source.mapping().map(|pages| (advise(pages, self), source.bytes())),
            Source::Chunk(chunk) => chunk.of_file().map(|pages| (advise_mut(pages, self), chunk.bytes())),
        };
        // Older systems cannot be asked for it: touching a byte of each page does the same.
        if let Some((false, bytes)) = bytes {
            let range = &bytes[self.start..self.start + self.len];
            let touched = range.iter().step_by(PAGE).fold(0u8, |sum, byte| sum.wrapping_add(*byte));
            std::hint::black_box(touched);
        }
    }

    /// Gives the pages back, if they are of a file, and what may have been mapped with them. Neighbours within
    /// AROUND lose theirs too, and have them again at the next touch.
    pub fn release(&self) {
        if self.len == 0 {
            return;
        }
        let start = self.start.saturating_sub(AROUND);
        let len_of = |all: usize| all.min(self.start + self.len + AROUND) - start;
        // SAFETY: a shared mapping of a file has the file's bytes again at the next touch.
        let _ = unsafe {
            match &self.source {
                Source::Frozen(source) => source.mapping().map(|pages| {
                    pages.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len_of(pages.len()))
                }),
                Source::Chunk(chunk) => chunk.of_file().map(|pages| {
                    pages.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len_of(pages.len()))
                }),
            }
        };
    }
}

/// Whether the system brought the pages into memory.
fn advise(pages: &memmap2::Mmap, region: &Region) -> bool {
    #[cfg(target_os = "linux")]
    return pages.advise_range(Advice::PopulateRead, region.start, region.len).is_ok();
    #[cfg(not(target_os = "linux"))]
    {
        let _ = pages.advise_range(Advice::WillNeed, region.start, region.len);
        false
    }
}

/// As [`advise`].
fn advise_mut(pages: &MmapMut, region: &Region) -> bool {
    #[cfg(target_os = "linux")]
    return pages.advise_range(Advice::PopulateRead, region.start, region.len).is_ok();
    #[cfg(not(target_os = "linux"))]
    {
        let _ = pages.advise_range(Advice::WillNeed, region.start, region.len);
        false
    }
}

/// What a [`Pager`] does next: first gives back, then fetches.
#[derive(Default)]
pub struct Turn {
    /// Given back.
    pub release: Vec<Region>,
    /// Fetched.
    pub fetch: Vec<Region>,
}

/// A thread that moves pages while others compute.
pub struct Pager {
    turns: Option<Sender<Turn>>,
    done: Receiver<()>,
    /// Turns asked for and not known to be done.
    open: usize,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Pager {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system refuses one.
    pub fn start() -> Result<Self> {
        let (turns, inbox) = channel::<Turn>();
        let (report, done) = channel();
        let work = move || {
            for turn in inbox {
                turn.release.iter().for_each(Region::release);
                turn.fetch.iter().for_each(Region::fetch);
                // Nobody waits any more when the other end is gone.
                let _ = report.send(());
            }
        };
        let thread = std::thread::Builder::new().name("pager".into()).spawn(work).map_err(|cause| {
            Error::failed(format!(
                "a thread for reading ahead cannot be started: {cause}; use --stream-base off"
            ))
        })?;
        Ok(Self { turns: Some(turns), done, open: 0, thread: Some(thread) })
    }

    /// Waits for the turn before, so that no more than one fetch is ever on its way, and asks for `turn`.
    pub fn turn(&mut self, turn: Turn) {
        self.wait();
        if let Some(turns) = &self.turns
            && turns.send(turn).is_ok()
        {
            self.open += 1;
        }
    }

    /// Waits until everything asked for is done.
    pub fn wait(&mut self) {
        while self.open > 0 {
            self.open = if self.done.recv().is_ok() { self.open - 1 } else { 0 };
        }
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.turns = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
