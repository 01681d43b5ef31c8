// The thin products of low-rank deltas, in FP32 on any type of activations, and dropout in front of A.
//
// One tiled product serves all of them: a block of 256 threads makes 64 rows and 16 or 64 columns of the result.
// Long sums are cut into shares, one a block in z: over the n rows of a batch (dA, dB) and, where few blocks would run,
// over the terms of xa and d_xa. `sum_parts` and `lora_join` add them in order: no atomics, the same bits in every run.
#include "matmul/small_batch.cuh"
#include "rng.cuh"

/// Which elements of a delta's input are dropped; the fields of `adapted_linear::Dropout`, the delta's place
/// already mixed into the key.
struct Dropout {
  unsigned long long key;
  float p;
  int first_row, seq_len, stride;

  /// x (8) of row `row` from `column` on, each element dropped or divided by 1 - p.
  __device__ __forceinline__ void apply(i64 row, int column, int inputs, float (&x)[WIDE]) const {
    if (p == 0.f) return;
    i64 token = (first_row + row / seq_len) * stride + row % seq_len;
    unsigned long long index = token * inputs + column;
    float kept = 1.f / (1.f - p);
#pragma unroll
    for (int i = 0; i < WIDE; i++) {
      x[i] = uniform(key, index + i) >= p ? x[i] * kept : 0.f;
    }
  }
};

/// A matrix in memory, read in runs of 8 along its rows.
template <class T> struct Matrix {
  const T *data;
  int rows, columns, stride;

  __device__ __forceinline__ void fetch(i64 row, int column, float (&x)[WIDE]) const {
    load(data + row * stride + column, row < rows ? columns - column : 0, x);
  }
};

/// A matrix whose elements are dropped as it is read.
template <class T> struct Dropped {
  Matrix<T> matrix;
  Dropout dropout;

  __device__ __forceinline__ void fetch(i64 row, int column, float (&x)[WIDE]) const {
    matrix.fetch(row, column, x);
    dropout.apply(row, column, matrix.columns, x);
  }
};

constexpr int THREADS = 256;
constexpr int TILE = 64; // rows of a block's result
constexpr int BANKS = 32; // of shared memory, 4 bytes wide

/// A tile of an operand in shared memory, `[term][place]`, and this thread's runs of the next one.
///
/// ALONG: terms are neighbours in memory (an operand (place, term)), else places are (term, place). A run of 8 terms is
/// then stored as 8 lines, by lanes whose terms are 8 apart: lines exchange their places by `at`, so that the 32 lanes
/// meet 32 banks. Four neighbouring places stay neighbours.
template <int DEPTH, int PLACES, bool ALONG> struct Operand {
  static constexpr int RUNS = PLACES * DEPTH / WIDE, STEPS = (RUNS + THREADS - 1) / THREADS;
  static constexpr int PER_LINE = (ALONG ? DEPTH : PLACES) / WIDE;
  static constexpr int LINE = ALONG && PLACES < BANKS ? BANKS : PLACES; // floats of a line
  static constexpr int FLOATS = DEPTH * LINE;
  float next[STEPS][WIDE];

  /// Where an element is in the tile.
  __host__ __device__ static constexpr int at(int term, int place) {
    return term * LINE + (ALONG ? place ^ term / WIDE * (BANKS * WIDE / DEPTH) : place);
  }

  /// Whether the lanes of every warp store each element of their runs to different banks.
  __host__ __device__ static constexpr bool stores_without_conflicts() {
    for (int first = 0; first < RUNS; first += 32)
      for (int i = 0; i < WIDE; i++) {
        unsigned banks = 0;
        for (int lane = 0; lane < 32; lane++) {
          int line = (first + lane) / PER_LINE, run = (first + lane) % PER_LINE * WIDE;
          banks |= 1u << (ALONG ? at(run + i, line) : 0) % BANKS;
        }
        if (ALONG && banks != ~0u) return false;
      }
    return true;
  }

  /// `f(line, place in the line, values)` for each of this thread's runs.
  template <class F> __device__ __forceinline__ void each(const F &f) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      int at = step * THREADS + threadIdx.x;
      if (at < RUNS) f(at / PER_LINE, at % PER_LINE * WIDE, next[step]);
    }
  }

  template <class M> __device__ __forceinline__ void fetch(const M &from, int place, int term, int end) {
    each([&](int line, int run, float(&x)[WIDE]) {
      if (ALONG) {
        from.fetch(place + line, term + run, x); // 0 after the last term
      } else if (term + line < end) {
        from.fetch(term + line, place + run, x);
      } else {
#pragma unroll
        for (int i = 0; i < WIDE; i++) x[i] = 0.f;
      }
    });
  }

  __device__ __forceinline__ void put(float (&tile)[FLOATS]) {
    each([&](int line, int run, float(&x)[WIDE]) {
      if (ALONG) {
#pragma unroll
        for (int i = 0; i < WIDE; i++) tile[at(run + i, line)] = x[i];
        return;
      }
      // Eight lanes store 16 bytes each at a time: every other four of them begin with their second half.
      int start = at(line, run), swapped = start / BANKS % 2;
      Vector<float> v[2];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        v[0].at[i] = swapped ? x[4 + i] : x[i];
        v[1].at[i] = swapped ? x[i] : x[4 + i];
      }
      *reinterpret_cast<Vector<float> *>(&tile[start + 4 * swapped]) = v[0];
      *reinterpret_cast<Vector<float> *>(&tile[start + 4 - 4 * swapped]) = v[1];
    });
  }
};

