//! Vectors of 64-bit ARM, all of whose CPUs have them.

use std::arch::{aarch64::*, asm};

use half::f16;

use super::{MOST, Simd};

/// NEON.
#[derive(Clone, Copy)]
pub struct Neon;

// SAFETY of everything below: NEON belongs to the architecture; the caller vouches for memory.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all")]
unsafe impl Simd for Neon {
    type Floats = float32x4_t;
    type Words = uint32x4_t;
    type Table = uint8x16x4_t;
    const LANES: usize = 4;
    const MANY_REGISTERS: bool = true;
    // 24 sums, four weights and an element of x.
    const VECTORS: usize = 4;
    const TALL: (usize, usize) = (6, 4);
    const MASKS: bool = false;
    // 384 KiB.
    const PANEL: (usize, usize) = (768, 128);

    // Nothing to enable.
    #[inline(always)]
    fn enter<R>(self, body: impl FnOnce() -> R) -> R {
        #[inline(never)]
        fn with<R>(body: impl FnOnce() -> R) -> R {
            body()
        }
        with(body)
    }

    #[inline(always)]
    fn zero(self) -> float32x4_t {
        unsafe { vdupq_n_f32(0.0) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(x) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> float32x4_t {
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, vector: float32x4_t) {
        unsafe { vst1q_f32(to, vector) }
    }

    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, count: usize, fill: f32) -> float32x4_t {
        unsafe {
            if count >= 4 {
                return vld1q_f32(from);
            }
            let mut lanes = [fill; 4];
            for (i, lane) in lanes.iter_mut().enumerate().take(count) {
                *lane = *from.add(i);
            }
            vld1q_f32(lanes.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize, vector: float32x4_t) {
        unsafe {
            if count >= 4 {
                return vst1q_f32(to, vector);
            }
            let mut lanes = [0f32; 4];
            vst1q_f32(lanes.as_mut_ptr(), vector);
            for (i, lane) in lanes.into_iter().enumerate().take(count) {
                *to.add(i) = lane;
            }
        }
    }

    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vaddq_f32(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vsubq_f32(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmulq_f32(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(c, a, b) }
    }

    #[inline(always)]
    fn fnma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmsq_f32(c, a, b) }
    }

    #[inline(always)]
    fn min(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vminq_f32(a, b) }
    }

    #[inline(always)]
    fn max(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmaxq_f32(a, b) }
    }

    #[inline(always)]
    fn round(self, x: float32x4_t) -> float32x4_t {
        unsafe { vrndnq_f32(x) }
    }

    // In two steps, each a power of two that is a normal number: only the second one rounds.
    #[inline(always)]
    fn scale(self, x: float32x4_t, n: float32x4_t) -> float32x4_t {
        unsafe {
            let n = vcvtq_s32_f32(n);
            let half = vshrq_n_s32::<1>(n);
            let power =
                |n: int32x4_t| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))));
            vmulq_f32(vmulq_f32(x, power(half)), power(vsubq_s32(n, half)))
        }
    }

    #[inline(always)]
    fn reciprocal(self, x: float32x4_t) -> float32x4_t {
        unsafe { vdivq_f32(vdupq_n_f32(1.0), x) }
    }

    #[inline(always)]
    fn unless_equal(self, value: float32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vceqq_f32(a, b))) }
    }

    #[inline(always)]
    fn unless_reaching(self, value: float32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcgeq_f32(a, b))) }
    }

    #[inline(always)]
    fn sum(self, x: float32x4_t) -> f32 {
        unsafe { vaddv_f32(vadd_f32(vget_low_f32(x), vget_high_f32(x))) }
    }

    #[inline(always)]
    fn largest(self, x: float32x4_t) -> f32 {
        unsafe { vmaxvq_f32(x) }
    }

    #[inline(always)]
    unsafe fn widen(self, from: *const f16) -> float32x4_t {
        unsafe {
            let values = vld1_u16(from.cast());
            let wide: float32x4_t;
            // Rust's intrinsic asks for the FP16 arithmetic feature, which this instruction does not need.
            asm!(
                "fcvtl {wide:v}.4s, {values:v}.4h",
                values = in(vreg) values,
                wide = lateout(vreg) wide,
                options(pure, nomem, nostack, preserves_flags)
            );
            wide
        }
    }

    #[inline(always)]
    unsafe fn whole(self, from: *const i8) -> float32x4_t {
        unsafe {
            let codes = vcreate_s8(u64::from(from.cast::<u32>().read_unaligned()));
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(codes))))
        }
    }

    #[inline(always)]
    unsafe fn words(self, from: *const u8) -> uint32x4_t {
        unsafe { vreinterpretq_u32_u8(vld1q_u8(from)) }
    }

    #[inline(always)]
    fn table(self, values: &[f32; 16]) -> uint8x16x4_t {
        unsafe { vld1q_u8_x4(values.as_ptr().cast()) }
    }

    // A byte table of 64: the bytes of value i are 4 i to 4 i + 3.
    #[inline(always)]
    fn look_up(self, table: uint8x16x4_t, words: uint32x4_t, n: usize) -> float32x4_t {
        unsafe {
            let shifted = vshlq_u32(words, vdupq_n_s32(-((8 * (n % 4) + 4 * (n / 4)) as i32)));
            let code = vandq_u32(shifted, vdupq_n_u32(15));
            let bytes = vmlaq_u32(vdupq_n_u32(0x0302_0100), code, vdupq_n_u32(0x0404_0404));
            vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)))
        }
    }

    #[inline(always)]
    fn transposed(self, rows: [float32x4_t; MOST]) -> [float32x4_t; MOST] {
        unsafe {
            let pairs = |a: float32x4_t, b: float32x4_t| {
                let (even, odd) = (vtrn1q_f32(a, b), vtrn2q_f32(a, b));
                (vreinterpretq_f64_f32(even), vreinterpretq_f64_f32(odd))
            };
            let ((a, b), (c, d)) = (pairs(rows[0], rows[1]), pairs(rows[2], rows[3]));
            let mut out = rows;
            out[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
            out[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
            out[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
            out[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
            out
        }
    }

    #[inline(always)]
    fn fetch<T>(self, address: *const T) {
        unsafe {
            asm!(
                "prfm pldl1keep, [{address}]",
                address = in(reg) address,
                options(nostack, preserves_flags, readonly)
            );
        }
    }
}
