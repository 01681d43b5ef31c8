// Products of up to 8 rows with a frozen matrix W (rows, cols), cut into shares of the rows of W and tiles of 64
// columns; and the low-rank deltas beside them.
//
// A block asks for its weights before it makes its inputs, so that both wait for memory at the same time.
#pragma once
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROWS = 8;                   // most rows of a batch
constexpr int COLUMNS = 64;               // of a tile: 8 lanes of 8
constexpr int LANES = COLUMNS / WIDE;     // threads that hold one row of a tile
constexpr int GROUPS = THREADS / LANES;   // rows of W that a block reads by one instruction
constexpr int AHEAD = 4;                  // such reads that are on their way together
constexpr int STEP = GROUPS * AHEAD;      // rows of W

/// A low-rank delta, scale (x A^T) B^T on `columns` columns from `first` on, for `rows` rows of the batch from `row`
/// on; none where the rank is 0. A (rank, inputs), B (columns, rank).
struct Delta {
  const float *a, *b;
  float scale;
  int first, columns;
  unsigned char row, rows;
  unsigned short rank;
};

constexpr int MOST_DELTAS = 8;
#define DELTAS(of)                                                                                               \
  Delta of##0, Delta of##1, Delta of##2, Delta of##3, Delta of##4, Delta of##5, Delta of##6, Delta of##7
#define ALL_DELTAS(of)                                                                                           \
  { {of##0, of##1, of##2, of##3, of##4, of##5, of##6, of##7} }

/// The deltas of a site as a kernel is given them.
struct GivenDeltas {
  Delta at[MOST_DELTAS];
};

/// The deltas of a site, in order, in shared memory: loops over them need not be unrolled. Their x A^T (n, ranks) are
/// side by side.
struct Deltas {
  Delta at[MOST_DELTAS];

  /// For all threads of a block, which read them after its next barrier.
  __device__ __forceinline__ void take(const GivenDeltas &given) {
    if (threadIdx.x > 0) return;
#pragma unroll
    for (int i = 0; i < MOST_DELTAS; i++) at[i] = given.at[i];
  }

  __device__ __forceinline__ int ranks() const {
    int sum = 0;
    for (int i = 0; i < MOST_DELTAS; i++) sum += at[i].rank;
    return sum;
  }

  /// What all deltas add to a column of a row, from its x A^T (ranks).
  __device__ __forceinline__ float add(const float *xa, int row, int column) const {
    float sum = 0;
    for (int i = 0; i < MOST_DELTAS; i++) {
      const Delta &d = at[i];
      int inside = column - d.first;
      if (d.rank == 0) break;
      if (row >= d.row && row < d.row + d.rows && inside >= 0 && inside < d.columns) {
        const float *b = d.b + i64(inside) * d.rank;
        float delta = 0;
        for (int r = 0; r < d.rank; r++) delta += xa[r] * b[r];
        sum += d.scale * delta;
      }
      xa += d.rank;
    }
    return sum;
  }
};

/// This block's share of the rows of W.
struct Share {
  int first, count, size;

  /// Share blockIdx.y of gridDim.y, all of `size` but the last.
  static __device__ __forceinline__ Share of(int rows, int size) {
    int first = blockIdx.y * size;
    return {first, min(size, rows - first), size};
  }
};

/// Sums over shares in order: element `at` of parts (splits, count).
__device__ __forceinline__ float total(const float *parts, int splits, int count, int at) {
  float sum = 0;
  for (int part = 0; part < splits; part++) sum += parts[i64(part) * count + at];
  return sum;
}

/// The weights of a step of a tile: AHEAD runs of 8 columns a thread.
template <class W> struct Weights {
  Vector<W> at[AHEAD];

  /// Rows from `row` below `end`, this thread's columns from `column` on; cols is a multiple of 8.
  __device__ __forceinline__ void fetch(const W *w, int row, int end, int column, int cols) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      int own = row + i * GROUPS + threadIdx.x / LANES;
      if (own < end && column < cols) at[i] = *reinterpret_cast<const Vector<W> *>(w + i64(own) * cols + column);
    }
  }
};

