//! The parts of a launch: the number of threads, and the arguments.

use std::ffi::c_void;

use crate::device::{View, ViewMut};

/// The blocks and threads that run a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y and z; nothing is launched where one is 0.
    pub blocks: (usize, usize, usize),
    /// Threads in a block.
    pub threads: usize,
    /// Bytes of shared memory of a block beyond what the kernel declares.
    pub shared: usize,
}

impl Grid {
    /// A grid of `blocks` blocks in x, y and z.
    pub fn of(blocks: (usize, usize, usize), threads: usize) -> Self {
        Self { blocks, threads, shared: 0 }
    }

    /// A grid of `blocks` blocks in x.
    pub fn row(blocks: usize, threads: usize) -> Self {
        Self::of((blocks, 1, 1), threads)
    }

    /// Blocks of 256 threads that take 2048 of `elements` each.
    pub fn pointwise(elements: usize) -> Self {
        Self::row(elements.div_ceil(2048), 256)
    }

    /// The same grid with `shared` bytes of shared memory for each block.
    pub fn with_shared(self, shared: usize) -> Self {
        Self { shared, ..self }
    }
}

/// An argument of a kernel: the bytes of a number, a pointer or a structure, in the low end of four words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument([u64; 4]);

impl Argument {
    /// A null pointer, for an operand that is left out.
    pub const NULL: Self = Self([0; 4]);

    /// The address of its bytes, for the driver.
    pub(super) fn address(&self) -> *mut c_void {
        self.0.as_ptr().cast_mut().cast()
    }

    fn word(word: u64) -> Self {
        Self([word, 0, 0, 0])
    }

    /// A structure of plain numbers in C layout.
    pub fn structure<S: Copy>(value: S) -> Self {
        const { assert!(size_of::<S>() <= 32 && align_of::<S>() <= 8) };
        let mut words = [0u64; 4];
        // SAFETY: the structure fits, as was asserted, and is copied byte by byte.
        unsafe {
            std::ptr::copy_nonoverlapping(
                std::ptr::from_ref(&value).cast::<u8>(),
                words.as_mut_ptr().cast::<u8>(),
                size_of::<S>(),
            );
        }
        Self(words)
    }

    /// A size, which every kernel takes as a 32-bit number; a larger one makes the launch fail.
    pub fn int(size: usize) -> Self {
        Self::word(u64::from(i32::try_from(size).unwrap_or(-1) as u32))
    }

    /// A size or distance that a kernel takes as a 64-bit number.
    pub fn long(size: usize) -> Self {
        Self::word(size as u64)
    }
}

impl From<View<'_>> for Argument {
    fn from(view: View) -> Self {
        Self::word(view.address())
    }
}
impl From<&ViewMut<'_>> for Argument {
    fn from(view: &ViewMut) -> Self {
        Self::word(view.address())
    }
}
impl From<Option<View<'_>>> for Argument {
    fn from(view: Option<View>) -> Self {
        view.map_or(Self::NULL, Self::from)
    }
}
impl From<u64> for Argument {
    fn from(address: u64) -> Self {
        Self::word(address)
    }
}
impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Self::word(u64::from(value.to_bits()))
    }
}
impl From<f64> for Argument {
    fn from(value: f64) -> Self {
        Self::word(value.to_bits())
    }
}
impl From<i32> for Argument {
    fn from(value: i32) -> Self {
        Self::word(u64::from(value as u32))
    }
}

/// Arguments of a kernel, in order.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => { &[$($crate::device::cuda::Argument::from($argument)),*] };
}
pub(crate) use arguments;
