// 8-bit codes on a device, as q8/mod.rs describes them: row by row, like the FP16 matrix that they stand for, so that
// neighbouring threads read neighbouring codes.
#pragma once
#include "common.cuh"

namespace q8 {
constexpr int BLOCK = 32; // codes of a row that share a scale

/// A matrix of codes.
struct Coded {
  const signed char *codes; // (rows, cols)
  const half_t *scales;     // (rows, ceil(cols / BLOCK))
  int rows, cols;
};

/// 8 bytes, moved by one instruction.
struct alignas(8) Codes {
  signed char at[WIDE];
};

/// The next WIDE values of a row, of which `count` exist; the others are 0. `column` is a multiple of WIDE, so they are
/// of one block. A value is exact: the product of 7 and 11 bits.
__device__ __forceinline__ void load(const Coded &w, i64 row, int column, int count, float (&x)[WIDE]) {
  const signed char *from = w.codes + row * w.cols + column;
  float scale = widen(w.scales[row * ((w.cols + BLOCK - 1) / BLOCK) + column / BLOCK]);
  if (count >= WIDE && reinterpret_cast<uintptr_t>(from) % sizeof(Codes) == 0) {
    Codes codes = *reinterpret_cast<const Codes *>(from);
#pragma unroll
    for (int i = 0; i < WIDE; i++) x[i] = float(codes.at[i]) * scale;
  } else {
#pragma unroll
    for (int i = 0; i < WIDE; i++) x[i] = i < count ? float(from[i]) * scale : 0.f;
  }
}
} // namespace q8
