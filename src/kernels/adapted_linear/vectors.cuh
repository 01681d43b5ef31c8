// Kernels of a site's vectors: input and output scales, a trained bias, and the scales d and e of a delta.
// None of them is launched where a layer or a delta has none.
#pragma once

/// A block of `to`, n rows of `columns` with `stride` between rows: that of `from` times the vector v (columns), or as it
/// is without one. `from` may be `to`. Grid: ceil(n ceil(columns / 8) / 256) blocks of 256.
template <class T>
__device__ void scale_columns(const T *from, const float *v, T *to, int n, int columns, int stride) {
  int runs = (columns + WIDE - 1) / WIDE;
  i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= i64(n) * runs) return;
  int column = at % runs * WIDE;
  i64 place = at / runs * stride + column;
  float x[WIDE], factors[WIDE];
  load(from + place, columns - column, x);
  if (v) {
    load(v + column, columns - column, factors);
#pragma unroll
    for (int i = 0; i < WIDE; i++) x[i] *= factors[i];
  }
  store(x, columns - column, to + place);
}
EXPORT(scale_columns, (const T *from, const float *v, T *to, int n, int columns, int stride),
       (from, v, to, n, columns, stride))

/// parts (splits, columns): shares of the sum over n rows of a block of x, or of x * y, `stride` between rows. A share
/// is whole rows, added in order. Grid: (ceil(columns / 256), splits) blocks of 256.
template <class T>
__device__ void sum_columns(const T *x, const T *y, float *parts, int n, int columns, int stride) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  int share = (n + gridDim.y - 1) / gridDim.y, first = blockIdx.y * share, end = min(n, first + share);
  float sum = 0;
  for (int row = first; row < end; row++) {
    i64 at = i64(row) * stride + column;
    sum += widen(x[at]) * (y ? widen(y[at]) : 1.f);
  }
  parts[i64(blockIdx.y) * columns + column] = sum;
}
EXPORT(sum_columns, (const T *x, const T *y, float *parts, int n, int columns, int stride),
       (x, y, parts, n, columns, stride))

/// y (n, columns) += bias (columns) + residual (n, columns); of the biases one at most is there.
/// Grid: ceil(n columns / 256) blocks of 256.
template <class T>
__device__ void add_bias(T *y, const half_t *bias, const float *trained, const T *residual, int n, int columns) {
  i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= i64(n) * columns) return;
  int column = at % columns;
  float sum = widen(y[at]) + (bias ? widen(bias[column]) : 0.f) + (trained ? trained[column] : 0.f);
  y[at] = narrow<T>(sum + (residual ? widen(residual[at]) : 0.f));
}
EXPORT(add_bias, (T *y, const half_t *bias, const float *trained, const T *residual, int n, int columns),
       (y, bias, trained, residual, n, columns))

/// Element `r` of d, 1 without one.
__device__ __forceinline__ float factor(const float *d, int r) { return d ? d[r] : 1.f; }

/// to (columns, r) = e * B (columns, r) * d. Grid: ceil(columns r / 256) blocks of 256.
extern "C" __global__ void lora_scaled_b(const float *b, const float *d, const float *e, float *to, int columns,
                                         int rank) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < columns * rank) to[at] = b[at] * factor(e, at / rank) * factor(d, at % rank);
}
LAUNCHER(lora_scaled_b)

/// Element `at` of M (columns, r) = scale dy^T xa, whose shares are parts (splits, columns, r).
__device__ __forceinline__ float m_of(const float *parts, int splits, float scale, int count, int at) {
  float sum = 0;
  for (int part = 0; part < splits; part++) sum += parts[i64(part) * count + at];
  return scale * sum;
}

/// dB (columns, r) += e * M * d, with M as `m_of` says. Grid: ceil(columns r / 256) blocks of 256.
extern "C" __global__ void lora_db_scaled(const float *parts, int splits, float scale, const float *d, const float *e,
                                          float *db, int columns, int rank) {
  int at = blockIdx.x * blockDim.x + threadIdx.x, count = columns * rank;
  if (at < count) db[at] += m_of(parts, splits, scale, count, at) * factor(e, at / rank) * factor(d, at % rank);
}
LAUNCHER(lora_db_scaled)

/// de (columns) += sum over r of B * M * d. Grid: ceil(columns / 8) blocks of 256, a warp a column.
extern "C" __global__ void lora_de(const float *parts, int splits, float scale, const float *b, const float *d,
                                   float *de, int columns, int rank) {
  int column = blockIdx.x * 8 + warp();
  if (column >= columns) return;
  float sum = 0;
  for (int r = lane(); r < rank; r += 32) {
    int at = column * rank + r;
    sum += m_of(parts, splits, scale, columns * rank, at) * b[at] * factor(d, r);
  }
  sum = warp_sum(sum);
  if (lane() == 0) de[column] += sum;
}
LAUNCHER(lora_de)

/// dd (r) += sum over columns of e * B * M. Grid: r blocks of 256.
extern "C" __global__ void lora_dd(const float *parts, int splits, float scale, const float *b, const float *e,
                                   float *dd, int columns, int rank) {
  int r = blockIdx.x;
  float sum = 0;
  for (int column = threadIdx.x; column < columns; column += blockDim.x) {
    int at = column * rank + r;
    sum += m_of(parts, splits, scale, columns * rank, at) * b[at] * factor(e, column);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) dd[r] += sum;
}
LAUNCHER(lora_dd)
