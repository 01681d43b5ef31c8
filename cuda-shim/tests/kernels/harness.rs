//! Device buffers with guarded borders, types of activations, launches under several seeds, comparisons.

use std::cell::UnsafeCell;

use cuda_shim::{Argument, Failure, Launcher};
use half::{bf16, f16};

/// Elements on either side of a buffer that no kernel may touch; reading them gives NaN.
const GUARD: usize = 64;

/// An element of device memory.
pub trait Number: Copy + PartialEq + std::fmt::Debug {
    /// The value of guards and of elements that are not written yet: NaN if the type has one.
    const POISON: Self;
    /// The nearest value of this type.
    fn of(value: f64) -> Self;
    /// The value converted to f64.
    fn wide(self) -> f64;
    /// Whether both have the same bits.
    fn same(self, other: Self) -> bool;
}

macro_rules! number {
    ($type:ty, $poison:expr, $of:expr, $wide:expr, $bits:expr) => {
        impl Number for $type {
            const POISON: Self = $poison;
            fn of(value: f64) -> Self {
                $of(value)
            }
            fn wide(self) -> f64 {
                $wide(self)
            }
            fn same(self, other: Self) -> bool {
                $bits(self) == $bits(other)
            }
        }
    };
}
number!(f32, f32::NAN, |x| x as f32, f64::from, f32::to_bits);
number!(f64, f64::NAN, |x| x, |x| x, f64::to_bits);
number!(f16, f16::NAN, f16::from_f64, f16::to_f64, f16::to_bits);
number!(bf16, bf16::NAN, bf16::from_f64, bf16::to_f64, bf16::to_bits);
number!(u32, u32::MAX, |x| x as u32, f64::from, |x| x);
number!(i32, i32::MIN, |x| x as i32, f64::from, |x| x);
number!(u8, 0xa5, |x| x as u8, f64::from, |x| x);
number!(i8, -91, |x| x as i8, f64::from, |x| x);

/// A type of activations: its rounding error and the suffix of its kernels.
pub trait Activation: Number {
    /// Largest relative error of rounding.
    const ROUNDING: f64;
    /// Which of the launchers for f32, f16 and bf16.
    const INDEX: usize;
    /// Type of the frozen matrices beside them.
    type Weight: Number;
}
impl Activation for f32 {
    type Weight = f16;
    const ROUNDING: f64 = 6e-8;
    const INDEX: usize = 0;
}
impl Activation for f16 {
    type Weight = f16;
    const ROUNDING: f64 = 4.9e-4;
    const INDEX: usize = 1;
}
impl Activation for bf16 {
    type Weight = bf16;
    const ROUNDING: f64 = 3.9e-3;
    const INDEX: usize = 2;
}

/// A buffer that a kernel may read and write, 16-byte aligned, between guards.
pub struct Device<T>(UnsafeCell<Vec<T>>, usize);

impl<T: Number> Device<T> {
    /// A buffer with these values.
    pub fn new(values: &[T]) -> Self {
        let mut all = vec![T::POISON; values.len() + 2 * GUARD];
        // SAFETY: only the address is looked at.
        let past = all.as_ptr() as usize % 16 / size_of::<T>();
        let start = GUARD + if past == 0 { 0 } else { 16 / size_of::<T>() - past };
        all.resize(values.len() + start + GUARD, T::POISON);
        assert_eq!(all[start..].as_ptr() as usize % 16, 0, "a buffer has moved");
        all[start..][..values.len()].copy_from_slice(values);
        Self(UnsafeCell::new(all), start)
    }

    /// Nearest values of the type.
    pub fn of(values: &[f64]) -> Self {
        Self::new(&values.iter().map(|&value| T::of(value)).collect::<Vec<_>>())
    }

    /// `len` elements that a kernel must write.
    pub fn poisoned(len: usize) -> Self {
        Self::new(&vec![T::POISON; len])
    }

    /// Address of element `at`, for a kernel.
    pub fn at(&self, at: usize) -> *mut T {
        // SAFETY: no reference to the elements is alive; the address stays inside.
        unsafe { (*self.0.get()).as_mut_ptr().add(self.1 + at) }
    }

    /// Address of the first element, for a kernel.
    pub fn head(&self) -> *mut T {
        self.at(0)
    }

    /// The elements; panics when a kernel wrote beyond them.
    #[track_caller]
    pub fn get(&self) -> Vec<T> {
        // SAFETY: no kernel runs and no reference is alive.
        let all = unsafe { &*self.0.get() };
        let end = all.len() - GUARD;
        let guards = all[..self.1].iter().chain(&all[end..]);
        assert!(guards.into_iter().all(|guard| guard.same(T::POISON)), "a kernel wrote beyond a buffer");
        all[self.1..end].to_vec()
    }

    /// The elements converted to f64.
    #[track_caller]
    pub fn wide(&self) -> Vec<f64> {
        self.get().into_iter().map(Number::wide).collect()
    }
}

/// Seeds, each of which is another order of threads.
pub const SEEDS: [u64; 3] = [1, 2, 3];

/// Launches `kernel`; panics when it breaks a rule of the shim.
#[track_caller]
pub fn run(
    kernel: Launcher,
    grid: [usize; 3],
    threads: usize,
    dynamic: usize,
    seed: u64,
    args: &mut [Argument],
) {
    // SAFETY: tests hand in pointers to guarded buffers, in the order of the kernel's parameters.
    let result: Result<(), Failure> =
        unsafe { cuda_shim::launch(kernel, grid, threads, dynamic, seed, args) };
    assert_eq!(result, Ok(()), "a launch failed under seed {seed}");
}

/// The values of a launch's parameters.
#[macro_export]
macro_rules! args {
    ($($value:expr),* $(,)?) => {
        &mut [$(cuda_shim::Argument::new($value)),*]
    };
}

/// Repeatable values in -1 .. 1, different for every `seed`.
pub fn numbers(seed: u64, len: usize) -> Vec<f64> {
    let key = engraft_util::rng::key(&[seed]);
    (0..len as u64).map(|at| f64::from(2.0 * engraft_util::rng::uniform(key, at) - 1.0)).collect()
}

/// As [`numbers`], rounded to `T`.
pub fn rounded<T: Number>(seed: u64, len: usize) -> Vec<f64> {
    numbers(seed, len).into_iter().map(|x| T::of(x).wide()).collect()
}

/// Every pair within `tolerance * (1 + |expected|)`.
#[track_caller]
pub fn assert_close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(error <= tolerance * (1.0 + expected.abs()), "{what}[{at}]: {found} against {expected}");
    }
}
