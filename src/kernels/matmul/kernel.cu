// Kernels around cuBLASLt's matrix products: initial values of outputs, and products of small batches, which are as
// fast as the FP16 weights can be read.
#include "matmul/small_batch.cuh"

/// y (n, c) = residual (n, c) + bias (c), either of which may be missing; y may be the residual itself.
/// Grid: ceil(n c / 2048) blocks of 256.
template <class T> __device__ void product_start(const T *residual, const half_t *bias, T *y, int n, int c) {
  i64 at = own(), count = i64(n) * c - at;
  float sum[WIDE] = {}, b[WIDE];
  if (residual) load(residual + at, count, sum);
  if (bias) {
    int column = at % c;
    if (column + WIDE <= c) {
      load(bias + column, WIDE, b);
    } else { // the end of one row and the beginning of the next
#pragma unroll
      for (int i = 0; i < WIDE; i++) b[i] = widen(bias[(column + i) % c]);
    }
#pragma unroll
    for (int i = 0; i < WIDE; i++) sum[i] += b[i];
  }
  store(sum, count, y + at);
}
EXPORT(product_start, (const T *residual, const half_t *bias, T *y, int n, int c), (residual, bias, y, n, c))

/// y (n, c) = bias (c) in every row, FP32. Grid: ceil(n c / 2048) blocks of 256.
extern "C" __global__ void dense_start(const float *bias, float *y, int n, int c) {
  i64 at = own(), count = i64(n) * c;
#pragma unroll
  for (int i = 0; i < WIDE; i++)
    if (at + i < count) y[at + i] = bias[(at + i) % c];
}
LAUNCHER(dense_start)

/// db (c) += sum of the rows of dy (n, c), in order. Grid: ceil(c / 256) blocks of 256.
extern "C" __global__ void column_sum(const float *dy, float *db, int n, int c) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= c) return;
  float sum = 0;
  for (int row = 0; row < n; row++) sum += dy[i64(row) * c + column];
  db[column] += sum;
}
LAUNCHER(column_sum)

/// A warp for each row of w: y (N, rows) = x (N, cols) w^T.
template <int N, class T>
__device__ void dot_rows(const T *x, const half_t *w, float *y, int n, int rows, int cols, i64 ld) {
  int row = blockIdx.x * 8 + warp();
  if (row >= rows) return;
  w += i64(row) * cols;
  float sum[N] = {}, weights[WIDE], inputs[WIDE];
  for (int at = lane() * WIDE; at < cols; at += 32 * WIDE) {
    load(w + at, cols - at, weights);
#pragma unroll
    for (int r = 0; r < N; r++) {
      if (r >= n) break;
      load(x + i64(r) * cols + at, cols - at, inputs);
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

/// y (n, rows) = x (n, cols) w^T with w (rows, cols), n <= 8; rows of y are ld apart.
/// Grid: ceil(rows / 8) blocks of 256.
template <class T>
__device__ void gemv_nt(const T *x, const half_t *w, float *y, int n, int rows, int cols, i64 ld) {
  if (n == 1) return dot_rows<1>(x, w, y, n, rows, cols, ld);
  dot_rows<small_batch::ROWS>(x, w, y, n, rows, cols, ld);
}
EXPORT(gemv_nt, (const T *x, const half_t *w, float *y, int n, int rows, int cols, i64 ld),
       (x, w, y, n, rows, cols, ld))

/// parts (splits, n, cols): shares of x (n, rows) w with w (rows, cols), n <= 8.
/// Grid: (ceil(cols / 32), splits) blocks of 256.
template <class T> __device__ void gemv_nn(const T *x, const half_t *w, float *parts, int n, int rows, int cols) {
  small_batch::shares(x, w, parts, n, rows, cols);
}
EXPORT(gemv_nn, (const T *x, const half_t *w, float *parts, int n, int rows, int cols),
       (x, w, parts, n, rows, cols))

/// y (n, cols) = residual + bias + sum of parts (splits, n, cols), in order. Grid: ceil(n cols / 256) blocks of 256.
template <class T>
__device__ void gemv_nn_finish(const float *parts, int splits, const T *residual, const half_t *bias, T *y, int n,
                               int cols) {
  int at = blockIdx.x * blockDim.x + threadIdx.x, count = n * cols;
  if (at >= count) return;
  y[at] = narrow<T>(small_batch::total(parts, splits, residual, bias, at, n, cols));
}
EXPORT(gemv_nn_finish,
       (const float *parts, int splits, const T *residual, const half_t *bias, T *y, int n, int cols),
       (parts, splits, residual, bias, y, n, cols))
