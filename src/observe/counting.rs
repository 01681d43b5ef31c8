//! Live bytes of the process and their peak: those of a counting allocator, and of arenas.
//!
//! A program installs it with `#[global_allocator] static HEAP: Counting = Counting;`. The library does
//! not, so each program that links it can choose; without it the heap reads 0. Arenas are mapped outside the
//! allocator and are counted by [`arena::mapped`], at their reserved size, touched or not.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use crate::device::arena;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static MEASURED_PEAK: AtomicUsize = AtomicUsize::new(0);

/// Called instead of the abort that follows an allocation that failed.
static STOP: OnceLock<fn(usize) -> !> = OnceLock::new();

/// Has `stop` called, with the bytes that were asked for, where an allocation through [`Counting`] fails. It must
/// not allocate, and ends the process. The first one counts.
pub fn on_exhaustion(stop: fn(usize) -> !) {
    let _ = STOP.set(stop);
}

#[cold]
fn failed(bytes: usize) {
    if let Some(stop) = STOP.get() {
        stop(bytes);
    }
}

/// The system's allocator with its bytes counted: an addition and three loads a call.
///
/// Requested sizes are counted, without what the allocator adds for itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counting;

/// Raises `peak` to `value`. The load saves nearly all of the compare-and-swap loops.
#[inline]
fn raise(peak: &AtomicUsize, value: usize) {
    if value > peak.load(Relaxed) {
        peak.fetch_max(value, Relaxed);
    }
}

#[inline]
fn grown(by: usize) {
    // Wraps as the counter itself does, should a shrink on another thread overtake its growth.
    let live = LIVE.fetch_add(by, Relaxed).wrapping_add(by);
    raise(&PEAK, live);
    raise(&MEASURED_PEAK, live.wrapping_add(arena::mapped()));
}

#[inline]
fn shrunk(by: usize) {
    LIVE.fetch_sub(by, Relaxed);
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting touches atomics only,
// so it neither allocates nor unwinds. What is called after a failure does not return.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is that of `System`.
        let memory = unsafe { System.alloc(layout) };
        match memory.is_null() {
            false => grown(layout.size()),
            true => failed(layout.size()),
        }
        memory
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is that of `System`.
        let memory = unsafe { System.alloc_zeroed(layout) };
        match memory.is_null() {
            false => grown(layout.size()),
            true => failed(layout.size()),
        }
        memory
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is that of `System`.
        unsafe { System.dealloc(memory, layout) };
        shrunk(layout.size());
    }

    /// A failed call leaves the old block, and so the count. The system's allocator may copy a block and then
    /// has both for a moment; that is not counted.
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise is that of `System`.
        let moved = unsafe { System.realloc(memory, layout, size) };
        if moved.is_null() {
            failed(size);
        } else {
            match size.checked_sub(layout.size()) {
                Some(more) => grown(more),
                None => shrunk(layout.size() - size),
            }
        }
        moved
    }
}

/// Bytes of the heap in use; 0 where the program does not use [`Counting`].
pub fn live() -> usize {
    LIVE.load(Relaxed)
}

/// Largest [`live`] since the start or the last [`reset_peak`].
pub fn peak() -> usize {
    PEAK.load(Relaxed)
}

/// Bytes in use: heap and arenas.
pub fn measured() -> usize {
    live().wrapping_add(arena::mapped())
}

/// Largest [`measured`] since the start or the last [`reset_peak`].
///
/// An arena is counted at the next allocation, which creating it causes.
pub fn measured_peak() -> usize {
    raise(&MEASURED_PEAK, measured());
    MEASURED_PEAK.load(Relaxed)
}

/// Resets both peaks to the bytes in use. Bytes that other threads allocate at the same time may
/// be missed.
pub fn reset_peak() {
    PEAK.store(live(), Relaxed);
    MEASURED_PEAK.store(measured(), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test binary of the library does not install the allocator, so nothing but this test counts.
    #[test]
    fn every_kind_of_call_and_every_arena_is_counted() {
        let layout = Layout::from_size_align(1000, 16).unwrap();
        let base = live();
        // SAFETY: blocks are freed once, with the layout they were last given.
        unsafe {
            let a = Counting.alloc(layout);
            let b = Counting.alloc_zeroed(layout);
            assert_eq!(live() - base, 2000);
            assert!(std::slice::from_raw_parts(b, 1000).iter().all(|&byte| byte == 0));
            a.write(7);
            let a = Counting.realloc(a, layout, 5000);
            assert_eq!((a.read(), live() - base, peak() - base), (7, 6000, 6000));
            let a = Counting.realloc(a, Layout::from_size_align(5000, 16).unwrap(), 10);
            assert_eq!((a.read(), live() - base), (7, 1010));
            Counting.dealloc(b, layout);
            assert_eq!((live() - base, peak() - base), (10, 6000));
            assert!(measured_peak() >= 6000);
            reset_peak();
            assert_eq!(peak() - base, 10);
            Counting.dealloc(a, Layout::from_size_align(10, 16).unwrap());
        }
        assert_eq!((live(), peak() - base), (base, 10));

        const BYTES: usize = 2 << 30; // reserved, never touched; far more than other tests map meanwhile
        let before = measured();
        let arena = arena::Arenas::real(None)
            .build("test", arena::Placement::Memory, |arena| {
                arena.take("x", crate::device::DType::F32, &[BYTES / 4])
            })
            .unwrap();
        let with = measured();
        assert!(before < BYTES && with >= BYTES && measured_peak() >= BYTES);
        drop(arena);
        assert!(measured() < BYTES && measured_peak() >= BYTES);
        reset_peak();
        assert!(measured_peak() < BYTES);
    }
}
