// 4-bit weights: values for the library's products, and products of small batches that read each code once.
#include "nf4/codes.cuh"

constexpr int BLOCKS = 4;                  // of rows that share scales, of a step
constexpr int STEP = BLOCKS * nf4::BLOCK;  // rows of a step: the threads of a block decode a scale each
constexpr int WARPS = 256 / 32;

/// Two elements, moved by one instruction.
template <class T> struct alignas(2 * sizeof(T)) Pair {
  T at[2];
};

/// to (count, cols) = the values of `count` rows of w from `first`, a multiple of 64, rounded to T.
/// Grid: (ceil(cols / 64), ceil(count / 256)) blocks of 256.
template <class T> __device__ void nf4_widen(nf4::Coded w, T *to, int first, int count) {
  SHARED(float[16], values);
  SHARED(float[BLOCKS][nf4::STRIP], scales);
  int start = first + blockIdx.y * STEP, end = min(first + count, start + STEP);
  nf4::write_values(values);
  nf4::write_scales(w, blockIdx.x, start / nf4::BLOCK, scales);
  __syncthreads();
  int own = 2 * lane(), column = blockIdx.x * nf4::STRIP + own;
  if (column >= w.cols) return;
  for (int row = start + warp() * nf4::WORD; row < end; row += WARPS * nf4::WORD) {
    nf4::Words words = nf4::load(w, blockIdx.x, row, own);
    const float *scale = &scales[(row - start) / nf4::BLOCK][own];
#pragma unroll
    for (int i = 0; i < nf4::WORD; i++) {
      if (row + i >= end) break;
      T *place = to + i64(row + i - first) * w.cols + column;
      Pair<T> pair;
#pragma unroll
      for (int j = 0; j < 2; j++) pair.at[j] = narrow<T>(values[nf4::code(words.at[j], i)] * scale[j]);
      if (column + 1 < w.cols && reinterpret_cast<uintptr_t>(place) % sizeof pair == 0) {
        *reinterpret_cast<Pair<T> *>(place) = pair;
      } else {
        place[0] = pair.at[0];
        if (column + 1 < w.cols) place[1] = pair.at[1];
      }
    }
  }
}
EXPORT(nf4_widen, (nf4::Coded w, T *to, int first, int count), (w, to, first, count))

template <int N, class T>
__device__ __forceinline__ void sum_rows(const T *x, const nf4::Coded &w, float *parts, int n) {
  SHARED(float[16], values);
  SHARED(float[BLOCKS][nf4::STRIP], scales);
  SHARED(float[WARPS][N][nf4::STRIP], sums);
  int steps = (w.rows + STEP - 1) / STEP, share = (steps + gridDim.y - 1) / gridDim.y * STEP;
  int own = 2 * lane(), end = min(w.rows, int(blockIdx.y + 1) * share);
  float sum[N][2] = {};
  nf4::write_values(values);
  for (int start = blockIdx.y * share; start < end; start += STEP) {
    __syncthreads(); // the step before is done with its scales
    nf4::write_scales(w, blockIdx.x, start / nf4::BLOCK, scales);
    __syncthreads();
    for (int row = start + warp() * nf4::WORD; row < min(end, start + STEP); row += WARPS * nf4::WORD) {
      nf4::Words words = nf4::load(w, blockIdx.x, row, own);
      const float *scale = &scales[(row - start) / nf4::BLOCK][own];
      float weights[2][WIDE];
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int i = 0; i < WIDE; i++) weights[j][i] = values[nf4::code(words.at[j], i)] * scale[j];
#pragma unroll
      for (int r = 0; r < N; r++) {
        if (r >= n) break;
        float inputs[WIDE]; // the same in all lanes
        load(x + i64(r) * w.rows + row, w.rows - row, inputs);
#pragma unroll
        for (int i = 0; i < WIDE; i++)
#pragma unroll
          for (int j = 0; j < 2; j++) sum[r][j] += inputs[i] * weights[j][i];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < N; r++)
#pragma unroll
    for (int j = 0; j < 2; j++) sums[warp()][r][own + j] = sum[r][j];
  __syncthreads();
  for (int at = threadIdx.x; at < n * nf4::STRIP; at += blockDim.x) {
    int r = at / nf4::STRIP, i = at % nf4::STRIP, out = blockIdx.x * nf4::STRIP + i;
    float total = 0;
    for (int part = 0; part < WARPS; part++) total += sums[part][r][i];
    if (out < w.cols) parts[(i64(blockIdx.y) * n + r) * w.cols + out] = total;
  }
}

/// parts (splits, n, cols): shares of x (n, rows) w, n <= 8; a share is whole steps.
/// Grid: (ceil(cols / 64), splits) blocks of 256.
template <class T> __device__ void nf4_gemv_nn(const T *x, nf4::Coded w, float *parts, int n) {
  if (n == 1) return sum_rows<1>(x, w, parts, n);
  sum_rows<8>(x, w, parts, n);
}
EXPORT(nf4_gemv_nn, (const T *x, nf4::Coded w, float *parts, int n), (x, w, parts, n))
