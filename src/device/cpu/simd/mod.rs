//! The parts of hand-written kernels: vectors of floats for every instruction set, exponentials, tiles of products.
//!
//! A kernel is one body of code over [`Simd`], compiled for every instruction set ([`avx512`], [`avx2`], [`neon`]);
//! [`at_level`] picks one at run time. Every function that takes vectors is `#[inline(always)]` and is compiled into
//! [`Simd::enter`], where the compiler may use the instructions. A function outside would pass vectors through memory,
//! with a call for each instruction.

use half::f16;

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "aarch64")]
pub mod neon;
#[cfg(target_arch = "x86_64")]
pub mod pairs;
pub mod product;
#[cfg(test)]
mod tests;
pub mod tile;

/// Most floats that a vector of any instruction set has.
pub const MOST: usize = 16;

/// An instruction set: a value of such a type proves that the CPU has it.
///
/// # Safety
/// Kernels rely on these constants unchecked: LANES is at most MOST, VECTORS at most 4, TALL at most (12, 2) or (6,
/// 4), a strip of FP16 (32 columns) holds whole tiles of TALL, and the columns of a panel are whole vectors.
pub unsafe trait Simd: Copy + Send + Sync {
    /// A vector of LANES floats.
    type Floats: Copy;
    /// A vector of LANES words of 32 bits.
    type Words: Copy;
    /// A table of 16 floats.
    type Table: Copy;
    /// Number of floats in a vector.
    const LANES: usize;
    /// Whether there are 32 registers for vectors, and not 16.
    const MANY_REGISTERS: bool;
    /// Vectors of columns of a [tile](tile::Tile).
    const VECTORS: usize;
    /// Rows of a tile that widens FP16 itself, and its vectors of columns.
    const TALL: (usize, usize);
    /// Columns of a tile.
    const COLUMNS: usize = Self::VECTORS * Self::LANES;
    /// Whether part of a vector is read and written as fast as a whole one.
    const MASKS: bool;
    /// Steps and columns of a panel of frozen weights, which has to stay in a second-level cache.
    const PANEL: (usize, usize);

    /// Runs `body` as a function of its own, compiled for these instructions.
    fn enter<R>(self, body: impl FnOnce() -> R) -> R;

    /// 0 in every lane.
    fn zero(self) -> Self::Floats;
    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::Floats;

    /// Reads a whole vector.
    ///
    /// # Safety
    /// `from` is valid for LANES floats.
    unsafe fn load(self, from: *const f32) -> Self::Floats;
    /// Writes a whole vector.
    ///
    /// # Safety
    /// `to` is valid for LANES floats.
    unsafe fn store(self, to: *mut f32, vector: Self::Floats);
    /// Reads the first `count` lanes, at most LANES; the others are `fill`.
    ///
    /// # Safety
    /// `from` is valid for `count` floats.
    unsafe fn load_first(self, from: *const f32, count: usize, fill: f32) -> Self::Floats;
    /// Writes the first `count` lanes, at most LANES.
    ///
    /// # Safety
    /// `to` is valid for `count` floats.
    unsafe fn store_first(self, to: *mut f32, count: usize, vector: Self::Floats);

