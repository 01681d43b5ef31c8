// Attention on tensor cores for heads of width 64 and 16-bit activations: products in T, sums in FP32.
//
// A block of 4 warps owns 128 queries, 32 a warp, and takes one tile of 64 keys after another, as in Dao 2023,
// "FlashAttention-2". Two fragments of 16 queries share each fragment of keys and values: one read of shared memory
// (ldmatrix, four matrices) for four products (mma), where a warp of 16 queries has one for two. Gradients of keys and
// values have no registers for that: there a block owns 64 keys, 16 a warp. No two blocks write one element: gradients
// need no atomics. Blocks with most keys begin first.
#pragma once
#include "tiles.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

/// The keys that a tile of queries sees, in columns: the prefix, then tokens from `first`.
struct Columns {
  int first, count;
};

/// For the QUERIES queries from `query` on of a row whose first visible tokens are `starts`; the same in every lane.
__device__ __forceinline__ Columns columns_of(const unsigned *starts, int query, const Shape &s) {
  int first = s.past + query;
  for (int i = query + lane(); i < min(query + QUERIES, s.queries); i += 32) first = min(first, int(starts[i]));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) first = min(first, __shfl_xor_sync(~0u, first, step));
  return {first, s.prefix + s.past + min(query + QUERIES, s.queries) - first};
}

/// The columns that one query sees: those below `prefix`, and `low .. high`. None for a row after the last query.
struct Sight {
  int prefix, low, high;

  /// Without short-circuit operators, which would become branches of each lane.
  __device__ __forceinline__ bool sees(int column) const {
    return (column < prefix) | ((column >= low) & (column < high));
  }
  /// Whether it surely sees all columns `at .. at + 64`; may be false where it does.
  __device__ __forceinline__ bool sees_tile(int at) const {
    return at + ROWS <= prefix || (at >= low && at + ROWS <= high);
  }
  /// Whether it surely sees none of them; may be false where it does not.
  __device__ __forceinline__ bool misses_tile(int at) const {
    return at >= prefix && (at >= high || at + ROWS <= low);
  }
};

/// The 32 queries of a warp: fragment m has rows `row_of(2 half)` of its 16.
struct Own {
  int query[2][2];
  Sight sight[2][2];

  /// Whether all of them see all columns `at .. at + 64`: one branch for the warp, since matrix instructions must not
  /// run with diverged lanes.
  __device__ __forceinline__ bool all_see(int at) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < 4; i++) all &= sight[i / 2][i % 2].sees_tile(at);
    return __all_sync(~0u, all);
  }
  /// Whether none of them sees any of these columns.
  __device__ __forceinline__ bool all_miss(int at) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < 4; i++) all &= sight[i / 2][i % 2].misses_tile(at);
    return __all_sync(~0u, all);
  }
};

__device__ __forceinline__ Sight sight_of(const unsigned *starts, int query, Columns columns, const Shape &s) {
  if (query >= s.queries) return {0, 0, 0};
  int shift = s.prefix - columns.first;
  return {s.prefix, int(starts[query]) + shift, s.past + query + 1 + shift};
}

__device__ __forceinline__ Own own_of(const unsigned *starts, int query, Columns columns, const Shape &s) {
  Own own;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int at = query + warp() * 32 + i / 2 * 16 + row_of(2 * (i % 2));
    own.query[i / 2][i % 2] = at;
    own.sight[i / 2][i % 2] = sight_of(starts, at, columns, s);
  }
  return own;
}

/// Starts to fill two tiles with 128 rows, of which `count` exist; `row(i)` is where one begins.
template <class T, class Row>
__device__ __forceinline__ void fill_queries(Tile<T> &first, Tile<T> &second, int count, const Row &row) {
  fill(first, count, row);
  fill(second, count - ROWS, [&](int i) { return row(i + ROWS < count ? i + ROWS : 0); });
}

/// This warp's 32 rows of two tiles.
template <class T>
__device__ __forceinline__ void read_queries(Left<T> (&to)[2], const Tile<T> &first, const Tile<T> &second) {
#pragma unroll
  for (int m = 0; m < 2; m++) to[m].read(warp() < 2 ? first : second, warp() % 2 * 32 + m * 16);
}

/// First query of this block: late ones have most keys.
__device__ __forceinline__ int first_query() { return (gridDim.x - 1 - blockIdx.x) * QUERIES; }