/// Terms of a step: deeper where the tile is narrow, since its steps wait for memory more than they compute.
template <int COLUMNS> constexpr int DEPTH_OF = COLUMNS == 16 ? 64 : 32;

/// Terms `first .. end` of left (rows, terms) right (terms, columns), for the tile at (`row`, `column`);
/// `out(row, column, values)` receives it in runs of 8 columns, also beyond the edges.
///
/// Where `end` is not the last term of all, it is a whole number of steps after `first`. A thread holds 4 x 4 elements.
/// Sixteen columns keep 64 threads busy, so that four groups share the terms of each step; their sums are added in order.
template <int COLUMNS, bool LEFT_ALONG, bool RIGHT_ALONG, class L, class R, class Out>
__device__ __forceinline__ void tile_product(int row, int column, int first, int end, const L &left, const R &right,
                                             const Out &out) {
  constexpr int GROUP = TILE / 4 * COLUMNS / 4, GROUPS = THREADS / GROUP;
  constexpr int DEPTH = DEPTH_OF<COLUMNS>, SHARE = DEPTH / GROUPS;
  typedef Operand<DEPTH, TILE, LEFT_ALONG> Left;
  typedef Operand<DEPTH, COLUMNS, RIGHT_ALONG> Right;
  static_assert(Left::stores_without_conflicts() && Right::stores_without_conflicts(), "lanes meet in a bank");
  SHARED(float[Left::FLOATS], a);
  SHARED(float[Right::FLOATS], b);
  SHARED(float[GROUPS][TILE][COLUMNS], result);
  int group = threadIdx.x / GROUP, x = threadIdx.x % GROUP % (COLUMNS / 4) * 4;
  int y = threadIdx.x % GROUP / (COLUMNS / 4) * 4;
  Left l;
  Right r;
  float sum[4][4] = {};
  l.fetch(left, row, first, end);
  r.fetch(right, column, first, end);
  for (int term = first; term < end; term += DEPTH) {
    __syncthreads(); // the step before is done with the tiles
    l.put(a);
    r.put(b);
    __syncthreads();
    if (term + DEPTH < end) { // on its way while this step computes
      l.fetch(left, row, term + DEPTH, end);
      r.fetch(right, column, term + DEPTH, end);
    }
#pragma unroll
    for (int step = 0; step < SHARE; step++) {
      int k = group * SHARE + step;
      Vector<float> p = *reinterpret_cast<Vector<float> *>(&a[Left::at(k, y)]);
      Vector<float> q = *reinterpret_cast<Vector<float> *>(&b[Right::at(k, x)]);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sum[i][j] += p.at[i] * q.at[j];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    Vector<float> v;
#pragma unroll
    for (int j = 0; j < 4; j++) v.at[j] = sum[i][j];
    *reinterpret_cast<Vector<float> *>(&result[group][y + i][x]) = v;
  }
  __syncthreads();
  for (int run = threadIdx.x; run < TILE * COLUMNS / WIDE; run += THREADS) {
    int i = run / (COLUMNS / WIDE), j = run % (COLUMNS / WIDE) * WIDE;
    float total[WIDE] = {};
#pragma unroll
    for (int part = 0; part < GROUPS; part++)
#pragma unroll
      for (int e = 0; e < WIDE; e++) total[e] += result[part][i][j + e];
    out(row + i, column + j, total);
  }
}

/// Writes a result (rows, columns), times `scale`.
struct Write {
  float *to;
  int rows, columns;
  float scale;

  __device__ __forceinline__ void operator()(i64 row, int column, float (&x)[WIDE]) const {
#pragma unroll
    for (int i = 0; i < WIDE; i++) x[i] *= scale;
    if (row < rows) store(x, columns - column, to + row * columns + column);
  }
};

/// Adds `scale` times a result to the columns from `to` on of a matrix with rows `stride` apart.
template <class T> struct Add {
  T *to;
  int rows, columns, stride;
  float scale;

  __device__ __forceinline__ void operator()(i64 row, int column, float (&x)[WIDE]) const {
    if (row >= rows) return;
    float sum[WIDE];
    T *place = to + row * stride + column;
    load(place, columns - column, sum);
#pragma unroll
    for (int i = 0; i < WIDE; i++) sum[i] += scale * x[i];
    store(sum, columns - column, place);
  }
};

/// This block's share of `terms`, in whole steps.
__device__ __forceinline__ int share_of(int terms) {
  constexpr int DEPTH = DEPTH_OF<16>;
  int share = (terms + gridDim.z - 1) / gridDim.z;
  return (share + DEPTH - 1) / DEPTH * DEPTH;
}

/// xa (splits, n, r): shares of drop(x (n, in)) A (r, in)^T; of one share the product itself.
/// Grid: (ceil(n / 64), ceil(r / 16), splits).
template <class T>
__device__ void lora_xa(const T *x, const float *a, Dropout dropout, float *xa, int n, int inputs, int rank) {
  Dropped<T> left = {{x, n, inputs, inputs}, dropout};
  Matrix<float> right = {a, rank, inputs, inputs};
  int share = share_of(inputs), begin = blockIdx.z * share;
  xa += i64(blockIdx.z) * n * rank;
  tile_product<16, true, true>(blockIdx.x * TILE, blockIdx.y * 16, begin, min(inputs, begin + share), left, right,
                               Write{xa, n, rank, 1.f});
}
EXPORT(lora_xa, (const T *x, const float *a, Dropout dropout, float *xa, int n, int inputs, int rank),
       (x, a, dropout, xa, n, inputs, rank))

/// Element r of row `row` of drop(x) A^T, by a warp.
template <class T>
__device__ __forceinline__ void xa_element(const T *x, const float *a, const Dropout &dropout, float *xa, int row, int r,
                                            int inputs, int rank) {
  float sum = 0, v[WIDE], w[WIDE];
  for (int at = lane() * WIDE; at < inputs; at += 32 * WIDE) {
    load(x + i64(row) * inputs + at, inputs - at, v);
    dropout.apply(row, at, inputs, v);
    load(a + i64(r) * inputs + at, inputs - at, w);
#pragma unroll
    for (int i = 0; i < WIDE; i++) sum += v[i] * w[i];
  }
  sum = warp_sum(sum);
  if (lane() == 0) xa[i64(row) * rank + r] = sum;
}

/// The same for few tokens: a warp an element. Grid: (ceil(r / 4), n) blocks of 128.
template <class T>
__device__ void lora_xa_small_batch(const T *x, const float *a, Dropout dropout, float *xa, int n, int inputs, int rank) {
  int r = blockIdx.x * 4 + warp();
  if (r < rank) xa_element(x, a, dropout, xa, blockIdx.y, r, inputs, rank);
}
EXPORT(lora_xa_small_batch, (const T *x, const float *a, Dropout dropout, float *xa, int n, int inputs, int rank),
       (x, a, dropout, xa, n, inputs, rank))

/// The same beside the frozen product of these rows, in one launch: xa (n, r) as above, and parts (splits, n, cols) of
/// x (n, rows) w (rows, cols), n <= 8. Grid: (ceil(cols / 32) + ceil(n r / 8), splits) blocks of 256.
template <class T>
__device__ void lora_small_batch(const T *x, const Weight<T> *w, float *parts, int n, int rows, int cols, const float *a,
                         Dropout dropout, float *xa, int rank) {
  int blocks = (cols + small_batch::COLUMNS - 1) / small_batch::COLUMNS;
  int at = (int(blockIdx.x) - blocks) * small_batch::WARPS + warp();
  if (int(blockIdx.x) < blocks) return small_batch::shares(x, w, parts, n, rows, cols);
  if (blockIdx.y == 0 && at < n * rank) xa_element(x, a, dropout, xa, at / rank, at % rank, rows, rank);
}
EXPORT(lora_small_batch,
       (const T *x, const Weight<T> *w, float *parts, int n, int rows, int cols, const float *a, Dropout dropout, float *xa,
        int rank),
       (x, w, parts, n, rows, cols, a, dropout, xa, rank))

/// y (n, cols) = residual + bias + sum of parts (splits, n, cols), in order, and of the `columns` from `first` on
/// scale xa (n, r) B (columns, r)^T. Grid: ceil(n cols / 256) blocks of 256.
template <class T>
__device__ void lora_small_batch_finish(const float *parts, int splits, const T *residual, const half_t *bias, T *y, int n,
                                int cols, const float *xa, const float *b, float scale, int first, int columns,
                                int rank) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= n * cols) return;
  float sum = small_batch::total(parts, splits, residual, bias, at, n, cols);
  int column = at % cols - first;
  if (column >= 0 && column < columns) {
    float delta = 0, v[WIDE], w[WIDE];
    xa += i64(at / cols) * rank, b += i64(column) * rank;
    for (int r = 0; r < rank; r += WIDE) {
      load(xa + r, rank - r, v);
      load(b + r, rank - r, w);
#pragma unroll
      for (int i = 0; i < WIDE; i++) delta += v[i] * w[i];
    }
    sum += scale * delta;
  }
  y[at] = narrow<T>(sum);
}
EXPORT(lora_small_batch_finish,
       (const float *parts, int splits, const T *residual, const half_t *bias, T *y, int n, int cols, const float *xa,
        const float *b, float scale, int first, int columns, int rank),
       (parts, splits, residual, bias, y, n, cols, xa, b, scale, first, columns, rank))

