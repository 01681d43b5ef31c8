// Products of small batches with frozen weights (rows, cols), as fast as the weights can be read: each is read once.
// A block takes 32 columns and a share of the rows; shares are added in order.
#pragma once
#include "common.cuh"

namespace small_batch {
constexpr int ROWS = 8;          // most rows of x
constexpr int COLUMNS = 32;      // columns of w of a block: four lanes of 8
constexpr int GROUPS = 256 / 4;  // rows of w that a block reads at once
constexpr int WARPS = 256 / 32;

/// Sums one block's columns over its share of the rows of w; parts (splits, n, cols).
template <int N, class T>
__device__ void sum_rows(const T *x, const Weight<T> *w, float *parts, int n, int rows, int cols) {
  SHARED(float[WARPS][N][COLUMNS], sums);
  int column = blockIdx.x * COLUMNS + threadIdx.x % 4 * WIDE;
  int share = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * share;
  int end = min(rows, first + share);
  float sum[N][WIDE] = {}, weights[WIDE];
  for (int row = first + threadIdx.x / 4; row < end; row += GROUPS) {
    load(w + i64(row) * cols + column, cols - column, weights);
#pragma unroll
    for (int r = 0; r < N; r++) {
      if (r >= n) break;
      float input = widen(x[i64(r) * rows + row]);
#pragma unroll
      for (int i = 0; i < WIDE; i++) sum[r][i] += input * weights[i];
    }
  }
#pragma unroll
  for (int r = 0; r < N; r++) {
#pragma unroll
    for (int i = 0; i < WIDE; i++) {
      // Lanes of the same columns are 4 apart.
      for (int step = 16; step >= 4; step /= 2) sum[r][i] += __shfl_xor_sync(~0u, sum[r][i], step);
      if (lane() < 4) sums[warp()][r][lane() * WIDE + i] = sum[r][i];
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < n * COLUMNS; at += blockDim.x) {
    int r = at / COLUMNS, i = at % COLUMNS, out = blockIdx.x * COLUMNS + i;
    float total = 0;
    for (int part = 0; part < WARPS; part++) total += sums[part][r][i];
    if (out < cols) parts[(i64(blockIdx.y) * n + r) * cols + out] = total;
  }
}

/// Shares of x (n, rows) w for this block's columns. Grid: (ceil(cols / 32) or more, splits) blocks of 256.
template <class T> __device__ void shares(const T *x, const Weight<T> *w, float *parts, int n, int rows, int cols) {
  if (n == 1) return sum_rows<1>(x, w, parts, n, rows, cols);
  sum_rows<ROWS>(x, w, parts, n, rows, cols);
}

/// Element `at` of residual + bias + the sum of parts (splits, n, cols), in order.
template <class T>
__device__ __forceinline__ float total(const float *parts, int splits, const T *residual, const half_t *bias, int at,
                                       int n, int cols) {
  float sum = (residual ? widen(residual[at]) : 0.f) + (bias ? widen(bias[at % cols]) : 0.f);
  for (int part = 0; part < splits; part++) sum += parts[i64(part) * n * cols + at];
  return sum;
}
} // namespace small_batch