/// Starts to fill tiles with keys and values of columns `at .. at + 64`, if there are any, as one group of copies.
template <class T>
__device__ __forceinline__ void fill_columns(Tile<T> &keys, Tile<T> &values, const Operands<T> &head, int prefix,
                                             Columns columns, int at) {
  if (at < columns.count) {
    fill(keys, columns.count - at, [&](int i) { return head.key(at + i, prefix, columns.first); });
    fill(values, columns.count - at, [&](int i) { return head.value(at + i, prefix, columns.first); });
  }
  close_copies();
}

/// out (b, t, h d) and lse (b, h, t). Grid: (ceil(t / 128), h, b) blocks of 128.
template <class T>
__device__ void attention_forward_mma(Operands<T> all, const unsigned *starts, Shape s, T *out, float *lse) {
  SHARED(Tile<T>[2], keys); // one is read while the other is filled
  SHARED(Tile<T>[2], values);
  int query = first_query();
  Operands<T> head = all.head(blockIdx.z, blockIdx.y, WIDTH);
  starts += i64(blockIdx.z) * s.queries;
  Columns columns = columns_of(starts, query, s);
  Left<T> q[2];
  fill_queries(keys[1], values[1], s.queries - query, [&](int i) { return head.q.at(query + i); });
  close_copies();
  fill_columns(keys[0], values[0], head, s.prefix, columns, 0);
  wait_for_copies<1>();
  __syncthreads();
  read_queries(q, keys[1], values[1]);
  Own own = own_of(starts, query, columns, s);

  float sum[2][WIDTH / 8][4] = {}, total[2][2] = {};
  float most[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
  for (int at = 0, stage = 0; at < columns.count; at += ROWS, stage ^= 1) {
    __syncthreads(); // all warps have read the tiles that are filled next
    fill_columns(keys[stage ^ 1], values[stage ^ 1], head, s.prefix, columns, at + ROWS);
    wait_for_copies<1>();
    __syncthreads();
    if (own.all_miss(at)) continue;
    float p[ROWS / 16][2][2][4], largest[2][2];
    bool whole = own.all_see(at);
#pragma unroll
    for (int i = 0; i < 4; i++) largest[i / 2][i % 2] = most[i / 2][i % 2];
#pragma unroll
    for (int part = 0; part < ROWS / 16; part++) {
      scores(p[part], q, keys[stage], part * 16);
      each(p[part], [&](int m, int n, int r, float &x) { x *= s.scale * LOG2_E; });
      if (!whole)
        each(p[part], [&](int m, int n, int r, float &x) {
          if (!own.sight[m][r / 2].sees(at + part * 16 + column_of(n, r))) x = -INFINITY;
        });
      each(p[part], [&](int m, int n, int r, float &x) { largest[m][r / 2] = fmaxf(largest[m][r / 2], x); });
    }
    float base[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float found = quad_max(largest[m][half]);
        base[m][half] = found == -INFINITY ? 0.f : found; // nothing seen yet
        factor[half] = power_of_2(most[m][half] - base[m][half]);
        most[m][half] = found, total[m][half] *= factor[half];
      }
#pragma unroll
      for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
        for (int r = 0; r < 4; r++) sum[m][n][r] *= factor[r / 2];
    }
#pragma unroll
    for (int part = 0; part < ROWS / 16; part++) {
      each(p[part], [&](int m, int n, int r, float &x) {
        x = power_of_2(x - base[m][r / 2]);
        total[m][r / 2] += x;
      });
      add_weighted(sum, p[part], values[stage], part * 16);
    }
  }

#pragma unroll
  for (int i = 0; i < 4; i++) {
    int m = i / 2, half = i % 2, row = own.query[m][half];
    float all = quad_sum(total[m][half]);
    if (row >= s.queries) continue;
    float share = 1.f / all;
    if (lane() % 4 == 0) lse[statistics_row(s) + row] = most[m][half] * LN_2 + logf(all);
    T *to = out + ((i64(blockIdx.z) * s.queries + row) * s.heads + blockIdx.y) * WIDTH;
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
      *reinterpret_cast<unsigned *>(to + column_of(n, 0)) =
          pack<T>(sum[m][n][2 * half] * share, sum[m][n][2 * half + 1] * share);
  }
}

/// do out of a row of a head, for the four lanes that share it: a quarter of the width each.
template <class T> __device__ __forceinline__ float quad_dot(const T *dout, const T *out) {
  float sum = 0, x[WIDE], y[WIDE];
#pragma unroll
  for (int part = 0; part < 2; part++) {
    int e = (part * 4 + lane() % 4) * WIDE;
    load(dout + e, WIDE, x);
    load(out + e, WIDE, y);
#pragma unroll
    for (int i = 0; i < WIDE; i++) sum += x[i] * y[i];
  }
  return quad_sum(sum);
}