/// y (n, outputs)[:, first ..][:, .. columns] += scale xa (n, r) B (columns, r)^T.
/// Grid: (ceil(n / 64), ceil(columns / 64)).
template <class T>
__device__ void lora_add(const float *xa, const float *b, float scale, T *y, int n, int outputs, int first,
                         int columns, int rank) {
  Matrix<float> left = {xa, n, rank, rank}, right = {b, columns, rank, rank};
  tile_product<64, true, true>(blockIdx.x * TILE, blockIdx.y * 64, 0, rank, left, right,
                               Add<T>{y + first, n, columns, outputs, scale});
}
EXPORT(lora_add,
       (const float *xa, const float *b, float scale, T *y, int n, int outputs, int first, int columns, int rank),
       (xa, b, scale, y, n, outputs, first, columns, rank))

/// d_xa (splits, n, r): shares of scale dy (n, outputs)[:, columns] B (columns, r); of one share the product itself.
/// Grid: (ceil(n / 64), ceil(r / 16), splits).
template <class T>
__device__ void lora_d_xa(const T *dy, const float *b, float scale, float *d_xa, int n, int outputs, int first,
                           int columns, int rank) {
  Matrix<T> left = {dy + first, n, columns, outputs};
  Matrix<float> right = {b, columns, rank, rank};
  int share = share_of(columns), begin = blockIdx.z * share;
  d_xa += i64(blockIdx.z) * n * rank;
  tile_product<16, true, false>(blockIdx.x * TILE, blockIdx.y * 16, begin, min(columns, begin + share), left, right,
                                Write{d_xa, n, rank, scale});
}
EXPORT(lora_d_xa,
       (const T *dy, const float *b, float scale, float *d_xa, int n, int outputs, int first, int columns, int rank),
       (dy, b, scale, d_xa, n, outputs, first, columns, rank))

