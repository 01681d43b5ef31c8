//! What hand-written kernels are written in: vectors of floats of whatever instructions a CPU has, exponentials,
//! tiles of products.
//!
//! A kernel is one body of code over [`Simd`], compiled for every instruction set there is ([`avx512`], [`avx2`],
//! [`neon`]); [`at_level`] picks one at run time. Everything that vectors pass through is `#[inline(always)]` and ends up
//! inside [`Simd::enter`], where the compiler may use the instructions; what is not compiled into it would pass
//! vectors through memory, a call for each instruction.

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

/// An instruction set: a value of such a type is the proof that the CPU has it.
///
/// # Safety
/// Kernels go by the numbers without looking: LANES is at most MOST, VECTORS at most 4, TALL at most (12, 2) or (6, 4), a
/// strip of FP16 (32 columns) holds whole tiles of TALL, and the columns of a panel are whole vectors.
pub unsafe trait Simd: Copy + Send + Sync {
    /// A vector.
    type Floats: Copy;
    /// Floats of a vector.
    const LANES: usize;
    /// Whether there are 32 registers for vectors, and not 16.
    const MANY_REGISTERS: bool;
    /// Vectors of columns of a [tile](tile::Tile).
    const VECTORS: usize;
    /// Rows of a tile that widens FP16 itself, and its vectors of columns.
    const TALL: (usize, usize);
    /// Columns of a tile.
    const COLUMNS: usize = Self::VECTORS * Self::LANES;
    /// Whether a part of a vector is read and written as fast as a whole one.
    const MASKS: bool;
    /// Steps and columns of a panel of frozen weights: it stays in a second-level cache.
    const PANEL: (usize, usize);

    /// Runs `body` as a function of its own, compiled for these instructions.
    fn enter<R>(self, body: impl FnOnce() -> R) -> R;

    /// Zeros.
    fn zero(self) -> Self::Floats;
    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::Floats;

    /// A whole vector.
    ///
    /// # Safety
    /// There are LANES floats.
    unsafe fn load(self, from: *const f32) -> Self::Floats;
    /// Writes a whole vector.
    ///
    /// # Safety
    /// There is room for LANES floats.
    unsafe fn store(self, to: *mut f32, vector: Self::Floats);
    /// The first `count` lanes, at most LANES, and `fill` behind them.
    ///
    /// # Safety
    /// There are so many floats.
    unsafe fn load_first(self, from: *const f32, count: usize, fill: f32) -> Self::Floats;
    /// Writes the first `count` lanes, at most LANES.
    ///
    /// # Safety
    /// There is room for so many floats.
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
    /// The nearest whole number.
    fn round(self, x: Self::Floats) -> Self::Floats;
    /// `x 2^n` for whole n of magnitude up to 200; over- and underflows as it should.
    fn scale(self, x: Self::Floats, n: Self::Floats) -> Self::Floats;
    /// `1 / x` for normal x, to 1 ulp.
    fn reciprocal(self, x: Self::Floats) -> Self::Floats;
    /// `value`, and 0 where `a = b`.
    fn unless_equal(self, value: Self::Floats, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `value`, and 0 where `a >= b`.
    fn unless_reaching(self, value: Self::Floats, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    /// The sum of all lanes: lane i and i + LANES / 2 first, of these i and i + LANES / 4, and so on.
    fn sum(self, x: Self::Floats) -> f32;
    /// The largest lane.
    fn largest(self, x: Self::Floats) -> f32;

    /// LANES halves.
    ///
    /// # Safety
    /// There are so many.
    unsafe fn widen(self, from: *const f16) -> Self::Floats;
    /// LANES whole numbers.
    ///
    /// # Safety
    /// There are so many.
    unsafe fn whole(self, from: *const i8) -> Self::Floats;

    /// The transpose of a square of LANES vectors, which are the first of these.
    fn transposed(self, rows: [Self::Floats; MOST]) -> [Self::Floats; MOST];

    /// Has the cache line at an address brought near, which may be any.
    fn fetch<T>(self, address: *const T);
}

/// `Some` of what `$body` makes with `$s`, the instruction set of the [level](crate::device::cpu::level); None where that
/// has no kernels of our own.
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

/// An array of what `of` makes of each index.
#[inline(always)]
pub fn array<T: Copy, const N: usize>(first: T, of: impl Fn(usize) -> T) -> [T; N] {
    let mut array = [first; N];
    for (i, place) in array.iter_mut().enumerate() {
        *place = of(i);
    }
    array
}

/// e^x of each lane, to 1.5 ulp: x = n ln 2 + r, a polynomial of degree 6 on |r| <= ln 2 / 2 as in Cephes `expf`,
/// and a multiplication by 2^n that over- and underflows as it should.
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

/// Up to LANES floats, `fill` behind them.
#[inline(always)]
pub fn load_or<S: Simd>(s: S, values: &[f32], fill: f32) -> S::Floats {
    // SAFETY: no more than there are.
    unsafe { s.load_first(values.as_ptr(), values.len().min(S::LANES), fill) }
}

/// Writes as many lanes as there are values, LANES at most.
#[inline(always)]
pub fn store<S: Simd>(s: S, values: &mut [f32], vector: S::Floats) {
    // SAFETY: no more than there is room for.
    unsafe { s.store_first(values.as_mut_ptr(), values.len().min(S::LANES), vector) }
}

/// Replaces values a vector at a time; lanes behind the last value are 0.
#[inline(always)]
pub fn replace<S: Simd>(s: S, values: &mut [f32], mut with: impl FnMut(S::Floats) -> S::Floats) {
    // Parts of vectors only at the end: masks would cost as much as an exponential.
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

/// The same for two lists of one length side by side.
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

/// Takes up values a vector at a time; lanes behind the last value are `fill`.
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

/// Up to LANES halves, zeros behind them.
#[inline(always)]
pub fn widened<S: Simd>(s: S, halves: &[f16]) -> S::Floats {
    let mut padded = [f16::ZERO; MOST];
    let from = if halves.len() >= S::LANES {
        halves
    } else {
        padded[..halves.len()].copy_from_slice(halves);
        &padded
    };
    // SAFETY: at least a vector of halves.
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
