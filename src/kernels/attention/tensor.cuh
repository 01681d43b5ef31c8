// Attention on tensor cores for heads of width 64 and 16-bit activations: products in T, sums in FP32.
//
// A block of 4 warps owns 64 queries (dkv: 64 keys), 16 a warp, and takes one tile of 64 keys (queries) after
// another, as in Dao 2023, "FlashAttention-2". No two blocks write one element: gradients need no atomics.
#pragma once
#include "tiles.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

/// The keys that a tile of queries sees, in columns: the prefix, then tokens from `first`.
struct Columns {
  int first, count;
};

/// For queries from `query` on of a row whose first visible tokens are `starts`; the same in every lane.
__device__ __forceinline__ Columns columns_of(const unsigned *starts, int query, const Shape &s) {
  int first = s.past + query;
  for (int i = query + lane(); i < min(query + ROWS, s.queries); i += 32) first = min(first, int(starts[i]));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) first = min(first, __shfl_xor_sync(~0u, first, step));
  return {first, s.prefix + s.past + min(query + ROWS, s.queries) - first};
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
};

/// Whether all rows of a warp see all columns `at .. at + 64`: one branch for the warp, since matrix instructions
/// must not run with diverged lanes.
__device__ __forceinline__ bool all_see(const Sight (&sight)[2], int at) {
  return __all_sync(~0u, sight[0].sees_tile(at) && sight[1].sees_tile(at));
}

__device__ __forceinline__ Sight sight_of(const unsigned *starts, int query, Columns columns, const Shape &s) {
  if (query >= s.queries) return {0, 0, 0};
  int shift = s.prefix - columns.first;
  return {s.prefix, int(starts[query]) + shift, s.past + query + 1 + shift};
}

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

/// out (b, t, h d) and lse (b, h, t). Grid: (ceil(t / 64), h, b) blocks of 128.
template <class T>
__device__ void attention_forward_mma(Operands<T> all, const unsigned *starts, Shape s, T *out, float *lse) {
  SHARED(Tile<T>[2], keys); // one is read while the other is filled
  SHARED(Tile<T>[2], values);
  int query = blockIdx.x * ROWS;
  Operands<T> head = all.head(blockIdx.z, blockIdx.y, WIDTH);
  starts += i64(blockIdx.z) * s.queries;
  Columns columns = columns_of(starts, query, s);
  Left<T> q;
  fill(keys[1], s.queries - query, [&](int i) { return head.q.at(query + i); });
  close_copies();
  fill_columns(keys[0], values[0], head, s.prefix, columns, 0);
  wait_for_copies<1>();
  __syncthreads();
  q.read(keys[1], warp() * 16);
  int own[2];
  Sight sight[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    own[half] = query + warp() * 16 + row_of(2 * half);
    sight[half] = sight_of(starts, own[half], columns, s);
  }

  float sum[WIDTH / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int at = 0, stage = 0; at < columns.count; at += ROWS, stage ^= 1) {
    __syncthreads(); // all warps have read the tiles that are filled next
    fill_columns(keys[stage ^ 1], values[stage ^ 1], head, s.prefix, columns, at + ROWS);
    wait_for_copies<1>();
    __syncthreads();
    float p[ROWS / 16][2][4], largest[2] = {most[0], most[1]};
    bool whole = all_see(sight, at);
#pragma unroll
    for (int part = 0; part < ROWS / 16; part++) {
      scores(p[part], q, keys[stage], part * 16);
      each(p[part], [&](int n, int r, float &x) { x *= s.scale * LOG2_E; });
      if (!whole)
        each(p[part], [&](int n, int r, float &x) {
          if (!sight[r / 2].sees(at + part * 16 + column_of(n, r))) x = -INFINITY;
        });
      each(p[part], [&](int n, int r, float &x) { largest[r / 2] = fmaxf(largest[r / 2], x); });
    }
    float base[2], factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      largest[half] = quad_max(largest[half]);
      base[half] = largest[half] == -INFINITY ? 0.f : largest[half]; // nothing seen yet
      factor[half] = power_of_2(most[half] - base[half]);
      most[half] = largest[half], total[half] *= factor[half];
    }
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
      for (int r = 0; r < 4; r++) sum[n][r] *= factor[r / 2];
#pragma unroll
    for (int part = 0; part < ROWS / 16; part++) {
      each(p[part], [&](int n, int r, float &x) {
        x = power_of_2(x - base[r / 2]);
        total[r / 2] += x;
      });
      add_weighted(sum, p[part], values[stage], part * 16);
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    total[half] = quad_sum(total[half]);
    if (own[half] >= s.queries) continue;
    float share = 1.f / total[half];
    if (lane() % 4 == 0) lse[statistics_row(s) + own[half]] = most[half] * LN_2 + logf(total[half]);
    T *to = out + ((i64(blockIdx.z) * s.queries + own[half]) * s.heads + blockIdx.y) * WIDTH;
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
      *reinterpret_cast<unsigned *>(to + column_of(n, 0)) =
          pack<T>(sum[n][2 * half] * share, sum[n][2 * half + 1] * share);
  }
}