/// to (count) = the sum of parts (splits, count), in order. Grid: ceil(count / 256) blocks of 256.
extern "C" __global__ void lora_join(const float *parts, int splits, float *to, i64 count) {
  i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count) return;
  float sum = 0;
  for (int part = 0; part < splits; part++) sum += parts[part * count + at];
  to[at] = sum;
}
LAUNCHER(lora_join)

/// parts (splits, r, in): shares of d_xa (n, r)^T drop(x (n, in)). A tile has 64 inputs and 16 ranks, so it is
/// made transposed. Grid: (ceil(in / 64), ceil(r / 16), splits).
template <class T>
__device__ void lora_da(const T *x, const float *d_xa, Dropout dropout, float *parts, int n, int inputs, int rank) {
  Dropped<T> left = {{x, n, inputs, inputs}, dropout};
  Matrix<float> right = {d_xa, n, rank, rank};
  int share = share_of(n), first = blockIdx.z * share;
  parts += i64(blockIdx.z) * rank * inputs;
  tile_product<16, false, false>(blockIdx.x * TILE, blockIdx.y * 16, first, min(n, first + share), left, right,
                                 [&](int input, int r, float(&sum)[WIDE]) {
#pragma unroll
                                   for (int i = 0; i < WIDE; i++)
                                     if (input < inputs && r + i < rank) parts[i64(r + i) * inputs + input] = sum[i];
                                 });
}
EXPORT(lora_da, (const T *x, const float *d_xa, Dropout dropout, float *parts, int n, int inputs, int rank),
       (x, d_xa, dropout, parts, n, inputs, rank))

