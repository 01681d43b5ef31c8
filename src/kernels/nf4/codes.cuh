// 4-bit codes on a device, in the order that nf4/mod.rs describes: a warp that takes one row of words of a strip reads
// 256 bytes side by side, and its lanes write neighbouring columns.
#pragma once
#include "common.cuh"

namespace nf4 {
constexpr int BLOCK = 64;   // rows of a column that share a scale
constexpr int NESTED = 256; // scales that share a factor
constexpr int STRIP = 64;   // columns side by side
constexpr int WORD = 8;     // rows of a word

/// A matrix of codes.
struct Coded {
  const unsigned *words;       // (strips, ceil(rows / WORD), STRIP)
  const unsigned char *scales; // codes of the scales, (cols, ceil(rows / BLOCK))
  const float *nested;         // offset, then the factor of each NESTED scales
  int rows, cols;
};

/// Two words, moved by one instruction.
struct alignas(8) Words {
  unsigned at[2];
};

/// Entry `code` of the book of scales, in the FP32 operations that nf4/mod.rs makes it with.
__device__ __forceinline__ float of_book(int code) {
  int at = code < 127 ? 127 - code : code - 127;
  if (at == 0) return 0.f;
  if (at == 128) return 1.f;
  int decade = 0;
  while (at >> (decade + 1)) decade++;
  int parts = 1 << decade, i = at - parts;
  float step = (1.f - 0.1f) / parts, top = decade == 0   ? 1e-6f
                                          : decade == 1 ? 1e-5f
                                          : decade == 2 ? 1e-4f
                                          : decade == 3 ? 1e-3f
                                          : decade == 4 ? 1e-2f
                                          : decade == 5 ? 1e-1f
                                                        : 1.f;
  auto border = [=](int i) { return i < (parts + 1) / 2 ? fmaf(step, i, 0.1f) : fmaf(-step, parts - i, 1.f); };
  float value = __fmul_rn(top, __fadd_rn(border(i), border(i + 1)) / 2);
  return code < 127 ? -value : value;
}

/// Writes the value of each code for the block's threads.
__device__ __forceinline__ void write_values(float (&to)[16]) {
  // bitsandbytes' get_4bit_type("nf4"), as in nf4/mod.rs.
  constexpr float VALUES[16] = {-1.f,          -0.6961928f,   -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f,
                                -0.091050036f, 0.f,           0.0795803f,   0.1609302f,  0.2461123f,   0.33791524f,
                                0.44070983f,   0.562617f,     0.72295684f,  1.f};
#pragma unroll
  for (int code = 0; code < 16; code++)
    if (threadIdx.x == code) to[code] = VALUES[code];
}

/// Writes the scales of COUNT blocks of rows from `block` on, of the columns of `strip`; 0 where there are none. Products
/// and sums are rounded one by one, as on a CPU. Neighbouring threads read neighbouring codes of one column.
template <int COUNT> __device__ __forceinline__ void write_scales(const Coded &w, int strip, int block, float (&to)[COUNT][STRIP]) {
  int blocks = (w.rows + BLOCK - 1) / BLOCK;
  for (int at = threadIdx.x; at < COUNT * STRIP; at += blockDim.x) {
    int column = strip * STRIP + at / COUNT, own = block + at % COUNT;
    float scale = 0;
    if (column < w.cols && own < blocks) {
      i64 index = i64(column) * blocks + own;
      scale = __fadd_rn(__fmul_rn(of_book(w.scales[index]), w.nested[1 + index / NESTED]), w.nested[0]);
    }
    to[at % COUNT][at / COUNT] = scale;
  }
}

/// The words of two columns from `column` of a strip, of the word row of `row`.
__device__ __forceinline__ Words load(const Coded &w, int strip, int row, int column) {
  int word_rows = (w.rows + WORD - 1) / WORD;
  i64 at = (i64(strip) * word_rows + row / WORD) * STRIP + column;
  return *reinterpret_cast<const Words *>(w.words + at);
}

/// The code of row i of a word.
__device__ __forceinline__ int code(unsigned word, int i) { return word >> (8 * (i % 4) + 4 * (i / 4)) & 15; }
} // namespace nf4