/// The dq third of d_qkv (b, t, 3 h d), as in `attention_dq`. Grid: (ceil(t / 64), h, b) blocks of 128.
template <class T>
__device__ void attention_dq_mma(Operands<T> all, const unsigned *starts, Shape s, const T *dout, const float *lse,
                                 const float *delta, T *d_qkv) {
  SHARED(Tile<T>[2], keys); // one is read while the other is filled
  SHARED(Tile<T>[2], values);
  int query = blockIdx.x * ROWS, c = s.heads * WIDTH;
  i64 row = i64(blockIdx.z) * s.queries, place = i64(blockIdx.y) * WIDTH;
  Operands<T> head = all.head(blockIdx.z, blockIdx.y, WIDTH);
  starts += row;
  Columns columns = columns_of(starts, query, s);
  Left<T> q, d;
  fill(keys[1], s.queries - query, [&](int i) { return head.q.at(query + i); });
  fill(values[1], s.queries - query, [&](int i) { return dout + (row + query + i) * c + place; });
  close_copies();
  fill_columns(keys[0], values[0], head, s.prefix, columns, 0);
  wait_for_copies<1>();
  __syncthreads();
  q.read(keys[1], warp() * 16);
  d.read(values[1], warp() * 16);
  int own[2];
  Sight sight[2];
  float own_lse[2] = {}, own_delta[2] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    own[half] = query + warp() * 16 + row_of(2 * half);
    sight[half] = sight_of(starts, own[half], columns, s);
    if (own[half] >= s.queries) continue;
    own_lse[half] = lse[statistics_row(s) + own[half]] * LOG2_E;
    own_delta[half] = delta[statistics_row(s) + own[half]];
  }

  float sum[WIDTH / 8][4] = {};
  for (int at = 0, stage = 0; at < columns.count; at += ROWS, stage ^= 1) {
    __syncthreads(); // all warps have read the tiles that are filled next
    fill_columns(keys[stage ^ 1], values[stage ^ 1], head, s.prefix, columns, at + ROWS);
    wait_for_copies<1>();
    __syncthreads();
    bool whole = all_see(sight, at);
#pragma unroll
    for (int part = 0; part < ROWS; part += 16) {
      float p[2][4], ds[2][4];
      scores(p, q, keys[stage], part);
      scores(ds, d, values[stage], part);
      each(ds, [&](int n, int r, float &x) {
        x = power_of_2(p[n][r] * (s.scale * LOG2_E) - own_lse[r / 2]) * (x - own_delta[r / 2]);
      });
      if (!whole)
        each(ds, [&](int n, int r, float &x) {
          if (!sight[r / 2].sees(at + part + column_of(n, r))) x = 0.f;
        });
      add_weighted(sum, ds, keys[stage], part);
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (own[half] >= s.queries) continue;
    T *to = d_qkv + (row + own[half]) * 3 * c + place;
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
      *reinterpret_cast<unsigned *>(to + column_of(n, 0)) =
          pack<T>(s.scale * sum[n][2 * half], s.scale * sum[n][2 * half + 1]);
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
