// A layer of a decoder in five launches, for one token of each of up to 8 rows:
//
//   1. decode_norm_product: shares of ln_1(x) W of c_attn, and of x A^T
//   2. decode_attend: joins them, appends keys and values to the cache, and attends
//   3. decode_add: middle = x + c_proj(mixed)
//   4. decode_norm_product: shares of ln_2(middle) W of c_fc, and of x A^T
//   5. decode_add_activated: joins them, applies the activation, y = middle + mlp.c_proj(..)
//
// Shares of a sum are added in order, by the launch that reads them or by the block of their tile that ends last: no
// sum depends on which one that is, on the number of rows, or on the place of a row.
#include "activation/value.cuh"
#include "attention/plain.cuh"
#include "layernorm/rows.cuh"
#include "tile.cuh"

/// `extern "C"` kernels of the template `name<rows, T>`: for up to 8 rows, and `name_row` for one, which takes half
/// of the registers. T is the type of activations in both lists.
#define EXPORT_ROWS(name, parameters, arguments)                                                                 \
  EXPORT_FOR(name, name, ROWS, parameters, arguments)                                                            \
  EXPORT_FOR(name##_row, name, 1, parameters, arguments)
#define EXPORT_FOR(exported, name, rows, parameters, arguments)                                                  \
  EXPORT_ONE(exported, name, rows, f32, float, parameters, arguments)                                            \
  EXPORT_ONE(exported, name, rows, f16, half_t, parameters, arguments)                                           \
  EXPORT_ONE(exported, name, rows, bf16, bf16_t, parameters, arguments)
#define EXPORT_ONE(exported, name, rows, suffix, type, parameters, arguments)                                    \
  namespace suffix {                                                                                             \
  typedef type T;                                                                                                \
  extern "C" __global__ void exported##_##suffix parameters { name<rows, T> arguments; }                         \
  LAUNCHER(exported##_##suffix)                                                                                  \
  }

/// Mean and rstd of row `row` of x (n, c), by a warp: the bits of `layernorm_forward`.
template <class T>
__device__ __forceinline__ void statistics(const T *x, int row, int c, float epsilon, float &mean, float &rstd) {
  x += i64(row) * c;
  float v[WIDE], sum = 0, squares = 0;
#pragma unroll 4
  for (int at = lane() * WIDE; at < c; at += LINE) {
    load(x + at, c - at, v);
    sum += run_sum(v);
  }
  mean = warp_sum(sum) / c;
#pragma unroll 4
  for (int at = lane() * WIDE; at < c; at += LINE) {
    load(x + at, c - at, v);
    squares += run_squares(v, mean, c - at);
  }
  rstd = 1.f / sqrtf(warp_sum(squares) / c + epsilon);
}

/// parts (splits, n, cols): shares of norm(x (n, inputs)) w (inputs, cols), of `size` rows of w each; and xa (splits,
/// n, ranks) those of norm(x) A^T. Grid: (ceil(cols / 64), splits) blocks of 256, one more in x where there are
/// deltas; n size floats of shared memory.
template <int N, class T>
__device__ void decode_norm_product(const T *x, Parameter gain, Parameter bias, float epsilon, const Weight<T> *w,
                                    float *parts, float *xa, int n, int inputs, int cols, int size, GivenDeltas given) {
  DYNAMIC_SHARED(float, in); // (n, size)
  SHARED(Deltas, deltas);
  deltas.take(given);
  SHARED(float[ROWS][2], of);
  Share share = Share::of(inputs, size);
  int tiles = (cols + COLUMNS - 1) / COLUMNS;
  bool is_tile = int(blockIdx.x) < tiles;
  Tile<N, Weight<T>> tile;
  if (is_tile) tile.begin(w, share, blockIdx.x, cols);
  if (warp() < n) {
    float mean, rstd;
    statistics(x, warp(), inputs, epsilon, mean, rstd);
    if (lane() == 0) of[warp()][0] = mean, of[warp()][1] = rstd;
  }
  __syncthreads();
  int runs = (share.count + WIDE - 1) / WIDE;
  for (int at = threadIdx.x; at < n * runs; at += THREADS) {
    int row = at / runs, k = at % runs * WIDE, column = share.first + k, count = share.count - k;
    float v[WIDE], g[WIDE], b[WIDE];
    load(x + i64(row) * inputs + column, count, v);
    fetch(gain, column, inputs, g);
    fetch(bias, column, inputs, b);
#pragma unroll
    for (int i = 0; i < WIDE; i++)
      if (i < count) in[row * size + k + i] = (v[i] - of[row][0]) * of[row][1] * g[i] + b[i];
  }
  __syncthreads();
  if (is_tile) {
    parts += i64(blockIdx.y) * n * cols;
    tile.end(w, in, share, n, cols, [&](int row, int column, float sum) { parts[i64(row) * cols + column] = sum; });
  } else {
    int ranks = deltas.ranks();
    xa += i64(blockIdx.y) * n * ranks;
    rank_sums<N>(deltas, in, share, n, inputs, [&](int row, int q, float sum) { xa[row * ranks + q] = sum; });
  }
}
EXPORT_ROWS(decode_norm_product,
            (const T *x, Parameter gain, Parameter bias, float epsilon, const Weight<T> *w, float *parts, float *xa,
             int n, int inputs, int cols, int size, DELTAS(d)),
            (x, gain, bias, epsilon, w, parts, xa, n, inputs, cols, size, ALL_DELTAS(d)))

/// A product of which the shares are still to be added: parts (splits, n, cols) + bias (cols), and xa (splits, n,
/// ranks) of its deltas.
struct Open {
  const float *parts, *xa;
  const half_t *bias;
  int splits;
};

/// Keys and values of a layer: rows of the cache stand `row` elements apart, tokens `c`.
template <class T> struct CacheOf {
  T *k, *v;
  i64 row;
};

/// Rows of the batch: `rows` from `first` on, of `n` in all. For each, the number of tokens in the cache and its row
/// there.
struct Rows {
  const unsigned *counts, *slots;
  int first, n;
};

/// out (n, h d) of one query for each row of a group, whose keys are cut into shares of at most `most`; queries, keys
/// and values of the tokens are what `open` leaves. parts (n, h, splits, d + 2). Keys and values go to the cache.
/// Grid: (splits, h, rows) blocks of 128; 5 d + 8 + ranks floats of shared memory.
template <class T>
__device__ void decode_attend(Open open, CacheOf<T> cache, Heads<T> pk, Heads<T> pv, Shape s, Rows rows, int most,
                              float *parts, unsigned *tickets, T *out, GivenDeltas given) {
  DYNAMIC_SHARED(float, memory);
  SHARED(Deltas, deltas);
  deltas.take(given);
  int group_row = blockIdx.z, row = rows.first + group_row, h = blockIdx.y, c = s.heads * s.width, cols = 3 * c;
  s.past = rows.counts[group_row];
  int shares = min(int(gridDim.x), (s.prefix + s.past + most) / most); // prefix + past + 1 keys
  if (int(blockIdx.x) >= shares) return;
  __syncthreads();
  int line = s.width + 2, ranks = deltas.ranks();
  float *q = memory + 4 * line, *xa = q + s.width, *own = memory + warp() * line;
  for (int r = threadIdx.x; r < ranks; r += blockDim.x)
    xa[r] = total(open.xa, open.splits, rows.n * ranks, row * ranks + r);
  __syncthreads();
  auto joined = [&](int column) {
    float sum = widen(open.bias[column]) + total(open.parts, open.splits, rows.n * cols, row * cols + column);
    return narrow<T>(sum + deltas.add(xa, row, column));
  };
  int columns = s.prefix + s.past + 1, share = (columns + shares - 1) / shares, begin = blockIdx.x * share;
  int end = min(columns, begin + share);
  i64 cached = rows.slots[group_row] * cache.row + i64(h) * s.width;
  for (int e = threadIdx.x; e < s.width; e += blockDim.x) {
    q[e] = widen(joined(h * s.width + e));
    if (begin < columns && end == columns) { // the new token is the last column
      i64 to = cached + i64(s.past) * c + e;
      cache.k[to] = joined(c + h * s.width + e), cache.v[to] = joined(2 * c + h * s.width + e);
    }
  }
  __syncthreads();
  Heads<T> none = {nullptr, 0, 0};
  Heads<T> k = {cache.k + cached, c, 0}, v = {cache.v + cached, c, 0};
  Operands<T> head = {none, k, v, pk.head(0, h, s.width), pv.head(0, h, s.width)};
  Softmax softmax = attend(head, q, own, s, 0, begin + warp() * 32, end, 128);
  if (lane() == 0) own[s.width] = softmax.most, own[s.width + 1] = softmax.sum;
  __syncthreads();
  i64 at = i64(row) * s.heads + h;
  parts += at * gridDim.x * line, out += at * s.width;
  auto write = [&](int e, float, float sum, float value) { out[e] = narrow<T>(value / sum); };
  if (shares == 1) return join_parts(memory, 4, s.width, write);
  float *to = parts + blockIdx.x * line;
  join_parts(memory, 4, s.width, [&](int e, float largest, float sum, float value) {
    to[e] = value;
    if (e == 0) to[s.width] = largest, to[s.width + 1] = sum;
  });
  if (!is_last(tickets + at, shares)) return;
  join_parts(parts, shares, s.width, write);
}
EXPORT(decode_attend,
       (Open open, CacheOf<T> cache, Heads<T> pk, Heads<T> pv, Shape shape, Rows rows, int most, float *parts,
        unsigned *tickets, T *out, DELTAS(d)),
       (open, cache, pk, pv, shape, rows, most, parts, tickets, out, ALL_DELTAS(d)))

/// Sizes of a product that is added to a residual: w (inputs, cols), cut into shares of `size` rows.
struct Sizes {
  int n, inputs, cols, size;
};

/// Where shares of a product wait for the last block of their tile: parts (splits, n, cols), xa (tiles, splits, n,
/// ranks), tickets (tiles).
struct Joint {
  float *parts, *xa;
  unsigned *tickets;
};

/// y (n, cols) = residual (n, cols) + bias + in w + deltas; `input(row, column)` is element of `in`. Shared memory,
/// which `input` may use from `in + n * size` on: n size floats, and after them n ranks.
template <int N, class T, class Prepare, class In>
__device__ __forceinline__ void add_product(const Prepare &prepare, const In &input, const Weight<T> *w,
                                            const T *residual, const half_t *bias, T *y, Sizes s, Joint joint,
                                            const Deltas &deltas) {
  DYNAMIC_SHARED(float, in); // (n, size), then (n, ranks)
  Share share = Share::of(s.inputs, s.size);
  Tile<N, Weight<T>> tile;
  tile.begin(w, share, blockIdx.x, s.cols);
  __syncthreads(); // the deltas are there
  int splits = gridDim.y, ranks = deltas.ranks();
  prepare();
  for (int at = threadIdx.x; at < s.n * share.count; at += THREADS) {
    int row = at / share.count, k = at % share.count;
    in[row * s.size + k] = input(row, share.first + k);
  }
  __syncthreads();
  float *parts = joint.parts + i64(blockIdx.y) * s.n * s.cols;
  float *tile_xa = joint.xa + i64(blockIdx.x) * splits * s.n * ranks, *own_xa = tile_xa + i64(blockIdx.y) * s.n * ranks;
  // Every tile makes the few sums of x A^T for itself: it need not wait for another one then.
  rank_sums<N>(deltas, in, share, s.n, s.inputs, [&](int row, int q, float sum) { own_xa[row * ranks + q] = sum; });
  tile.end(w, in, share, s.n, s.cols, [&](int row, int column, float sum) { parts[i64(row) * s.cols + column] = sum; });
  if (!is_last(joint.tickets + blockIdx.x, splits)) return;
  float *xa = in + s.n * s.size;
  for (int at = threadIdx.x; at < s.n * ranks; at += THREADS) xa[at] = total(tile_xa, splits, s.n * ranks, at);
  __syncthreads();
  for (int at = threadIdx.x; at < s.n * COLUMNS; at += THREADS) {
    int row = at / COLUMNS, column = blockIdx.x * COLUMNS + at % COLUMNS, place = row * s.cols + column;
    if (column >= s.cols) continue;
    float sum = widen(residual[place]) + widen(bias[column]) + total(joint.parts, splits, s.n * s.cols, place);
    y[place] = narrow<T>(sum + deltas.add(xa + row * ranks, row, column));
  }
}

/// y (n, cols) = residual + bias + x (n, inputs) w + deltas. Grid: (ceil(cols / 64), splits) blocks of 256;
/// n (size + ranks) floats of shared memory.
template <int N, class T>
__device__ void decode_add(const T *x, const Weight<T> *w, const T *residual, const half_t *bias, T *y, Sizes s,
                           Joint joint, GivenDeltas given) {
  SHARED(Deltas, deltas);
  deltas.take(given);
  auto input = [&](int row, int column) { return widen(x[i64(row) * s.inputs + column]); };
  add_product<N>([] {}, input, w, residual, bias, y, s, joint, deltas);
}
EXPORT_ROWS(decode_add,
            (const T *x, const Weight<T> *w, const T *residual, const half_t *bias, T *y, Sizes sizes, Joint joint,
             DELTAS(d)),
            (x, w, residual, bias, y, sizes, joint, ALL_DELTAS(d)))

/// The value of an activation function by its number.
__device__ __forceinline__ float activated(int kind, float x) {
  switch (kind) {
  case GELU_TANH: return value<GELU_TANH>(x);
  case GELU: return value<GELU>(x);
  case RELU: return value<RELU>(x);
  case SILU: return value<SILU>(x);
  default: return value<TANH>(x);
  }
}

/// The same with x = f(what `open` leaves), whose deltas are b0 to b7; n more floats of shared memory for each of their
/// ranks.
template <int N, class T>
__device__ void decode_add_activated(int kind, Open open, const Weight<T> *w, const T *residual, const half_t *bias,
                                     T *y, Sizes s, Joint joint, GivenDeltas given_before, GivenDeltas given) {
  SHARED(Deltas, before);
  SHARED(Deltas, deltas);
  before.take(given_before);
  deltas.take(given);
  DYNAMIC_SHARED(float, in);
  int ranks = 0;
  float *xa = nullptr;
  auto prepare = [&] {
    ranks = before.ranks(), xa = in + s.n * (s.size + deltas.ranks());
    for (int at = threadIdx.x; at < s.n * ranks; at += THREADS) xa[at] = total(open.xa, open.splits, s.n * ranks, at);
    __syncthreads();
  };
  auto input = [&](int row, int column) {
    float sum = widen(open.bias[column]) + total(open.parts, open.splits, s.n * s.inputs, row * s.inputs + column);
    float inner = widen(narrow<T>(sum + before.add(xa + row * ranks, row, column)));
    return widen(narrow<T>(activated(kind, inner)));
  };
  add_product<N>(prepare, input, w, residual, bias, y, s, joint, deltas);
}
EXPORT_ROWS(decode_add_activated,
            (int kind, Open open, const Weight<T> *w, const T *residual, const half_t *bias, T *y, Sizes sizes,
             Joint joint, DELTAS(b), DELTAS(d)),
            (kind, open, w, residual, bias, y, sizes, joint, ALL_DELTAS(b), ALL_DELTAS(d)))
