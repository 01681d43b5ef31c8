//! What the CPU sides of all ops share beside [`tasks`](super::tasks): widening, exp, per-thread scratch, thin products.

use std::{
    cell::RefCell,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
};

use half::{f16, slice::HalfFloatSliceExt};

use super::simd::{
    at_level,
    product::{Operand, product, scratch},
    widen_all,
};

/// Runs `pass` on a thread of the global pool: its ops then wake no thread from outside, and tiles, which stay
/// with the thread that used them, are those of the pool's threads alone.
pub fn on_pool<R: Send>(pass: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| pass())
}

/// Runs `body` compiled for the widest vectors of this CPU.
#[inline(always)]
pub fn vectorised<R>(body: impl FnOnce() -> R) -> R {
    // Finding the level costs two atomic loads.
    pulp::Arch::new().dispatch(body)
}

/// Which instructions hand-written kernels use; of two that a CPU has, the later one is faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Whatever the compiler and `gemm` make of plain loops.
    Plain = 1,
    /// NEON, which all 64-bit ARM CPUs have.
    Neon = 2,
    /// AVX2, FMA and F16C.
    Avx2 = 3,
    /// AVX-512 F.
    Avx512 = 4,
}

impl Level {
    /// From the lowest to the best.
    pub const ALL: [Self; 4] = [Self::Plain, Self::Neon, Self::Avx2, Self::Avx512];

    /// Whether there are such kernels in this program and this CPU has the instructions.
    pub fn is_there(self) -> bool {
        match self {
            Self::Plain => true,
            Self::Neon => cfg!(target_arch = "aarch64"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => cfg!(feature = "avx512") && is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }
}

static LEVEL: AtomicU8 = AtomicU8::new(0);

/// The best level of this CPU, unless [`limit_level`] set a lower one.
pub fn level() -> Level {
    match LEVEL.load(Relaxed) {
        1 => Level::Plain,
        2 => Level::Neon,
        3 => Level::Avx2,
        4 => Level::Avx512,
        _ => limit_level(most()),
    }
}

#[cfg(not(test))]
fn most() -> Level {
    Level::Avx512
}

#[cfg(test)]
use tests::most;

/// Whether there are hand-written kernels for this CPU.
pub fn vectors() -> bool {
    level() != Level::Plain
}

static BF16: AtomicU8 = AtomicU8::new(0);

/// Whether products of BF16 pairs are there and worth while: AVX-512 BF16 on CPUs of AMD, which make a vector of 16
/// pairs about as fast as an FMA. Those of Intel make one in the time of four FMAs (measured on a fifth-generation
/// Xeon: 1.35 against 5.4 G/s), half as many operations as in F32.
pub fn bf16() -> bool {
    let known = match BF16.load(Relaxed) {
        0 => {
            let found = best_bf16() || insisted();
            BF16.store(1 + u8::from(found), Relaxed);
            found
        }
        known => known == 2,
    };
    known && level() == Level::Avx512
}

#[cfg(target_arch = "x86_64")]
fn best_bf16() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    let amd = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD";
    amd && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512bf16")
}

#[cfg(not(target_arch = "x86_64"))]
fn best_bf16() -> bool {
    false
}

#[cfg(not(test))]
fn insisted() -> bool {
    false
}

#[cfg(test)]
use tests::insisted;

/// Has [`bf16`] say yes on any CPU with AVX-512, whatever it tells of itself. For tests and measurements.
///
/// # Safety
/// The CPU executes the instructions of AVX-512 BF16; one that does not ends the process.
pub unsafe fn force_bf16() {
    BF16.store(2, Relaxed);
}

/// Uses no level above `most` from now on, and tells which one that is. For tests and measurements: results
/// depend on it.
pub fn limit_level(most: Level) -> Level {
    let level = Level::ALL.into_iter().filter(|&level| level <= most && level.is_there()).max();
    let level = level.unwrap_or(Level::Plain);
    LEVEL.store(level as u8, Relaxed);
    level
}

/// The vector level in use, part of what results depend on: `x86-v4` (AVX-512), `x86-v3` (AVX2),
/// `baseline` ...
pub fn dispatch_level() -> &'static str {
    struct Level;
    impl pulp::WithSimd for Level {
        type Output = &'static str;
        fn with_simd<S: pulp::Simd>(self, _: S) -> &'static str {
            match (std::any::type_name::<S>(), S::F32_LANES) {
                (_, 16) => "x86-v4",
                (_, 8) => "x86-v3",
                (_, 4) => "128-bit",
                _ => "scalar",
            }
        }
    }
    pulp::Arch::new().dispatch(Level)
}

