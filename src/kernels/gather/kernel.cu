// Gathers rows of a matrix into a smaller one, and scatters them back.
#include "common.cuh"

template <class T> __device__ __forceinline__ void copy_row(const T *from, T *to, int c) {
  float x[WIDE];
  for (int at = threadIdx.x * WIDE; at < c; at += blockDim.x * WIDE) {
    load(from + at, c - at, x);
    store(x, c - at, to + at);
  }
}

/// to (m, c): row i = from[rows[i]]. Grid: m blocks of 128.
template <class T> __device__ void gather(const T *from, const unsigned *rows, T *to, int c) {
  const T *source = from + i64(rows[blockIdx.x]) * c;
  T *target = to + i64(blockIdx.x) * c;
  copy_row(source, target, c);
}
EXPORT(gather, (const T *from, const unsigned *rows, T *to, int c), (from, rows, to, c))

/// to: row rows[i] = from[i] (m, c); no row occurs twice. Grid: m blocks of 128.
template <class T> __device__ void scatter(const T *from, const unsigned *rows, T *to, int c) {
  const T *source = from + i64(blockIdx.x) * c;
  T *target = to + i64(rows[blockIdx.x]) * c;
  copy_row(source, target, c);
}
EXPORT(scatter, (const T *from, const unsigned *rows, T *to, int c), (from, rows, to, c))
