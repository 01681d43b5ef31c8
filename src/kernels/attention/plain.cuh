// Attention for any width and type: a warp for each query (or key), each lane for one of 32 keys (or queries).
//
// All arithmetic is FP32. Only warps synchronise, never the block, so warps without work return at once.
#pragma once
#include "shape.cuh"

/// Running softmax of one query: largest score and sum of exp(score - largest).
struct Softmax {
  float most, sum;
};

/// Copies a vector (width) into this warp's shared memory as FP32.
template <class T> __device__ __forceinline__ void keep(const T *from, float *to, int width) {
  for (int e = lane(); e < width; e += 32) to[e] = widen(from[e]);
}

template <class T> __device__ __forceinline__ float dot(const float *q, const T *k, int width) {
  float sum = 0, x[WIDE];
  for (int e = 0; e < width; e += WIDE) {
    load(k + e, width - e, x);
#pragma unroll
    for (int i = 0; i < WIDE; i++)
      if (e + i < width) sum += q[e + i] * x[i];
  }
  return sum;
}

/// acc (width) = acc keep + sum over 32 lanes of their weight times their row; `row(i)` is that of lane i < count.
template <class Row>
__device__ __forceinline__ void mix(float *acc, float factor, float weight, int count, int width, const Row &row) {
  for (int first = 0; first < width; first += 32) {
    int e = first + lane();
    float sum = e < width ? acc[e] * factor : 0.f;
    for (int i = 0; i < count; i++) {
      float part = __shfl_sync(~0u, weight, i);
      if (e < width) sum += part * widen(row(i)[e]);
    }
    if (e < width) acc[e] = sum;
  }
}

/// One query q (width) over columns `begin .. end` in steps of `stride`, each of 32 columns; acc (width) receives
/// the values weighted by exp(score - largest).
template <class T>
__device__ Softmax attend(const Operands<T> &head, const float *q, float *acc, const Shape &s, int first, int begin,
                          int end, int stride) {
  Softmax all = {-INFINITY, 0.f};
  for (int e = lane(); e < s.width; e += 32) acc[e] = 0.f;
  __syncwarp();
  for (int at = begin; at < end; at += stride) {
    int count = min(32, end - at);
    bool exists = lane() < count;
    float score = exists ? s.scale * dot(q, head.key(at + lane(), s.prefix, first), s.width) : -INFINITY;
    float most = fmaxf(all.most, warp_max(score)); // finite: the first column of a step exists
    float power = exists ? expf(score - most) : 0.f, factor = expf(all.most - most);
    all = {most, all.sum * factor + warp_sum(power)};
    mix(acc, factor, power, count, s.width, [&](int i) { return head.value(at + i, s.prefix, first); });
  }
  return all;
}

/// Joins `count` parts (d + 2) of a softmax, in order; `out(e, most, sum, value)` receives each of the d values.
template <class Out>
__device__ __forceinline__ void join_parts(const float *parts, int count, int width, const Out &out) {
  float most = -INFINITY, sum = 0;
  for (int part = 0; part < count; part++) most = fmaxf(most, parts[part * (width + 2) + width]);
  float base = most == -INFINITY ? 0.f : most; // no part has a key
  for (int part = 0; part < count; part++) {
    const float *statistics = parts + part * (width + 2) + width;
    sum += statistics[1] * expf(statistics[0] - base);
  }
  for (int e = threadIdx.x; e < width; e += blockDim.x) {
    float value = 0;
    for (int part = 0; part < count; part++) {
      const float *own = parts + part * (width + 2);
      value += own[e] * expf(own[width] - base);
    }
    out(e, most, sum, value);
  }
}

/// out (b, t, h d) and lse (b, h, t). Grid: (ceil(t / 4), h, b) blocks of 128; 8 width floats of shared memory.
template <class T>
__device__ void attention_forward(Operands<T> all, const unsigned *starts, Shape s, T *out, float *lse) {
  DYNAMIC_SHARED(float, memory);
  int i = blockIdx.x * 4 + warp();
  if (i >= s.queries) return;
  float *q = memory + warp() * 2 * s.width, *acc = q + s.width;
  i64 row = i64(blockIdx.z) * s.queries + i;
  Operands<T> head = all.head(blockIdx.z, blockIdx.y, s.width);
  keep(head.q.at(i), q, s.width);
  int first = starts[row];
  Softmax softmax = attend(head, q, acc, s, first, 0, s.prefix + s.past + i + 1 - first, 32);
  out += (row * s.heads + blockIdx.y) * s.width;
  for (int e = lane(); e < s.width; e += 32) out[e] = narrow<T>(acc[e] / softmax.sum);
  if (lane() == 0) lse[statistics_row(s) + i] = softmax.most + logf(softmax.sum);
}

