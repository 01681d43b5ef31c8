// Shared by all kernels: element types, 16-byte loads and stores, reductions in a fixed order, and how a
// template becomes one exported kernel for each type of activations.
//
// The same sources are compiled as C++ for tests without a GPU (CPU_SHIM, see cuda-shim/); everything that
// differs is in the macros here and in the shim's header. Do not compile with fast maths:
// dropout masks must be the host's bit for bit, and divisions those of IEEE.
#pragma once

#ifdef CPU_SHIM
#include "shim.h"
#else
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef __half half_t;
typedef __nv_bfloat16 bf16_t;
#define SHARED(type, name) __shared__ alignas(16) Same<type> name
#define DYNAMIC_SHARED(type, name)                                                                               \
  extern __shared__ uint4 dynamic_shared[];                                                                      \
  type *name = reinterpret_cast<type *>(dynamic_shared)
#define LAUNCHER(kernel)
#endif

typedef long long i64;
/// Writes an array type before a name.
template <class T> using Same = T;

/// `extern "C"` kernels `name_f32`, `name_f16` and `name_bf16` of the template `name<T>`. Both lists are in
/// parentheses; T is the type of activations in the first.
#define EXPORT(name, parameters, arguments)                                                                      \
  EXPORT_AS(name, f32, float, , parameters, arguments)                                                           \
  EXPORT_16(name, , parameters, arguments)
/// Only the kernels for 16-bit types, with launch bounds.
#define EXPORT_16(name, bounds, parameters, arguments)                                                           \
  EXPORT_AS(name, f16, half_t, bounds, parameters, arguments)                                                    \
  EXPORT_AS(name, bf16, bf16_t, bounds, parameters, arguments)
#define EXPORT_AS(name, suffix, type, bounds, parameters, arguments)                                             \
  namespace suffix {                                                                                             \
  typedef type T;                                                                                                \
  extern "C" __global__ void bounds name##_##suffix parameters { name<T> arguments; }                            \
  LAUNCHER(name##_##suffix)                                                                                      \
  }

#ifndef CPU_SHIM
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(half_t x) { return __half2float(x); }
__device__ __forceinline__ float widen(bf16_t x) { return __bfloat162float(x); }
/// Rounds to nearest, ties to even.
template <class T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow(float x) { return x; }
template <> __device__ __forceinline__ half_t narrow(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ bf16_t narrow(float x) { return __float2bfloat16_rn(x); }
#endif

/// The type of frozen matrices beside activations of type T: a base is brought to a device in FP16, or for BF16
/// activations rounded to BF16. Biases, norms and positions are FP16 for all.
template <class T> struct WeightOf {
  typedef half_t type;
};
template <> struct WeightOf<bf16_t> {
  typedef bf16_t type;
};
template <class T> using Weight = typename WeightOf<T>::type;

/// Elements that a thread loads or stores by one instruction.
constexpr int WIDE = 8;

/// 16 bytes, moved by one instruction.
template <class T> struct alignas(16) Vector {
  static constexpr int COUNT = 16 / sizeof(T);
  T at[COUNT];
};

__device__ __forceinline__ bool aligned(const void *pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

/// The next WIDE elements, of which `count` exist; the others read as 0. Any alignment; fast at 16 bytes.
template <class T> __device__ __forceinline__ void load(const T *from, i64 count, float (&x)[WIDE]) {
  if (count >= WIDE && aligned(from)) {
    constexpr int COUNT = Vector<T>::COUNT;
#pragma unroll
    for (int part = 0; part < WIDE / COUNT; part++) {
      Vector<T> v = reinterpret_cast<const Vector<T> *>(from)[part];
#pragma unroll
      for (int i = 0; i < COUNT; i++) x[part * COUNT + i] = widen(v.at[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < WIDE; i++) x[i] = i < count ? widen(from[i]) : 0.f;
  }
}

/// The counterpart of `load`: writes `count` elements, WIDE at most.
template <class T> __device__ __forceinline__ void store(const float (&x)[WIDE], i64 count, T *to) {
  if (count >= WIDE && aligned(to)) {
    constexpr int COUNT = Vector<T>::COUNT;
#pragma unroll
    for (int part = 0; part < WIDE / COUNT; part++) {
      Vector<T> v;
#pragma unroll
      for (int i = 0; i < COUNT; i++) v.at[i] = narrow<T>(x[part * COUNT + i]);
      reinterpret_cast<Vector<T> *>(to)[part] = v;
    }
  } else {
#pragma unroll
    for (int i = 0; i < WIDE; i++)
      if (i < count) to[i] = narrow<T>(x[i]);
  }
}

/// First of this thread's WIDE elements in kernels that take a flat list.
__device__ __forceinline__ i64 own() { return (i64(blockIdx.x) * blockDim.x + threadIdx.x) * WIDE; }

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }

/// Sum over a warp, the same bits in every lane: additions in the order of the butterfly.
template <class T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

/// Sum over a block of whole warps, in a fixed order, for every thread.
template <class T> __device__ T block_sum(T x) {
  SHARED(T[32], parts);
  x = warp_sum(x);
  if (lane() == 0) parts[warp()] = x;
  __syncthreads();
  T sum = 0;
  for (int i = 0; i < int(blockDim.x / 32); i++) sum += parts[i];
  __syncthreads(); // the next call writes `parts` again
  return sum;
}
