// Norms of the columns of a frozen matrix with its low-rank deltas, in FP32. Sums over rows are cut into shares, which
// are added in order: no atomics, the same bits in every run.
#include "common.cuh"

/// Of one delta: to_a (rank, inputs) = A, and to_b (rank, outputs) = scale diag(d) B^T diag(e) with B (columns, rank),
/// 0 outside of the `columns` from `first` on. Grid: ceil(rank max(inputs, outputs) / 256) blocks of 256.
extern "C" __global__ void column_norms_factors(const float *a, const float *b, const float *d, const float *e,
                                                float scale, float *to_a, float *to_b, int rank, int inputs,
                                                int outputs, int first, int columns) {
  i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at < i64(rank) * inputs) to_a[at] = a[at];
  if (at >= i64(rank) * outputs) return;
  int r = at / outputs, column = at % outputs - first;
  bool inside = column >= 0 && column < columns;
  to_b[at] = inside ? scale * b[i64(column) * rank + r] * (d ? d[r] : 1.f) * (e ? e[column] : 1.f) : 0.f;
}
LAUNCHER(column_norms_factors)

constexpr int TILE = 64;  // rows and columns of a tile of the matrix
constexpr int DEPTH = 16; // ranks of a step
constexpr int GROUPS = TILE / 4;

/// parts (splits, outputs): sums of the squares of share `blockIdx.y` of the rows of w (inputs, outputs) plus
/// a (ranks, inputs)^T b (ranks, outputs). A share is `share` rows, whole tiles; a thread has 4 x 4 elements of a tile.
/// Grid: (ceil(outputs / 64), ceil(inputs / share)) blocks of 256.
template <class T>
__device__ void column_norms_parts(const Weight<T> *w, const float *a, const float *b, float *parts, int ranks,
                                   int inputs, int outputs, int share) {
  SHARED(float[DEPTH][TILE], left);
  SHARED(float[DEPTH][TILE], right);
  SHARED(float[GROUPS][TILE], squares);
  int column = blockIdx.x * TILE, x = threadIdx.x % GROUPS * 4, group = threadIdx.x / GROUPS, y = group * 4;
  int end = min(inputs, int(blockIdx.y + 1) * share);
  float sum[4] = {};
  for (int row = blockIdx.y * share; row < end; row += TILE) {
    float tile[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        bool there = row + y + i < end && column + x + j < outputs;
        tile[i][j] = there ? widen(w[i64(row + y + i) * outputs + column + x + j]) : 0.f;
      }
    for (int term = 0; term < ranks; term += DEPTH) {
      __syncthreads(); // the step before is done with both
      for (int at = threadIdx.x; at < DEPTH * TILE; at += blockDim.x) {
        int k = at / TILE, place = at % TILE;
        bool there = term + k < ranks;
        left[k][place] = there && row + place < end ? a[i64(term + k) * inputs + row + place] : 0.f;
        right[k][place] = there && column + place < outputs ? b[i64(term + k) * outputs + column + place] : 0.f;
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < DEPTH; k++) {
        Vector<float> p = *reinterpret_cast<Vector<float> *>(&left[k][y]);
        Vector<float> q = *reinterpret_cast<Vector<float> *>(&right[k][x]);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) tile[i][j] += p.at[i] * q.at[j];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sum[j] += tile[i][j] * tile[i][j];
  }
#pragma unroll
  for (int j = 0; j < 4; j++) squares[group][x + j] = sum[j];
  __syncthreads();
  if (threadIdx.x >= TILE || column + int(threadIdx.x) >= outputs) return;
  float total = 0;
  for (int part = 0; part < GROUPS; part++) total += squares[part][threadIdx.x];
  parts[i64(blockIdx.y) * outputs + column + threadIdx.x] = total;
}
EXPORT_16(column_norms_parts, ,
       (const Weight<T> *w, const float *a, const float *b, float *parts, int ranks, int inputs, int outputs, int share),
       (w, a, b, parts, ranks, inputs, outputs, share))

/// norms (outputs) = root of the sum of parts (splits, outputs), in order. Grid: ceil(outputs / 256) blocks of 256.
extern "C" __global__ void column_norms_finish(const float *parts, int splits, float *norms, int outputs) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= outputs) return;
  float sum = 0;
  for (int part = 0; part < splits; part++) sum += parts[i64(part) * outputs + column];
  norms[column] = sqrtf(sum);
}
LAUNCHER(column_norms_finish)

/// g (count) = m / norms, 0 where the norm is. Grid: ceil(count / 256) blocks of 256.
extern "C" __global__ void output_scale(const float *m, const float *norms, float *g, int count) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) g[at] = norms[at] == 0.f ? 0.f : m[at] / norms[at];
}
LAUNCHER(output_scale)

/// dm (count) += dg / norms, nothing where the norm is 0. Grid: ceil(count / 256) blocks of 256.
extern "C" __global__ void output_scale_backward(const float *dg, const float *norms, float *dm, int count) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) dm[at] += norms[at] == 0.f ? 0.f : dg[at] / norms[at];
}
LAUNCHER(output_scale_backward)
