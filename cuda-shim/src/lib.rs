//! Runs the exported CUDA kernels on the CPU, as `cuLaunchKernel` would on a GPU.
//!
//! `build.rs` compiles every `kernel.cu` as C++ against `shim/shim.h`: threads are fibres, blocks and threads
//! run in an order shuffled by a seed, tensor-core instructions have twins by their lane layout. What it
//! cannot show: races between blocks, the memory model, misaligned global loads, speed.

use std::ffi::c_void;

/// What a compiled kernel is launched by.
pub type Launcher = unsafe extern "C" fn(*const u32, *const u32, usize, u64, *mut *mut c_void) -> i32;

/// Why a launch failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// Threads wait for each other for ever: a barrier that not all of them reach.
    Deadlock,
    /// More threads or shared memory than a block has, or a matrix load outside of shared memory.
    Misuse,
}

/// A parameter's value, in memory of its own.
pub struct Argument([u64; 4]);

impl Argument {
    /// Holds `value`.
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
/// When the kernel breaks a rule that the shim watches.
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

/// Names launchers that the build linked.
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
