// Norms of the columns of a frozen matrix with its low-rank deltas, in FP32. Sums over rows are cut into shares, which
// are added in order: no atomics, the same bits in every run.
#include "nf4/codes.cuh"
#include "q8/codes.cuh"

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
/// `w.enter(row)` is called by all threads before the elements of a tile, `w(row, column)` reads one.
template <class Elements>
__device__ __forceinline__ void sum_squares(const Elements &w, const float *a, const float *b, float *parts, int ranks,
                                            int inputs, int outputs, int share) {
  SHARED(float[DEPTH][TILE], left);
  SHARED(float[DEPTH][TILE], right);
  SHARED(float[GROUPS][TILE], squares);
  int column = blockIdx.x * TILE, x = threadIdx.x % GROUPS * 4, group = threadIdx.x / GROUPS, y = group * 4;
  int end = min(inputs, int(blockIdx.y + 1) * share);
  float sum[4] = {};
  for (int row = blockIdx.y * share; row < end; row += TILE) {
    float tile[4][4];
    w.enter(row);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        bool there = row + y + i < end && column + x + j < outputs;
        tile[i][j] = there ? w(row + y + i, column + x + j) : 0.f;
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

/// Elements as they are.
template <class T> struct Plain {
  const T *w;
  int outputs;
  __device__ __forceinline__ void enter(int) const {}
  __device__ __forceinline__ float operator()(int row, int column) const { return widen(w[i64(row) * outputs + column]); }
};

/// As `sum_squares`. Grid: (ceil(outputs / 64), ceil(inputs / share)) blocks of 256.
template <class T>
__device__ void column_norms_parts(const Weight<T> *w, const float *a, const float *b, float *parts, int ranks,
                                   int inputs, int outputs, int share) {
  sum_squares(Plain<Weight<T>>{w, outputs}, a, b, parts, ranks, inputs, outputs, share);
}
EXPORT_16(column_norms_parts, ,
       (const Weight<T> *w, const float *a, const float *b, float *parts, int ranks, int inputs, int outputs, int share),
       (w, a, b, parts, ranks, inputs, outputs, share))

/// 8-bit codes.
struct Q8 {
  q8::Coded w;
  __device__ __forceinline__ void enter(int) const {}
  __device__ __forceinline__ float operator()(int row, int column) const {
    int blocks = (w.cols + q8::BLOCK - 1) / q8::BLOCK;
    return float(w.codes[i64(row) * w.cols + column]) * widen(w.scales[i64(row) * blocks + column / q8::BLOCK]);
  }
};

/// As `sum_squares`, of 8-bit codes. Grid: (ceil(outputs / 64), ceil(inputs / share)) blocks of 256.
extern "C" __global__ void column_norms_parts_q8(q8::Coded w, const float *a, const float *b, float *parts, int ranks,
                                                 int share) {
  sum_squares(Q8{w}, a, b, parts, ranks, w.rows, w.cols, share);
}
LAUNCHER(column_norms_parts_q8)

/// 4-bit codes: a tile is a block of rows of a strip, with one scale a column.
struct Nf4 {
  nf4::Coded w;
  float (&values)[16];
  float (&scales)[1][nf4::STRIP];
  __device__ __forceinline__ void enter(int row) const {
    __syncthreads(); // the tile before is done with its scales
    nf4::write_values(values);
    nf4::write_scales(w, blockIdx.x, row / nf4::BLOCK, scales);
    __syncthreads();
  }
  __device__ __forceinline__ float operator()(int row, int column) const {
    int own = column % nf4::STRIP, word_rows = (w.rows + nf4::WORD - 1) / nf4::WORD;
    unsigned word = w.words[(i64(blockIdx.x) * word_rows + row / nf4::WORD) * nf4::STRIP + own];
    return values[nf4::code(word, row % nf4::WORD)] * scales[0][own];
  }
};

/// As `sum_squares`, of 4-bit codes. Grid: (ceil(outputs / 64), ceil(inputs / share)) blocks of 256.
extern "C" __global__ void column_norms_parts_nf4(nf4::Coded w, const float *a, const float *b, float *parts, int ranks,
                                                  int share) {
  static_assert(TILE == nf4::STRIP && TILE == nf4::BLOCK, "a tile has one scale a column");
  SHARED(float[16], values);
  SHARED(float[1][nf4::STRIP], scales);
  sum_squares(Nf4{w, values, scales}, a, b, parts, ranks, w.rows, w.cols, share);
}
LAUNCHER(column_norms_parts_nf4)

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
