//! Pages of mapped files: fetched into memory before they are needed, and released afterwards.
//!
//! A released page is read again from the file (or from the system's file cache) at the next touch, with the same
//! bytes. So none of this can change a result, only when a page is in memory.

use std::sync::{
    Arc,
    mpsc::{Receiver, Sender, channel},
};

use memmap2::{Advice, MmapMut, UncheckedAdvice};

use super::{Bytes, arena::Chunk};
use crate::error::{Error, Result};

/// Smallest page of the systems that this runs on.
const PAGE: usize = 4096;

/// Bytes before and after a touched one that a system may map with it: large pages of its file cache are
/// mapped as a whole.
pub const AROUND: usize = 2 << 20;

/// Bytes of a mapped file that are copied, written or hashed before their pages are released; a multiple of every
/// element size.
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
    /// A read-only file, or bytes that are not a file.
    Frozen(Arc<dyn Bytes>),
    /// Memory of an arena, perhaps in a file.
    Chunk(Arc<Chunk>),
}

impl Region {
    /// `len` bytes from `start` of a mapped file, or of other bytes that nobody writes.
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

    /// Reads the pages into memory, if they belong to a file; returns when they are there.
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

    /// Releases the pages, if they belong to a file, and those that may have been mapped with them. Neighbours within
    /// AROUND lose theirs too and get them back at the next touch.
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

/// The same of a writable mapping.
fn advise_mut(pages: &MmapMut, region: &Region) -> bool {
    #[cfg(target_os = "linux")]
    return pages.advise_range(Advice::PopulateRead, region.start, region.len).is_ok();
    #[cfg(not(target_os = "linux"))]
    {
        let _ = pages.advise_range(Advice::WillNeed, region.start, region.len);
        false
    }
}

/// One job of a [`Pager`]: it releases first, then fetches.
#[derive(Default)]
pub struct PageRequest {
    /// Regions whose pages are released.
    pub release: Vec<Region>,
    /// Regions whose pages are read into memory.
    pub fetch: Vec<Region>,
}

/// A thread that fetches and releases pages while others compute.
pub struct Pager {
    requests: Option<Sender<PageRequest>>,
    done: Receiver<()>,
    /// Requests that were sent and are not known to be done.
    open: usize,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Pager {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system refuses one.
    pub fn start() -> Result<Self> {
        let (requests, inbox) = channel::<PageRequest>();
        let (report, done) = channel();
        let work = move || {
            for request in inbox {
                request.release.iter().for_each(Region::release);
                request.fetch.iter().for_each(Region::fetch);
                // Nobody waits any more when the other end is gone.
                let _ = report.send(());
            }
        };
        let thread = std::thread::Builder::new().name("pager".into()).spawn(work).map_err(|cause| {
            Error::failed(format!(
                "a thread for reading ahead cannot be started: {cause}; use --stream-base off"
            ))
        })?;
        Ok(Self { requests: Some(requests), done, open: 0, thread: Some(thread) })
    }

    /// Waits for the request before, so that one fetch at most is ever under way, and sends `request`.
    pub fn send(&mut self, request: PageRequest) {
        self.wait();
        if let Some(requests) = &self.requests
            && requests.send(request).is_ok()
        {
            self.open += 1;
        }
    }

    /// Waits until all requests are done.
    pub fn wait(&mut self) {
        while self.open > 0 {
            self.open = if self.done.recv().is_ok() { self.open - 1 } else { 0 };
        }
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
