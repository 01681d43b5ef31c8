// Causal attention over packed documents, a prefix and a cache: the exports, and the small kernels around them.
#include "plain.cuh"
#include "tensor.cuh"

EXPORT(attention_forward,
       (Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> pk, Heads<T> pv, const unsigned *starts, Shape shape, T *out,
        float *lse),
       ({q, k, v, pk, pv}, starts, shape, out, lse))
EXPORT(attention_dq,
       (Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> pk, Heads<T> pv, const unsigned *starts, Shape shape,
        const T *dout, const float *lse, const float *delta, T *d_qkv),
       ({q, k, v, pk, pv}, starts, shape, dout, lse, delta, d_qkv))
EXPORT(attention_dkv,
       (Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> pk, Heads<T> pv, const unsigned *starts, Shape shape,
        const T *dout, const float *lse, const float *delta, T *d_qkv, float *d_prefix),
       ({q, k, v, pk, pv}, starts, shape, dout, lse, delta, d_qkv, d_prefix))

// Two blocks a multiprocessor for 32 queries a warp: 255 registers a thread at most. Three for the others: 168. Neither
// costs spills.
#define BOUNDS __launch_bounds__(THREADS, 3)
#define WIDE_BOUNDS __launch_bounds__(THREADS, 2)
EXPORT_16(attention_forward_mma, WIDE_BOUNDS,
          (Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> pk, Heads<T> pv, const unsigned *starts, Shape shape, T *out,
           float *lse),
          ({q, k, v, pk, pv}, starts, shape, out, lse))
EXPORT_16(attention_dq_mma, WIDE_BOUNDS,
          (Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> pk, Heads<T> pv, const unsigned *starts, Shape shape,
           const T *dout, const T *out, const float *lse, float *delta, T *d_qkv),
          ({q, k, v, pk, pv}, starts, shape, dout, out, lse, delta, d_qkv))
EXPORT_16(attention_dkv_mma, BOUNDS,
          (Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> pk, Heads<T> pv, const unsigned *starts, Shape shape,
           const T *dout, const float *lse, const float *delta, T *d_qkv, float *d_prefix),
          ({q, k, v, pk, pv}, starts, shape, dout, lse, delta, d_qkv, d_prefix))

/// delta (b, h, t) = do (b, t, h d) out (b, t, h d), head by head. Grid: ceil(b t h / 4) blocks of 128.
template <class T>
__device__ void attention_delta(const T *dout, const T *out, float *delta, int batch, int queries, int heads,
                                int width) {
  i64 at = i64(blockIdx.x) * 4 + warp();
  if (at >= i64(batch) * queries * heads) return;
  float sum = 0, x[WIDE], y[WIDE];
  for (int e = lane() * WIDE; e < width; e += 32 * WIDE) {
    load(dout + at * width + e, width - e, x);
    load(out + at * width + e, width - e, y);
#pragma unroll
    for (int i = 0; i < WIDE; i++) sum += x[i] * y[i];
  }
  sum = warp_sum(sum);
  i64 token = at / heads, head = at % heads;
  if (lane() == 0) delta[(token / queries * heads + head) * queries + token % queries] = sum;
}
EXPORT(attention_delta,
       (const T *dout, const T *out, float *delta, int batch, int queries, int heads, int width),
       (dout, out, delta, batch, queries, heads, width))

/// Adds parts (b, 2, p, c) over the batch, in order, to a gradient whose prefix rows are `row` apart: keys from
/// `k`, values from `v`. Grid: ceil(2 p c / 256) blocks of 256.
extern "C" __global__ void attention_sum_prefix(const float *parts, float *gradient, int batch, int prefix, int c,
                                                i64 row, i64 k, i64 v) {
  i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x, half = i64(prefix) * c;
  if (at >= 2 * half) return;
  float *to = gradient + (at < half ? k : v) + at % half / c * row + at % c;
  float sum = *to;
  for (int b = 0; b < batch; b++) sum += parts[b * 2 * half + at];
  *to = sum;
}
LAUNCHER(attention_sum_prefix)