/// A pointer that tasks writing disjoint elements share.
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
        // SAFETY: at lies inside the buffer or one past its end.
        unsafe { self.0.add(at) }
    }
}

/// A cache line. No vector of a panel or of scores may lie in two of them.
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
    // Not held meanwhile: a thread that waits for its tasks may take up another op.
    let mut memory = SHARED.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
    let result = body(grown(&mut memory, len));
    SHARED.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
    result
}

/// Frees what [`with_shared_scratch`] keeps.
pub fn release_shared_scratch() {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// `len` floats of memory that is made anew where it is smaller.
fn grown(memory: &mut Vec<Line>, len: usize) -> &mut [f32] {
    let lines = len.div_ceil(LINE);
    if memory.len() < lines {
        // Exactly as much as planned, and never the old and the new memory together.
        *memory = Vec::new();
        memory.reserve_exact(lines);
        memory.resize(lines, Line([0.0; LINE]));
    }
    // SAFETY: lines are LINE floats each, without anything between them.
    let floats = unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<f32>(), len) };
    // Whoever reads what it did not write is to be found out.
    #[cfg(test)]
    floats.fill(f32::NAN);
    floats
}

/// Widens FP16 to FP32, exactly, so that every CPU gives the same bits.
pub fn widen(from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "widen shapes");
    // `half` converts 8 values by a call of its own, which costs 7% of a training step and four fifths of decoding.
    if at_level!(s => widen_all(s, from, to)).is_none() {
        from.convert_to_f32_slice(to);
    }
}

/// One FP32 value of a frozen vector.
#[inline(always)]
pub fn wide(value: f16) -> f32 {
    value.to_f32()
}

/// e^x for x <= 0 or moderate x, to 2 ulp, in a form that compilers turn into vector code.
///
/// Range reduction x = n ln 2 + r and a degree-6 polynomial on |r| <= ln 2 / 2, as in Cephes `expf`.
/// Below -87.3 the result is 0 (no subnormal numbers), above 88.3 it is infinite.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number without a library call.
    const ROUND: f32 = 12_582_912.0;
    let inside = x.clamp(-87.3, 88.3);
    let n = (inside * LOG2_E + ROUND) - ROUND;
    let r = (inside - n * LN2_HI) - n * LN2_LO;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let power = f32::from_bits(((n as i32 + 127) << 23) as u32);
    let value = (p * r * r + r + 1.0) * power;
    let value = if x > 88.3 { f32::INFINITY } else { value };
    if x < -87.3 { 0.0 } else { value }
}

/// A strided matrix in memory: element (i, j) stands at `start + i * row + j * column`.
#[derive(Clone, Copy)]
pub struct Strides {
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub column: usize,
}

impl Strides {
    /// Rows one after another, `row` elements apart.
    pub fn rows(row: usize) -> Self {
        Self { row, column: 1 }
    }

    /// The transpose of [`Strides::rows`].
    pub fn columns(column: usize) -> Self {
        Self { row: 1, column }
    }
}

