// Counter-based random numbers: `engraft_util::rng`, bit for bit.
#pragma once
#include "common.cuh"

__device__ __forceinline__ unsigned long long mix_bits(unsigned long long x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// Uniform in [0, 1), a multiple of 2^-24.
__device__ __forceinline__ float uniform(unsigned long long key, unsigned long long index) {
  unsigned long long bits = mix_bits(mix_bits(index * 0x9e3779b97f4a7c15ull + key) ^ key);
  return float(unsigned(bits >> 40)) * (1.f / (1 << 24));
}