/// The dq third of d_qkv (b, t, 3 h d), as in `attention_dq`, and delta (b, h, t) = do out, which `attention_dkv_mma`
/// reads. Grid: (ceil(t / 128), h, b) blocks of 128.
template <class T>
__device__ void attention_dq_mma(Operands<T> all, const unsigned *starts, Shape s, const T *dout, const T *out,
                                 const float *lse, float *delta, T *d_qkv) {
  SHARED(Tile<T>[2], keys); // one is read while the other is filled
  SHARED(Tile<T>[2], values);
  int query = first_query(), c = s.heads * WIDTH;
  i64 row = i64(blockIdx.z) * s.queries, place = i64(blockIdx.y) * WIDTH;
  Operands<T> head = all.head(blockIdx.z, blockIdx.y, WIDTH);
  starts += row, dout += row * c + place, out += row * c + place;
  Columns columns = columns_of(starts, query, s);
  Left<T> q[2], d[2];
  int count = s.queries - query;
  fill_queries(keys[0], keys[1], count, [&](int i) { return head.q.at(query + i); });
  fill_queries(values[0], values[1], count, [&](int i) { return dout + i64(query + i) * c; });
  close_copies();
  Own own = own_of(starts, query, columns, s);
  float own_lse[2][2] = {}, own_delta[2][2] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int at = own.query[i / 2][i % 2], exists = min(at, s.queries - 1); // a row for every lane: they add together
    float sum = quad_dot(dout + i64(exists) * c, out + i64(exists) * c);
    if (at >= s.queries) continue;
    own_delta[i / 2][i % 2] = sum, own_lse[i / 2][i % 2] = lse[statistics_row(s) + at] * LOG2_E;
    if (lane() % 4 == 0) delta[statistics_row(s) + at] = sum;
  }
  wait_for_copies<0>();
  __syncthreads();
  read_queries(q, keys[0], keys[1]);
  read_queries(d, values[0], values[1]);
  __syncthreads(); // all warps have read their rows
  fill_columns(keys[0], values[0], head, s.prefix, columns, 0);

  float sum[2][WIDTH / 8][4] = {};
  for (int at = 0, stage = 0; at < columns.count; at += ROWS, stage ^= 1) {
    __syncthreads(); // all warps have read the tiles that are filled next
    fill_columns(keys[stage ^ 1], values[stage ^ 1], head, s.prefix, columns, at + ROWS);
    wait_for_copies<1>();
    __syncthreads();
    if (own.all_miss(at)) continue;
    bool whole = own.all_see(at);
#pragma unroll
    for (int part = 0; part < ROWS; part += 16) {
      float p[2][2][4], ds[2][2][4];
      scores(p, q, keys[stage], part);
      scores(ds, d, values[stage], part);
      each(ds, [&](int m, int n, int r, float &x) {
        x = power_of_2(p[m][n][r] * (s.scale * LOG2_E) - own_lse[m][r / 2]) * (x - own_delta[m][r / 2]);
      });
      if (!whole)
        each(ds, [&](int m, int n, int r, float &x) {
          if (!own.sight[m][r / 2].sees(at + part + column_of(n, r))) x = 0.f;
        });
      add_weighted(sum, ds, keys[stage], part);
    }
  }

#pragma unroll
  for (int i = 0; i < 4; i++) {
    int m = i / 2, half = i % 2, own_row = own.query[m][half];
    if (own_row >= s.queries) continue;
    T *to = d_qkv + (row + own_row) * 3 * c + place;
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
      *reinterpret_cast<unsigned *>(to + column_of(n, 0)) =
          pack<T>(s.scale * sum[m][n][2 * half], s.scale * sum[m][n][2 * half + 1]);
  }
}