/// The dq third of d_qkv (b, t, 3 h d): dq = scale sum_j ds_j k_j, ds_j = p_j (do v_j - delta).
/// Grid: (ceil(t / 4), h, b) blocks of 128; 12 width floats of shared memory.
template <class T>
__device__ void attention_dq(Operands<T> all, const unsigned *starts, Shape s, const T *dout, const float *lse,
                             const float *delta, T *d_qkv) {
  DYNAMIC_SHARED(float, memory);
  int i = blockIdx.x * 4 + warp(), c = s.heads * s.width;
  if (i >= s.queries) return;
  float *q = memory + warp() * 3 * s.width, *d = q + s.width, *acc = d + s.width;
  i64 row = i64(blockIdx.z) * s.queries + i, column = i64(blockIdx.y) * s.width;
  Operands<T> head = all.head(blockIdx.z, blockIdx.y, s.width);
  keep(head.q.at(i), q, s.width);
  keep(dout + row * c + column, d, s.width);
  for (int e = lane(); e < s.width; e += 32) acc[e] = 0.f;
  __syncwarp();
  float own_lse = lse[statistics_row(s) + i], own_delta = delta[statistics_row(s) + i];
  int first = starts[row], end = s.prefix + i + 1 - first;
  for (int at = 0; at < end; at += 32) {
    int count = min(32, end - at), key = at + lane();
    float ds = 0;
    if (lane() < count) {
      float p = expf(s.scale * dot(q, head.key(key, s.prefix, first), s.width) - own_lse);
      ds = s.scale * p * (dot(d, head.value(key, s.prefix, first), s.width) - own_delta);
    }
    mix(acc, 1.f, ds, count, s.width, [&](int i) { return head.key(at + i, s.prefix, first); });
  }
  for (int e = lane(); e < s.width; e += 32) d_qkv[row * 3 * c + column + e] = narrow<T>(acc[e]);
}

/// The dk and dv thirds of d_qkv (b, t, 3 h d), and d_prefix (b, 2, p, h d): keys in columns, prefix first.
/// Grid: (ceil((p + t) / 4), h, b) blocks of 128; 16 width floats of shared memory.
template <class T>
__device__ void attention_dkv(Operands<T> all, const unsigned *starts, Shape s, const T *dout, const float *lse,
                              const float *delta, T *d_qkv, float *d_prefix) {
  DYNAMIC_SHARED(float, memory);
  int column = blockIdx.x * 4 + warp(), token = column - s.prefix, c = s.heads * s.width;
  if (token >= s.queries) return;
  float *k = memory + warp() * 4 * s.width, *v = k + s.width, *dk = v + s.width, *dv = dk + s.width;
  i64 place = i64(blockIdx.y) * s.width, b = blockIdx.z;
  Operands<T> head = all.head(b, blockIdx.y, s.width);
  keep(head.key(column, s.prefix, 0), k, s.width);
  keep(head.value(column, s.prefix, 0), v, s.width);
  for (int e = lane(); e < s.width; e += 32) dk[e] = dv[e] = 0.f;
  __syncwarp();
  const T *d_rows = dout + b * s.queries * c + place;
  for (int at = max(token, 0); at < s.queries; at += 32) {
    int i = at + lane(), count = min(32, s.queries - at);
    float p = 0, ds = 0;
    if (lane() < count && (token < 0 || int(starts[b * s.queries + i]) <= token)) {
      p = expf(s.scale * dot(k, head.q.at(i), s.width) - lse[statistics_row(s) + i]);
      ds = s.scale * p * (dot(v, d_rows + i64(i) * c, s.width) - delta[statistics_row(s) + i]);
    }
    mix(dk, 1.f, ds, count, s.width, [&](int i) { return head.q.at(at + i); });
    mix(dv, 1.f, p, count, s.width, [&](int i) { return d_rows + i64(at + i) * c; });
  }
  for (int e = lane(); e < s.width; e += 32) {
    if (token < 0) {
      float *to = d_prefix + ((b * 2) * s.prefix + column) * c + place + e;
      to[0] = dk[e], to[i64(s.prefix) * c] = dv[e];
    } else {
      T *to = d_qkv + (b * s.queries + token) * 3 * c + place + e;
      to[c] = narrow<T>(dk[e]), to[2 * c] = narrow<T>(dv[e]);
    }
  }
}