/// `dst (m, n) = keep * dst + scale * lhs (m, k) rhs (k, n)` on this thread, FP32 accumulation; `keep` is 0 or 1,
/// and rows of `dst` are in one piece.
///
/// # Safety
/// The three matrices lie in valid memory for their strides, and nothing else writes `dst` or reads it
/// meanwhile.
#[allow(clippy::too_many_arguments, reason = "a matrix product has three matrices, three sizes, two factors")]
#[inline]
pub unsafe fn gemm(
    (m, n, k): (usize, usize, usize),
    dst: *mut f32,
    dst_strides: Strides,
    keep: f32,
    lhs: *const f32,
    lhs_strides: Strides,
    rhs: *const f32,
    rhs_strides: Strides,
    scale: f32,
) {
    assert!(dst_strides.column == 1 && (keep == 0.0 || keep == 1.0), "a product as it is meant");
    let operands = (Operand { data: lhs, strides: lhs_strides }, Operand { data: rhs, strides: rhs_strides });
    let dst_row = (dst, dst_strides.row);
    // SAFETY: promised by the caller.
    if at_level!(s => unsafe { product(s, (m, n, k), dst_row, keep == 1.0, operands, scale) }).is_some() {
        return;
    }
    // SAFETY: promised by the caller.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst,
            dst_strides.column as isize,
            dst_strides.row as isize,
            keep != 0.0,
            lhs,
            lhs_strides.column as isize,
            lhs_strides.row as isize,
            rhs,
            rhs_strides.column as isize,
            rhs_strides.row as isize,
            keep,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// Floats that [`gemm`](fn@gemm) may pack its operands into for a product of these sizes. The crate of that name packs
/// the right one whole and of the left one what fits its second-level cache; freed when the product is done.
pub fn packing(m: usize, n: usize, k: usize) -> usize {
    if vectors() {
        return scratch(n, k);
    }
    // As read in gemm-common 0.19: at most 512 of k at a time on caches of today, 768 of m packed ahead.
    k.min(512) * (n.next_multiple_of(16) + m.min(768).next_multiple_of(48))
}

/// Bytes that the crate `gemm` keeps for each thread: as large as the second-level cache.
pub fn slab() -> usize {
    if vectors() {
        return 0;
    }
    gemm_common::cache::CACHE_INFO[1].cache_bytes
}

#[cfg(test)]
mod tests {
    use std::{env, process::Command};

    use super::*;

    const LEVEL: &str = "ENGRAFT_TEST_LEVEL";

    /// The best level that this run of the tests may use.
    pub(super) fn most() -> Level {
        let wanted = env::var(LEVEL).ok();
        let level = Level::ALL.into_iter().find(|level| wanted == Some(format!("{level:?}")));
        level.unwrap_or(Level::Avx512)
    }

    const PAIRS: &str = "Bf16";

    /// Whether this run of the tests uses BF16 products, whatever the CPU tells of itself.
    pub(super) fn insisted() -> bool {
        env::var(LEVEL).is_ok_and(|wanted| wanted == PAIRS)
    }

    /// CPUs may execute the instructions without telling of them, or be slow at them; that is no reason not to test
    /// kernels. One that lacks them ends the process.
    #[test]
    #[cfg(all(unix, target_arch = "x86_64"))]
    fn kernels_of_bf16_are_right_where_they_are_not_used() {
        use std::os::unix::process::ExitStatusExt;
        const UNKNOWN_INSTRUCTION: i32 = 4;
        if env::var_os(LEVEL).is_some() || level() != Level::Avx512 {
            return;
        }
        let mut tests = Command::new(env::current_exe().unwrap());
        let output = tests.arg("bf16").env(LEVEL, PAIRS).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let unknown = output.status.signal() == Some(UNKNOWN_INSTRUCTION);
        let right = output.status.success() && text.contains("test result: ok");
        assert!(unknown || right, "{text}");
        assert!(!text.contains("running 0 tests"), "{text}");
    }

    /// The level is one for the whole process, so the kernels' tests run again in others.
    #[test]
    fn kernels_are_right_at_lower_levels_too() {
        if env::var_os(LEVEL).is_some() {
            return; // this is one of them
        }
        for lower in Level::ALL.into_iter().filter(|&lower| lower < level() && lower.is_there()) {
            let mut tests = Command::new(env::current_exe().unwrap());
            let output = tests.arg("kernels::").env(LEVEL, format!("{lower:?}")).output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("test result: ok"), "{lower:?}: {text}");
            assert!(!text.contains("running 0 tests"), "{text}");
        }
    }

    #[test]
    fn exp_is_within_two_ulp() {
        for step in -8700..8800 {
            let x = step as f32 * 0.01;
            let true_value = f64::from(x).exp();
            let error = (f64::from(exp(x)) - true_value).abs() / true_value;
            assert!(error < 2.5e-7, "exp({x}) is off by {error}");
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn every_half_widens_as_its_plain_conversion() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).chain([f16::ONE; 5]).collect();
        let mut wide = vec![0f32; all.len()];
        widen(&all, &mut wide);
        for (half, wide) in all.iter().zip(wide) {
            assert!(half.to_f32() == wide || (half.is_nan() && wide.is_nan()), "{half:?}: {wide}");
        }
    }
}