/// The dk and dv thirds of d_qkv (b, t, 3 h d), and d_prefix (b, 2, p, h d), as in `attention_dkv`.
///
/// A block's keys are rows of the prefix or tokens, never both; rows of its products are keys, columns queries.
/// Grid: (ceil(p / 64) + ceil(t / 64), h, b) blocks of 128.
template <class T>
__device__ void attention_dkv_mma(Operands<T> all, const unsigned *starts, Shape s, const T *dout, const float *lse,
                                  const float *delta, T *d_qkv, float *d_prefix) {
  SHARED(Tile<T>[2], queries); // one is read while the other is filled
  SHARED(Tile<T>[2], d_rows);
  SHARED(float[ROWS], tile_lse);
  SHARED(float[ROWS], tile_delta);
  SHARED(int[ROWS], tile_start);
  int prefix_tiles = (s.prefix + ROWS - 1) / ROWS, c = s.heads * WIDTH;
  bool is_prefix = int(blockIdx.x) < prefix_tiles;
  int key = (is_prefix ? blockIdx.x : blockIdx.x - prefix_tiles) * ROWS; // within prefix or tokens
  int count = min(ROWS, (is_prefix ? s.prefix : s.queries) - key);
  i64 row = i64(blockIdx.z) * s.queries, place = i64(blockIdx.y) * WIDTH;
  Operands<T> head = all.head(blockIdx.z, blockIdx.y, WIDTH);
  Left<T> k, v;
  dout += row * c + place, starts += row, lse += statistics_row(s), delta += statistics_row(s);
  fill(queries[1], count, [&](int i) { return (is_prefix ? head.pk : head.k).at(key + i); });
  fill(d_rows[1], count, [&](int i) { return (is_prefix ? head.pv : head.v).at(key + i); });
  close_copies();
  auto fill_rows = [&](int stage, int at) {
    if (at < s.queries) {
      fill(queries[stage], s.queries - at, [&](int i) { return head.q.at(at + i); });
      fill(d_rows[stage], s.queries - at, [&](int i) { return dout + i64(at + i) * c; });
    }
    close_copies();
  };
  int first = is_prefix ? 0 : key; // earlier queries see none of the keys
  fill_rows(0, first);
  wait_for_copies<1>();
  __syncthreads();
  k.read(queries[1], warp() * 16);
  v.read(d_rows[1], warp() * 16);

  float dk[WIDTH / 8][4] = {}, dv[WIDTH / 8][4] = {};
  for (int at = first, stage = 0; at < s.queries; at += ROWS, stage ^= 1) {
    int i = at + threadIdx.x, start = s.queries; // of a query that does not exist: beyond every key
    if (threadIdx.x < ROWS && i < s.queries) start = is_prefix ? 0 : starts[i];
    bool any = __syncthreads_or(start < key + count); // also: all warps have read the tiles that are filled next
    fill_rows(stage ^ 1, at + ROWS);
    if (threadIdx.x < ROWS) {
      tile_start[threadIdx.x] = start;
      tile_lse[threadIdx.x] = i < s.queries ? lse[i] * LOG2_E : 0.f;
      tile_delta[threadIdx.x] = i < s.queries ? delta[i] : 0.f;
    }
    wait_for_copies<1>();
    bool blind = i >= s.queries || (!is_prefix && (start > key || i < key + ROWS - 1)); // to one of the keys
    bool whole = !__syncthreads_or(threadIdx.x < ROWS && blind);                        // also: tiles are filled
    if (!any) continue;
#pragma unroll 1 // unrolled it would spill a register
    for (int part = 0; part < ROWS; part += 16) {
      float p[2][4], ds[2][4];
      scores(p, k, queries[stage], part);
      scores(ds, v, d_rows[stage], part);
      each(p, [&](int n, int r, float &x) {
        x = power_of_2(x * (s.scale * LOG2_E) - tile_lse[part + column_of(n, r)]);
      });
      if (!whole)
        each(p, [&](int n, int r, float &x) {
          int q = part + column_of(n, r), own = key + warp() * 16 + row_of(r);
          bool seen = is_prefix ? at + q < s.queries : tile_start[q] <= own && own <= at + q;
          if (!seen) x = 0.f;
        });
      // A hidden pair has p = 0 and a finite ds: queries that do not exist are read as zeros.
      each(ds, [&](int n, int r, float &x) { x = p[n][r] * (x - tile_delta[part + column_of(n, r)]); });
      add_weighted(dv, p, d_rows[stage], part);
      add_weighted(dk, ds, queries[stage], part);
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    int own = warp() * 16 + row_of(2 * half);
    if (own >= count) continue;
    i64 part = i64(s.prefix) * c;
    float *to_prefix = d_prefix + 2 * part * blockIdx.z + i64(key + own) * c + place;
    T *to = d_qkv + (row + key + own) * 3 * c + c + place;
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++) {
      int e = column_of(n, 0);
      float *keys = &dk[n][2 * half], *values = &dv[n][2 * half];
      if (is_prefix) {
        to_prefix[e] = s.scale * keys[0], to_prefix[e + 1] = s.scale * keys[1];
        to_prefix[part + e] = values[0], to_prefix[part + e + 1] = values[1];
      } else {
        *reinterpret_cast<unsigned *>(to + e) = pack<T>(s.scale * keys[0], s.scale * keys[1]);
        *reinterpret_cast<unsigned *>(to + c + e) = pack<T>(values[0], values[1]);
      }
    }
  }
}
