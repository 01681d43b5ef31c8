// Products of small matrices on tensor cores (mma.sync m16n8k16), for 16-bit types, with FP32 sums.
//
// Layouts of a lane's fragments, with group = lane / 4 and pair = 2 (lane % 4), after PTX ISA "Matrix Fragments
// for mma.m16n8k16": of left (16, 16) element r is (group + 8 (r % 2), pair + 8 (r / 2)) and its right neighbour;
// of right (16, 8) element r is (pair + 8 r, group) and the one below; of the result (16, 8) element r is
// (group + 8 (r / 2), pair + r % 2). So a result, packed, is a left operand of the next product.
#pragma once
#include "common.cuh"

#ifndef CPU_SHIM
template <class T> __device__ __forceinline__ unsigned pack(float low, float high);
template <> __device__ __forceinline__ unsigned pack<half_t>(float low, float high) {
  __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<unsigned *>(&both);
}
template <> __device__ __forceinline__ unsigned pack<bf16_t>(float low, float high) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<unsigned *>(&both);
}

/// The elements of a register, the first from its low half.
template <class T> __device__ __forceinline__ void unpack(unsigned bits, float (&x)[2]);
template <> __device__ __forceinline__ void unpack<half_t>(unsigned bits, float (&x)[2]) {
  float2 both = __half22float2(*reinterpret_cast<const __half2 *>(&bits));
  x[0] = both.x, x[1] = both.y;
}
template <> __device__ __forceinline__ void unpack<bf16_t>(unsigned bits, float (&x)[2]) {
  float2 both = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&bits));
  x[0] = both.x, x[1] = both.y;
}

#define MMA(type)                                                                                                \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                    \
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                 \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
/// d (16, 8) += a (16, 16) b (16, 8).
template <class T> __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned *b);
template <>
__device__ __forceinline__ void mma<half_t>(float (&d)[4], const unsigned (&a)[4], const unsigned *b) {
  MMA("f16");
}
template <>
__device__ __forceinline__ void mma<bf16_t>(float (&d)[4], const unsigned (&a)[4], const unsigned *b) {
  MMA("bf16");
}
#endif
