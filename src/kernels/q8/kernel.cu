// 8-bit weights: values for the library's products, and products of small batches that read each code once.
#include "q8/codes.cuh"

/// to (rows, cols) = the values of w, rounded to T. Grid: ceil(rows ceil(cols / 8) / 256) blocks of 256.
template <class T> __device__ void q8_widen(q8::Coded w, T *to) {
  int pieces = (w.cols + WIDE - 1) / WIDE;
  i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x, row = at / pieces;
  if (row >= w.rows) return;
  int column = at % pieces * WIDE;
  float x[WIDE];
  q8::load(w, row, column, w.cols - column, x);
  store(x, w.cols - column, to + row * w.cols + column);
}
EXPORT(q8_widen, (q8::Coded w, T *to), (w, to))

constexpr int ROWS = 8;                // most rows of x
constexpr int LANES = 16;              // threads side by side in a row of w
constexpr int COLUMNS = LANES * WIDE;  // of w of a block: four blocks of codes
constexpr int GROUPS = 256 / LANES;    // rows of w that a block reads at once
constexpr int WARPS = 256 / 32;

template <int N, class T>
__device__ __forceinline__ void sum_rows(const T *x, const q8::Coded &w, float *parts, int n) {
  SHARED(float[WARPS][N][COLUMNS], sums);
  int start = threadIdx.x % LANES * WIDE, column = blockIdx.x * COLUMNS + start;
  int share = (w.rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * share, end = min(w.rows, first + share);
  float sum[N][WIDE] = {}, weights[WIDE];
  for (int row = first + threadIdx.x / LANES; row < end && column < w.cols; row += GROUPS) {
    q8::load(w, row, column, w.cols - column, weights);
#pragma unroll
    for (int r = 0; r < N; r++) {
      if (r >= n) break;
      float input = widen(x[i64(r) * w.rows + row]);
#pragma unroll
      for (int i = 0; i < WIDE; i++) sum[r][i] += input * weights[i];
    }
  }
#pragma unroll
  for (int r = 0; r < N; r++) {
#pragma unroll
    for (int i = 0; i < WIDE; i++) {
      // The other half of the warp has the same columns.
      sum[r][i] += __shfl_xor_sync(~0u, sum[r][i], LANES);
      if (lane() < LANES) sums[warp()][r][start + i] = sum[r][i];
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < n * COLUMNS; at += blockDim.x) {
    int r = at / COLUMNS, i = at % COLUMNS, out = blockIdx.x * COLUMNS + i;
    float total = 0;
    for (int part = 0; part < WARPS; part++) total += sums[part][r][i];
    if (out < w.cols) parts[(i64(blockIdx.y) * n + r) * w.cols + out] = total;
  }
}

/// parts (splits, n, cols): shares of x (n, rows) w, n <= 8. Grid: (ceil(cols / 128), splits) blocks of 256.
template <class T> __device__ void q8_gemv_nn(const T *x, q8::Coded w, float *parts, int n) {
  if (n == 1) return sum_rows<1>(x, w, parts, n);
  sum_rows<ROWS>(x, w, parts, n);
}
EXPORT(q8_gemv_nn, (const T *x, q8::Coded w, float *parts, int n), (x, w, parts, n))

/// A warp for each row of w: y (N, rows) = x (N, cols) w^T.
template <int N, class T> __device__ __forceinline__ void dot_rows(const T *x, const q8::Coded &w, float *y, int n, i64 ld) {
  int row = blockIdx.x * WARPS + warp();
  if (row >= w.rows) return;
  float sum[N] = {}, weights[WIDE], inputs[WIDE];
  for (int at = lane() * WIDE; at < w.cols; at += 32 * WIDE) {
    q8::load(w, row, at, w.cols - at, weights);
#pragma unroll
    for (int r = 0; r < N; r++) {
      if (r >= n) break;
      load(x + i64(r) * w.cols + at, w.cols - at, inputs);
#pragma unroll
      for (int i = 0; i < WIDE; i++) sum[r] += weights[i] * inputs[i];
    }
  }
#pragma unroll
  for (int r = 0; r < N; r++) {
    if (r >= n) break;
    float total = warp_sum(sum[r]);
    if (lane() == 0) y[r * ld + row] = total;
  }
}

/// y (n, rows) = x (n, cols) w^T, n <= 8; rows of y are ld apart. Grid: ceil(rows / 8) blocks of 256.
template <class T> __device__ void q8_gemv_nt(const T *x, q8::Coded w, float *y, int n, i64 ld) {
  if (n == 1) return dot_rows<1>(x, w, y, n, ld);
  dot_rows<ROWS>(x, w, y, n, ld);
}
EXPORT(q8_gemv_nt, (const T *x, q8::Coded w, float *y, int n, i64 ld), (x, w, y, n, ld))