/// A tile of a product, for N rows at most: `begin` before the inputs are made, `end` after.
template <int N, class W> struct Tile {
  Weights<W> next;
  int column; // first of this thread's

  __device__ __forceinline__ void begin(const W *w, const Share &share, int tile, int cols) {
    column = tile * COLUMNS + threadIdx.x % LANES * WIDE;
    next.fetch(w, share.first, share.first + share.count, column, cols);
  }

  /// `out(row, column, sum)` for n rows x (n, share) in shared memory.
  template <class Out>
  __device__ __forceinline__ void end(const W *w, const float *x, const Share &share, int n, int cols, const Out &out) {
    SHARED(float[WARPS][N][COLUMNS], sums);
    int last = share.first + share.count;
    float sum[N][WIDE] = {};
    for (int row = share.first; row < last; row += STEP) {
      Weights<W> now = next;
      next.fetch(w, row + STEP, last, column, cols);
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        int own = row + i * GROUPS + threadIdx.x / LANES;
        if (own >= last || column >= cols) continue;
        float weights[WIDE];
#pragma unroll
        for (int e = 0; e < WIDE; e++) weights[e] = widen(now.at[i].at[e]);
#pragma unroll
        for (int r = 0; r < N; r++) {
          if (r >= n) break;
          float input = x[r * share.size + own - share.first];
#pragma unroll
          for (int e = 0; e < WIDE; e++) sum[r][e] += input * weights[e];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < N; r++) {
      if (r >= n) break;
#pragma unroll
      for (int e = 0; e < WIDE; e++) {
        // Lanes of the same columns are LANES apart.
        for (int step = 16; step >= LANES; step /= 2) sum[r][e] += __shfl_xor_sync(~0u, sum[r][e], step);
        if (lane() < LANES) sums[warp()][r][lane() * WIDE + e] = sum[r][e];
      }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < n * COLUMNS; at += THREADS) {
      int r = at / COLUMNS, to = column - threadIdx.x % LANES * WIDE + at % COLUMNS;
      float sum = 0;
#pragma unroll
      for (int part = 0; part < WARPS; part++) sum += sums[part][r][at % COLUMNS];
      if (to < cols) out(r, to, sum);
    }
  }
};

/// `out(row, q, sum)` for every rank q of all deltas and the rows of its delta: this share's part of x A^T, by a warp a
/// rank. x (n, share) is in shared memory.
template <int N, class Out>
__device__ __forceinline__ void rank_sums(const Deltas &deltas, const float *x, const Share &share, int n, int inputs,
                                          const Out &out) {
  int q = 0;
  for (int i = 0; i < MOST_DELTAS; i++) {
    const Delta &d = deltas.at[i];
    if (d.rank == 0) break;
    // The warps take turns, whatever the ranks of the deltas before.
    for (int r = (warp() + WARPS - q % WARPS) % WARPS; r < d.rank; r += WARPS) {
      const float *a = d.a + i64(r) * inputs + share.first;
      float sum[N] = {};
      for (int k = lane(); k < share.count; k += 32) {
        float factor = a[k];
#pragma unroll
        for (int row = 0; row < N; row++)
          if (row < n) sum[row] += x[row * share.size + k] * factor;
      }
#pragma unroll
      for (int row = 0; row < N; row++) {
        if (row >= n) break;
        float all = warp_sum(sum[row]);
        if (lane() == 0 && row >= d.row && row < d.row + d.rows) out(row, q + r, all);
      }
    }
    q += d.rank;
  }
}

/// Whether this block is the last of `count` that draw a ticket: what the others wrote before is then visible. The
/// ticket is 0 again for the next launch. For all threads of a block.
__device__ __forceinline__ bool is_last(unsigned *ticket, unsigned count) {
  SHARED(int, last);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(ticket, 1u) == count - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  bool own = last;
  __threadfence();
  return own;
}
