//! Scratch memory of the tasks of CPU kernels, and the pointer through which tasks share a result.

use std::{
    cell::RefCell,
    sync::{Mutex, PoisonError},
};

/// A pointer shared by tasks that write disjoint elements.
#[derive(Clone, Copy)]
pub struct Shared(*mut f32, usize);

// SAFETY: every user promises disjoint ranges when it calls `range`.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Shares `values` among tasks for as long as the caller keeps its borrow alive.
    pub fn new(values: &mut [f32]) -> Self {
        Self(values.as_mut_ptr(), values.len())
    }

    /// The elements `start .. start + len`.
    ///
    /// # Safety
    /// The borrow given to [`Shared::new`] still lives, and no other task uses any of these elements.
    #[allow(clippy::mut_from_ref, reason = "tasks write disjoint ranges of one borrow")]
    pub unsafe fn range<'a>(&self, start: usize, len: usize) -> &'a mut [f32] {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.1), "range leaves the buffer");
        // SAFETY: inside the buffer, and disjoint from every other range in use by contract.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }

    /// Pointer to element `at`, for kernels that write a strided block from there.
    pub fn at(&self, at: usize) -> *mut f32 {
        assert!(at <= self.1, "range leaves the buffer");
        // SAFETY: at is inside the buffer or one past its end.
        unsafe { self.0.add(at) }
    }
}

/// A cache line. No vector of a panel or of scores may cross into a second one.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "scratch is lent as floats")] [f32; LINE]);

/// Floats of a cache line; scratch is whole lines.
pub const LINE: usize = 16;

thread_local! {
    static SCRATCH: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

static SHARED: Mutex<Vec<Vec<Line>>> = Mutex::new(Vec::new());

/// Lends `len` floats of per-thread memory with arbitrary content, the first on a cache line; nests.
///
/// A few MB a thread that stay for the life of the process; the sizes follow from the tile constants
/// of the ops, not from the model.
pub fn with_scratch<R>(len: usize, body: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut memory = SCRATCH.with(|pool| pool.borrow_mut().pop()).unwrap_or_default();
    let result = body(grown(&mut memory, len));
    SCRATCH.with(|pool| pool.borrow_mut().push(memory));
    result
}

/// The same of memory of the process, for what the tasks of an op share: its size follows from the rows of the op.
pub fn with_shared_scratch<R>(len: usize, body: impl FnOnce(&mut [f32]) -> R) -> R {
    if len == 0 {
        return body(&mut []);
    }
    // Not locked meanwhile: a thread that waits for its tasks may take up another op.
    let mut memory = SHARED.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
    let result = body(grown(&mut memory, len));
    SHARED.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
    result
}

/// Frees the memory that [`with_shared_scratch`] keeps.
pub fn release_shared_scratch() {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// `len` floats of memory, which is allocated anew where it is shorter.
fn grown(memory: &mut Vec<Line>, len: usize) -> &mut [f32] {
    let lines = len.div_ceil(LINE);
    if memory.len() < lines {
        // Exactly the planned length, and never the old and the new memory together.
        *memory = Vec::new();
        memory.reserve_exact(lines);
        memory.resize(lines, Line([0.0; LINE]));
    }
    // SAFETY: lines are LINE floats each, without anything between them.
    let floats = unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<f32>(), len) };
    // A kernel that reads scratch before it writes it shall be found.
    #[cfg(test)]
    floats.fill(f32::NAN);
    floats
}