/// Copies (rows, tokens, c) keys into a cache whose rows are `batch` apart, from element `first` of each row, and
/// values into another; `counts (rows)` shift each row by that many tokens, `slots (rows)` name its row of the cache.
/// Grid: (ceil(tokens c / 2048), rows, 2 or, for keys alone, 1) blocks of 256.
template <class T>
__device__ void attention_append(Heads<T> keys, Heads<T> values, T *to_keys, T *to_values, int rows, int tokens, int c,
                                 i64 first, i64 batch, const unsigned *counts, const unsigned *slots) {
  int row = blockIdx.y;
  Heads<T> from = blockIdx.z ? values : keys;
  T *to = blockIdx.z ? to_values : to_keys;
  i64 at = own(), all = i64(tokens) * c;
  if (row >= rows || at >= all) return;
  if (counts) first += i64(counts[row]) * c;
  const T *source = from.data + row * from.batch;
  T *target = to + first + (slots ? slots[row] : row) * batch;
  if (at % c + WIDE <= c) {
    float run[WIDE];
    load(source + at / c * from.row + at % c, WIDE, run);
    return store(run, WIDE, target + at);
  }
  for (i64 i = at; i < min(at + WIDE, all); i++) target[i] = source[i / c * from.row + i % c];
}
EXPORT(attention_append,
       (Heads<T> keys, Heads<T> values, T *to_keys, T *to_values, int rows, int tokens, int c, i64 first, i64 batch,
        const unsigned *counts, const unsigned *slots),
       (keys, values, to_keys, to_values, rows, tokens, c, first, batch, counts, slots))

/// Number of shares, of at most `most` keys, for a single query: `grid`, or fewer where the grid is for more keys.
__device__ __forceinline__ int key_shares(const Shape &s, int most, int grid) {
  return min(grid, (s.prefix + s.past + most) / most); // prefix + past + 1 keys
}

/// One query for each row of the batch, its keys cut into shares: parts (b, h, splits, d + 2) = values weighted by
/// exp(score - largest), the largest score, the sum of the weights. `counts (b)` are the numbers of tokens before the
/// queries, at most the shape's; `slots (b)` name the rows of k and v that they read.
/// Grid: (splits, h, b) blocks of 128; 36 width + 32 bytes of shared memory at least.
template <class T>
__device__ void attention_decode(Operands<T> all, const unsigned *starts, Shape s, const unsigned *counts,
                                 const unsigned *slots, int most, float *parts) {
  DYNAMIC_SHARED(float, memory);
  if (counts) s.past = counts[blockIdx.z];
  int shares = key_shares(s, most, gridDim.x);
  if (int(blockIdx.x) >= shares) return;
  int line = s.width + 2;
  float *q = memory + 4 * line, *own = memory + warp() * line;
  Operands<T> head = all.head(blockIdx.z, blockIdx.y, s.width);
  if (slots) {
    head.k = all.k.head(slots[blockIdx.z], blockIdx.y, s.width);
    head.v = all.v.head(slots[blockIdx.z], blockIdx.y, s.width);
  }
  for (int e = threadIdx.x; e < s.width; e += blockDim.x) q[e] = widen(head.q.data[e]);
  __syncthreads();
  int first = starts[blockIdx.z], columns = s.prefix + s.past + 1 - first;
  int share = (columns + shares - 1) / shares, begin = blockIdx.x * share;
  int end = min(columns, begin + share);
  Softmax softmax = attend(head, q, own, s, first, begin + warp() * 32, end, 128);
  if (lane() == 0) own[s.width] = softmax.most, own[s.width + 1] = softmax.sum;
  __syncthreads();
  parts += ((i64(blockIdx.z) * s.heads + blockIdx.y) * gridDim.x + blockIdx.x) * line;
  join_parts(memory, 4, s.width, [&](int e, float most, float sum, float value) {
    parts[e] = value;
    if (e == 0) parts[s.width] = most, parts[s.width + 1] = sum;
  });
}
EXPORT(attention_decode,
       (Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> pk, Heads<T> pv, const unsigned *starts, Shape shape,
        const unsigned *counts, const unsigned *slots, int most, float *parts),
       ({q, k, v, pk, pv}, starts, shape, counts, slots, most, parts))

/// out (b, 1, h d) and lse (b, h, 1) from parts (b, h, splits, d + 2), of a grid of `splits`. Grid: (h, b) blocks of
/// 128.
template <class T>
__device__ void attention_decode_finish(const float *parts, int splits, Shape s, const unsigned *counts, int most, T *out,
                                        float *lse) {
  if (counts) s.past = counts[blockIdx.y];
  i64 at = i64(blockIdx.y) * s.heads + blockIdx.x;
  join_parts(parts + at * splits * (s.width + 2), key_shares(s, most, splits), s.width, [&](int e, float most, float sum, float value) {
    out[at * s.width + e] = narrow<T>(value / sum);
    if (e == 0) lse[at] = most + logf(sum);
  });
}
EXPORT(attention_decode_finish,
       (const float *parts, int splits, Shape shape, const unsigned *counts, int most, T *out, float *lse),
       (parts, splits, shape, counts, most, out, lse))
