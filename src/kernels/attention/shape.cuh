// Sizes and operands of attention, and the keys that a query sees.
#pragma once
#include "common.cuh"

/// Vectors of all heads: (b, i, head, d) at b * batch + i * row + head * width + d.
template <class T> struct Heads {
  const T *data;
  i64 row, batch;

  __device__ __forceinline__ Heads head(int b, int h, int width) const {
    return {data + b * batch + i64(h) * width, row, batch};
  }
  /// Distances between tokens fit 32 bits, which saves half of a 64-bit product.
  __device__ __forceinline__ const T *at(int token) const { return data + i64(token) * int(row); }
};

/// The fields of `attention::Shape`, and the factor of the scores.
struct Shape {
  int batch, queries, past, heads, width, prefix;
  float scale;
};

/// Operands of one head: queries, keys, values, and keys and values of the prefix.
template <class T> struct Operands {
  Heads<T> q, k, v, pk, pv;

  __device__ __forceinline__ Operands head(int b, int h, int width) const {
    auto one = [=](Heads<T> heads) { return heads.head(b, h, width); };
    return {one(q), one(k), one(v), one(pk), one(pv)};
  }

  /// Columns of keys and values: the prefix, then tokens from `first`.
  __device__ __forceinline__ const T *key(int column, int prefix, int first) const {
    return pick(pk, k, column, prefix, first);
  }
  __device__ __forceinline__ const T *value(int column, int prefix, int first) const {
    return pick(pv, v, column, prefix, first);
  }

  /// By selection, not by a branch: lanes of one load may need both sides.
  static __device__ __forceinline__ const T *pick(const Heads<T> &before, const Heads<T> &tokens, int column,
                                                  int prefix, int first) {
    bool is_before = column < prefix;
    const T *data = is_before ? before.data : tokens.data;
    int row = is_before ? int(before.row) : int(tokens.row);
    return data + i64(is_before ? column : column - prefix + first) * row;
  }
};

/// Row of lse and delta (b, h, t) that this block works on.
__device__ __forceinline__ i64 statistics_row(const Shape &s) {
  return (i64(blockIdx.z) * s.heads + blockIdx.y) * s.queries;
}
