// A delta that is fused into a product through the matrix which the product adds to, on tensor cores: 16-bit activations,
// one delta on all columns, no dropout, rank up to 16.
//
// The thin products x A^T and dy B are made from factors that are rounded to T as they are read; the sums stay FP32, and
// so does what follows but for one rounding of each result. B is rounded times LIFT, a power of two, which keeps small
// numbers from FP16's subnormals and is exact.
//
// A block of 4 warps owns 32 rows. First two warps for each 16 rows share the terms of a thin product; then each warp
// makes a quarter of the columns of what follows. No two blocks write one element.
#pragma once
#include "mma.cuh"

namespace fused {

constexpr int THREADS = 128, ROWS = 32, SHARES = 2;
constexpr float LIFT = 256.f;

/// Eight neighbouring 16-bit elements, two to a register as operands take them.
struct alignas(16) Words {
  unsigned at[4];
};

template <class T> __device__ __forceinline__ Words packed(const float (&x)[WIDE], float factor) {
  Words words;
#pragma unroll
  for (int i = 0; i < 4; i++) words.at[i] = pack<T>(x[2 * i] * factor, x[2 * i + 1] * factor);
  return words;
}

/// Shares of a thin product (rows, ranks), of 8 ranks a tile.
template <int TILES> using Thin = float[SHARES][ROWS][8 * TILES];

/// Shares of x (n, terms) factor (ranks, terms)^T for the rows from `row` on; `factor(rank, term, values)` reads 8 terms,
/// times `lift`. Terms are a multiple of 8.
///
/// The order of terms within a product of 16 is free as long as both operands have the same: lane % 4 takes 8 neighbours
/// of 32, four for each of two products, so that loads are 16 bytes.
template <class T, int TILES, class Factor>
__device__ __forceinline__ void thin(const T *x, int n, int terms, int row, const Factor &factor, float lift,
                                     Thin<TILES> &shares) {
  int group = lane() / 4, pair = lane() % 4 * 2, tile = warp() % 2 * 16, share = warp() / 2;
  bool above = row + tile + group < n, below = row + tile + group + 8 < n;
  const T *upper = x + i64(row + tile + group) * terms, *lower = upper + i64(8) * terms;
  float sum[TILES][4] = {};
#pragma unroll 2
  for (int first = share * 32; first < terms; first += SHARES * 32) {
    int term = first + lane() % 4 * WIDE;
    Words u = {}, l = {};
    if (above && term < terms) u = *reinterpret_cast<const Words *>(upper + term);
    if (below && term < terms) l = *reinterpret_cast<const Words *>(lower + term);
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      float v[WIDE];
      factor(j * 8 + group, term, v);
      Words right = packed<T>(v, lift);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        unsigned left[4] = {u.at[2 * half], l.at[2 * half], u.at[2 * half + 1], l.at[2 * half + 1]};
        mma<T>(sum[j], left, right.at + 2 * half);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < TILES; j++)
#pragma unroll
    for (int r = 0; r < 4; r++) shares[share][tile + group + r / 2 * 8][j * 8 + pair + r % 2] = sum[j][r];
}

/// Element of a thin product: its shares in order, times `factor`.
template <int TILES>
__device__ __forceinline__ float element(const Thin<TILES> &shares, int row, int rank, float factor) {
  return (shares[0][row][rank] + shares[1][row][rank]) * factor;
}

/// Writes a thin product, rounded, to the rows from `row` on of `to` (n, 8 TILES).
template <class T, int TILES>
__device__ __forceinline__ void keep(const Thin<TILES> &shares, float factor, T *to, int n, int row) {
  constexpr int RANKS = 8 * TILES;
  for (int at = threadIdx.x; at < ROWS * RANKS; at += THREADS)
    if (row + at / RANKS < n)
      to[i64(row) * RANKS + at] = narrow<T>(element<TILES>(shares, at / RANKS, at % RANKS, factor));
}

/// `out(row, column, values)` receives the thin product, rounded, times a factor (ranks, columns), in runs of 8 columns of
/// the block's rows; `value(rank, column)` reads the factor.
///
/// Columns of four products are interleaved so that a lane has 8 neighbours.
template <class T, int TILES, class Value, class Out>
__device__ __forceinline__ void widened(const Thin<TILES> &shares, float factor, int columns, const Value &value,
                                        const Out &out) {
  int group = lane() / 4, pair = lane() % 4 * 2;
  unsigned left[2][4];
#pragma unroll
  for (int tile = 0; tile < 2; tile++)
#pragma unroll
    for (int r = 0; r < 4; r++) {
      int row = tile * 16 + group + r % 2 * 8, rank = pair + r / 2 * 8;
      left[tile][r] = r / 2 < TILES ? pack<T>(element<TILES>(shares, row, rank, factor),
                                              element<TILES>(shares, row, rank + 1, factor))
                                    : 0u;
    }
  for (int first = warp() * 32; first < columns; first += THREADS) {
    float sum[2][4][4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int column = first + group / 2 * 8 + j * 2 + group % 2;
      unsigned right[2] = {};
#pragma unroll
      for (int r = 0; r < TILES; r++)
        right[r] = pack<T>(value(pair + 8 * r, column), value(pair + 8 * r + 1, column));
      mma<T>(sum[0][j], left[0], right);
      mma<T>(sum[1][j], left[1], right);
    }
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float v[WIDE];
#pragma unroll
        for (int i = 0; i < WIDE; i++) v[i] = sum[tile][i / 2][half * 2 + i % 2];
        out(tile * 16 + group + half * 8, first + lane() % 4 * WIDE, v);
      }
  }
}