    /// `a + b`.
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a - b`.
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a b`.
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a b + c`, rounded once.
    fn fma(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// `c - a b`, rounded once.
    fn fnma(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// The smaller of both; NaN where `b` is.
    fn min(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// The larger of both; NaN where `b` is.
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// The nearest whole number, of two the even one.
    fn round(self, x: Self::Floats) -> Self::Floats;
    /// `x 2^n` for whole n of magnitude up to 200, with overflow to infinity and gradual underflow.
    fn scale(self, x: Self::Floats, n: Self::Floats) -> Self::Floats;
    /// `1 / x` for normal x, to 1 ulp.
    fn reciprocal(self, x: Self::Floats) -> Self::Floats;
    /// `value`, but 0 where `a = b`.
    fn unless_equal(self, value: Self::Floats, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `value`, but 0 where `a >= b`.
    fn unless_reaching(self, value: Self::Floats, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    /// The sum of all lanes: lane i and i + LANES / 2 first, of these i and i + LANES / 4, and so on.
    fn sum(self, x: Self::Floats) -> f32;
    /// The value of the largest lane.
    fn largest(self, x: Self::Floats) -> f32;

    /// Reads LANES FP16 values, as floats.
    ///
    /// # Safety
    /// `from` is valid for LANES values.
    unsafe fn widen(self, from: *const f16) -> Self::Floats;
    /// Reads LANES 8-bit integers, as floats.
    ///
    /// # Safety
    /// `from` is valid for LANES integers.
    unsafe fn whole(self, from: *const i8) -> Self::Floats;

    /// Reads LANES words, little-endian.
    ///
    /// # Safety
    /// `from` is valid for LANES words; it need not be aligned.
    unsafe fn words(self, from: *const u8) -> Self::Words;
    /// The table of these values.
    fn table(self, values: &[f32; 16]) -> Self::Table;
    /// The values of the table that four bits of each word select: the lower half of byte n for n < 4, and the upper half
    /// of byte n - 4 for n < 8.
    fn look_up(self, table: Self::Table, words: Self::Words, n: usize) -> Self::Floats;
    /// [`Simd::look_up`] for the lower halves of all four bytes, or the upper ones.
    #[inline(always)]
    fn look_up_four(self, table: Self::Table, words: Self::Words, upper: bool) -> [Self::Floats; 4] {
        let first = if upper { 4 } else { 0 };
        array(
            self.zero(),
            #[inline(always)]
            |i| self.look_up(table, words, first + i),
        )
    }

    /// The transpose of the square that the first LANES vectors make; the others are not read.
    fn transposed(self, rows: [Self::Floats; MOST]) -> [Self::Floats; MOST];

    /// Prefetches the cache line of `address`, which need not be valid.
    fn fetch<T>(self, address: *const T);
}

/// `Some($body)` with `$s`, the instruction set of the [level](crate::device::cpu::level); `None` at a level without
/// hand-written kernels.
macro_rules! at_level {
    ($s:ident => $body:expr) => {
        match $crate::device::cpu::level() {
            #[cfg(target_arch = "x86_64")]
            $crate::device::cpu::Level::Avx512 => {
                // SAFETY: a level is one that the CPU has.
                let $s = unsafe { $crate::device::cpu::simd::avx512::Avx512::new() };
                Some($body)
            }
            #[cfg(target_arch = "x86_64")]
            $crate::device::cpu::Level::Avx2 => {
                // SAFETY: as above.
                let $s = unsafe { $crate::device::cpu::simd::avx2::Avx2::new() };
                Some($body)
            }
            #[cfg(target_arch = "aarch64")]
            $crate::device::cpu::Level::Neon => {
                let $s = $crate::device::cpu::simd::neon::Neon;
                Some($body)
            }
            _ => None,
        }
    };
}
pub(crate) use at_level;

/// The array `[of(0), of(1), ..]`; `first` fills it before.
#[inline(always)]
pub fn array<T: Copy, const N: usize>(first: T, of: impl Fn(usize) -> T) -> [T; N] {
    let mut array = [first; N];
    for (i, element) in array.iter_mut().enumerate() {
        *element = of(i);
    }
    array
}

/// e^x of each lane, to 1.5 ulp: x = n ln 2 + r, a polynomial of degree 6 on |r| <= ln 2 / 2 as in Cephes `expf`,
/// and a multiplication by 2^n with overflow to infinity and gradual underflow.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::Floats) -> S::Floats {
    // 2^n is 0 below -150 and infinite above 129; NaN stays NaN, being the second operand.
    let x = s.max(s.splat(-104.0), s.min(s.splat(89.0), x));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fnma(n, s.splat(0.693_359_4), x);
    let r = s.fnma(n, s.splat(-2.121_944_4e-4), r);
    let mut p = s.splat(1.987_569_1e-4);
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = s.fma(p, r, s.splat(coefficient));
    }
    let value = s.add(s.fma(s.mul(p, r), r, r), s.splat(1.0));
    s.scale(value, n)
}

/// The first floats of `values`, up to LANES; the other lanes are `fill`.
#[inline(always)]
pub fn load_or<S: Simd>(s: S, values: &[f32], fill: f32) -> S::Floats {
    // SAFETY: no more lanes than values.
    unsafe { s.load_first(values.as_ptr(), values.len().min(S::LANES), fill) }
}

/// Writes the first lanes to `values`, up to LANES.
#[inline(always)]
pub fn store<S: Simd>(s: S, values: &mut [f32], vector: S::Floats) {
    // SAFETY: no more lanes than values.
    unsafe { s.store_first(values.as_mut_ptr(), values.len().min(S::LANES), vector) }
}

/// Replaces values one vector at a time; lanes past the last value are 0.
#[inline(always)]
pub fn replace<S: Simd>(s: S, values: &mut [f32], mut with: impl FnMut(S::Floats) -> S::Floats) {
    // Masks at the end only: everywhere they would cost the time of an exponential.
    let mut whole = values.chunks_exact_mut(S::LANES);
    for values in &mut whole {
        // SAFETY: a vector of floats.
        unsafe { s.store(values.as_mut_ptr(), with(s.load(values.as_ptr()))) }
    }
    let rest = whole.into_remainder();
    if !rest.is_empty() {
        let vector = with(load_or(s, rest, 0.0));
        store(s, rest, vector);
    }
}

/// [`replace`] for two lists of one length, side by side.
#[inline(always)]
pub fn replace_both<S: Simd>(
    s: S,
    left: &mut [f32],
    right: &mut [f32],
    mut with: impl FnMut(S::Floats, S::Floats) -> (S::Floats, S::Floats),
) {
    let (mut lefts, mut rights) = (left.chunks_exact_mut(S::LANES), right.chunks_exact_mut(S::LANES));
    for (left, right) in (&mut lefts).zip(&mut rights) {
        // SAFETY: two vectors of floats.
        unsafe {
            let (a, b) = with(s.load(left.as_ptr()), s.load(right.as_ptr()));
            s.store(left.as_mut_ptr(), a);
            s.store(right.as_mut_ptr(), b);
        }
    }
    let (left, right) = (lefts.into_remainder(), rights.into_remainder());
    if !left.is_empty() {
        let (a, b) = with(load_or(s, left, 0.0), load_or(s, right, 0.0));
        store(s, left, a);
        store(s, right, b);
    }
}

/// Folds values one vector at a time; lanes past the last value are `fill`.
#[inline(always)]
pub fn fold<S: Simd, T>(
    s: S,
    values: &[f32],
    fill: f32,
    start: T,
    mut with: impl FnMut(T, S::Floats) -> T,
) -> T {
    let whole = values.chunks_exact(S::LANES);
    let rest = whole.remainder();
    let mut state = start;
    for values in whole {
        // SAFETY: a vector of floats.
        state = with(state, unsafe { s.load(values.as_ptr()) });
    }
    if rest.is_empty() { state } else { with(state, load_or(s, rest, fill)) }
}

/// The first FP16 values, up to LANES, as floats; the other lanes are 0.
#[inline(always)]
pub fn widened<S: Simd>(s: S, values: &[f16]) -> S::Floats {
    let mut padded = [f16::ZERO; MOST];
    let from = if values.len() >= S::LANES {
        values
    } else {
        padded[..values.len()].copy_from_slice(values);
        &padded
    };
    // SAFETY: the array holds a vector of FP16 values.
    unsafe { s.widen(from.as_ptr()) }
}

/// Widens FP16 to FP32, exactly.
pub fn widen_all<S: Simd>(s: S, from: &[f16], to: &mut [f32]) {
    s.enter(
        #[inline(always)]
        move || {
            for (from, to) in from.chunks(S::LANES).zip(to.chunks_mut(S::LANES)) {
                store(s, to, widened(s, from));
            }
        },
    );
}
