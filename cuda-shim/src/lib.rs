//! Runs the exported CUDA kernels on the CPU, as `cuLaunchKernel` would on a GPU.
//!
//! `build.rs` compiles every `kernel.cu` as C++ against `shim/shim.h`: threads are fibres, blocks and threads
//! run in an order shuffled by a seed, and tensor-core instructions have twins with their lane layout. It
//! does not show races between blocks, errors of the memory model, misaligned global loads, or speed.

use std::ffi::c_void;

/// The function that launches a compiled kernel: grid, block, dynamic shared memory, seed, arguments.
pub type Launcher = unsafe extern "C" fn(*const u32, *const u32, usize, u64, *mut *mut c_void) -> i32;

/// The reason why a launch failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// Threads wait for each other forever: a barrier that not all of them reach.
    Deadlock,
    /// Too many threads or too much shared memory for a block, or a matrix load outside of shared memory.
    Misuse,
}

/// The value of a kernel's parameter, copied.
pub struct Argument([u64; 4]);

impl Argument {
    /// Copies `value`, at most 32 bytes.
    ///
    /// # Panics
    /// When it takes more than 32 bytes.
    pub fn new<T: Copy>(value: T) -> Self {
        assert!(size_of::<T>() <= 32 && align_of::<T>() <= 8, "a parameter is too large");
        let mut bytes = [0u64; 4];
        // SAFETY: the array is large enough and aligned for the value.
        unsafe { bytes.as_mut_ptr().cast::<T>().write(value) };
        Self(bytes)
    }
}

/// Runs `kernel` with the values of its parameters.
///
/// # Errors
/// When the kernel breaks a rule that the shim checks.
///
/// # Safety
/// `arguments` must match the kernel's parameters in number and type, and the pointers among them must be
/// valid for all that the kernel reads and writes.
pub unsafe fn launch(
    kernel: Launcher,
    grid: [usize; 3],
    threads: usize,
    dynamic: usize,
    seed: u64,
    arguments: &mut [Argument],
) -> Result<(), Failure> {
    let grid = grid.map(|size| u32::try_from(size).unwrap_or(u32::MAX));
    let block = [u32::try_from(threads).unwrap_or(u32::MAX), 1, 1];
    let mut places: Vec<*mut c_void> =
        arguments.iter_mut().map(|value| value.0.as_mut_ptr().cast()).collect();
    // SAFETY: promised by the caller.
    match unsafe { kernel(grid.as_ptr(), block.as_ptr(), dynamic, seed, places.as_mut_ptr()) } {
        0 => Ok(()),
        1 => Err(Failure::Deadlock),
        _ => Err(Failure::Misuse),
    }
}

/// Declares launchers of kernels by name.
#[macro_export]
macro_rules! kernels {
    ($($name:ident),* $(,)?) => {
        unsafe extern "C" {
            $(fn $name(
                grid: *const u32,
                block: *const u32,
                dynamic: usize,
                seed: u64,
                arguments: *mut *mut std::ffi::c_void,
            ) -> i32;)*
        }
    };
}
