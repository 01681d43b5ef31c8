//! Thin products of strided FP32 matrices on one thread.

use super::{
    level::vectors,
    simd::{
        at_level,
        product::{Operand, Product, product, scratch},
    },
    strides::Strides,
};

/// `dst (m, n) = keep * dst + scale * lhs (m, k) rhs (k, n)` on this thread, FP32 accumulation; `keep` is 0 or 1,
/// and rows of `dst` are in one piece.
///
/// # Safety
/// The three matrices are valid for their strides, and nothing else writes or reads `dst` meanwhile.
#[allow(
    clippy::too_many_arguments,
    reason = "as in BLAS: three matrices with strides, three sizes, two factors"
)]
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
    assert!(
        dst_strides.column == 1 && (keep == 0.0 || keep == 1.0),
        "rows in one piece, and 0 or 1 times dst"
    );
    let it = Product {
        m,
        n,
        k,
        dst,
        dst_row: dst_strides.row,
        keep: keep == 1.0,
        lhs: Operand { data: lhs, strides: lhs_strides },
        rhs: Operand { data: rhs, strides: rhs_strides },
        scale,
    };
    // SAFETY: promised by the caller.
    if at_level!(s => unsafe { product(s, it) }).is_some() {
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

/// Most floats that [`gemm`](fn@gemm) packs its operands into for a product of these sizes. The crate of that name
/// packs the whole right operand, and the part of the left one that fits the second-level cache. Freed after the
/// product.
pub fn packing(m: usize, n: usize, k: usize) -> usize {
    if vectors() {
        return scratch(n, k);
    }
    // From the source of gemm-common 0.19: at most 512 of k at a time on today's caches, 768 of m packed ahead.
    k.min(512) * (n.next_multiple_of(16) + m.min(768).next_multiple_of(48))
}

/// Bytes that the crate `gemm` keeps for each thread: the size of the second-level cache.
pub fn slab() -> usize {
    if vectors() {
        return 0;
    }
    gemm_common::cache::CACHE_INFO[1].cache_bytes
}