/// parts (splits, columns, r): shares of dy (n, outputs)[:, columns]^T xa (n, r).
/// Grid: (ceil(columns / 64), ceil(r / 16), splits).
template <class T>
__device__ void lora_db(const T *dy, const float *xa, float *parts, int n, int outputs, int first, int columns,
                        int rank) {
  Matrix<T> left = {dy + first, n, columns, outputs};
  Matrix<float> right = {xa, n, rank, rank};
  int share = share_of(n), begin = blockIdx.z * share;
  parts += i64(blockIdx.z) * columns * rank;
  tile_product<16, false, false>(blockIdx.x * TILE, blockIdx.y * 16, begin, min(n, begin + share), left, right,
                                 Write{parts, columns, rank, 1.f});
}
EXPORT(lora_db,
       (const T *dy, const float *xa, float *parts, int n, int outputs, int first, int columns, int rank),
       (dy, xa, parts, n, outputs, first, columns, rank))

/// gradient (count) += scale times the sum of parts (splits, count), in order. Grid: ceil(count / 256) blocks of 256.
extern "C" __global__ void sum_parts(const float *parts, int splits, float scale, float *gradient, i64 count) {
  i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count) return;
  float sum = 0;
  for (int part = 0; part < splits; part++) sum += parts[part * count + at];
  gradient[at] += scale * sum;
}
LAUNCHER(sum_parts)

/// dx (n, in) += drop'(d_xa (n, r) A (r, in)): the factors of the forward, replayed.
/// Grid: (ceil(n / 64), ceil(in / 64)).
template <class T>
__device__ void lora_dx(const float *d_xa, const float *a, Dropout dropout, T *dx, int n, int inputs, int rank) {
  Matrix<float> left = {d_xa, n, rank, rank}, right = {a, rank, inputs, inputs};
  Add<T> add = {dx, n, inputs, inputs, 1.f};
  tile_product<64, true, false>(blockIdx.x * TILE, blockIdx.y * 64, 0, rank, left, right,
                                [&](i64 row, int column, float(&x)[WIDE]) {
                                  dropout.apply(row, column, inputs, x);
                                  add(row, column, x);
                                });
}
EXPORT(lora_dx, (const float *d_xa, const float *a, Dropout dropout, T *dx, int n, int inputs, int rank),
       (d_xa, a, dropout, dx, n, inputs, rank))

#include "normed.cuh"
#include "vectors.cuh"