template <class T, int TILES>
__device__ __forceinline__ void start(const T *x, const float *a, const float *b, T *xa, const T *residual,
                                      const half_t *bias, T *y, int n, int inputs, int outputs, int rank,
                                      float scale) {
  SHARED(Thin<TILES>, shares);
  int row = blockIdx.x * ROWS;
  auto rows_of_a = [=](int r, int term, float(&v)[WIDE]) {
    load(a + i64(r) * inputs + term, r < rank ? inputs - term : 0, v);
  };
  thin<T, TILES>(x, n, inputs, row, rows_of_a, 1.f, shares);
  __syncthreads();
  keep<T, TILES>(shares, 1.f, xa, n, row);
  if (!y) return;
  auto value = [=](int r, int column) {
    return r < rank && column < outputs ? b[i64(column) * rank + r] * LIFT : 0.f;
  };
  widened<T, TILES>(shares, 1.f, outputs, value, [=](int at, int column, float(&v)[WIDE]) {
    if (row + at >= n || column >= outputs) return;
    i64 place = i64(row + at) * outputs + column;
    float before[WIDE] = {}, more[WIDE] = {};
    if (residual) load(residual + place, WIDE, before);
    if (bias) load(bias + column, WIDE, more);
#pragma unroll
    for (int i = 0; i < WIDE; i++) v[i] = before[i] + more[i] + scale / LIFT * v[i];
    store(v, WIDE, y + place);
  });
}

} // namespace fused

/// xa (n, R) = x (n, in) A (r, in)^T, R the rank rounded up to 8 or 16; and where y is not null,
/// y (n, out) = residual + bias + scale xa B (out, r)^T, without those that are null. Widths are multiples of 8, rows of
/// x, residual and y at multiples of 16 bytes. Grid: ceil(n / 32) blocks of 128.
template <class T>
__device__ void delta_start(const T *x, const float *a, const float *b, T *xa, const T *residual, const half_t *bias,
                            T *y, int n, int inputs, int outputs, int rank, float scale) {
  if (rank <= 8) return fused::start<T, 1>(x, a, b, xa, residual, bias, y, n, inputs, outputs, rank, scale);
  fused::start<T, 2>(x, a, b, xa, residual, bias, y, n, inputs, outputs, rank, scale);
}
EXPORT_16(delta_start, __launch_bounds__(128),
          (const T *x, const float *a, const float *b, T *xa, const T *residual, const half_t *bias, T *y, int n,
           int inputs, int outputs, int rank, float scale),
          (x, a, b, xa, residual, bias, y, n, inputs, outputs, rank, scale))
