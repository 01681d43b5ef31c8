// Element types of kernels in plain C++, and twins of the tensor-core instructions with their lane layouts.
#pragma once

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
#define __float_as_uint bits_of
#define __uint_as_float float_of

#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
// g++ 12 has _Float16 on x86-64 only.
using half_bits = __fp16;
#else
using half_bits = _Float16;
#endif
struct half_t {
  half_bits value;
};
struct bf16_t {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(half_t x) { return float(x.value); }
inline float widen(bf16_t x) { return float_of(uint32_t(x.bits) << 16); }
template <class T> T narrow(float x);
template <> inline float narrow(float x) { return x; }
template <> inline half_t narrow(float x) { return {half_bits(x)}; }
template <> inline bf16_t narrow(float x) {
  uint32_t bits = bits_of(x);
  if (x != x) return {uint16_t(bits >> 16 | 0x40)};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

/// 2^x; the device's approximation has an error of 2 ulp.
inline float power_of_2(float x) { return std::exp2(x); }

inline void deliver(const sim::Copy &copy) {
  if (copy.from) memcpy(copy.to, copy.from, 16);
  else memset(copy.to, 0, 16);
}

/// Twins of asynchronous copies: at random they arrive at once, or only when their group is waited for.
template <class T> void copy_later(T *to, const T *from, bool exists) {
  auto start = reinterpret_cast<unsigned char *>(to);
  bool inside = start >= sim::block.shared && start + 16 <= sim::block.shared + sim::SHARED_BYTES;
  bool aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
  sim::block.misused |= !inside || !aligned;
  sim::Copy copy = {start, exists ? from : nullptr};
  if (sim::draw() >> 32 & 1) deliver(copy);
  else sim::block.fibres[sim::block.current].copies.back().push_back(copy);
}
inline void close_copies() { sim::block.fibres[sim::block.current].copies.emplace_back(); }
template <int LEFT> void wait_for_copies() {
  auto &groups = sim::block.fibres[sim::block.current].copies;
  while (groups.size() > LEFT + 1) { // the last one is still open
    for (const sim::Copy &copy : groups.front()) deliver(copy);
    groups.pop_front();
  }
}

/// Two elements in a register, the first in the low half.
template <class T> unsigned pack(float low, float high) {
  T pair[2] = {narrow<T>(low), narrow<T>(high)};
  unsigned bits;
  memcpy(&bits, pair, sizeof bits);
  return bits;
}

template <class T> void unpack(unsigned bits, float (&x)[2]) {
  T pair[2];
  memcpy(pair, &bits, sizeof bits);
  x[0] = widen(pair[0]), x[1] = widen(pair[1]);
}

/// `d (16, 8) += a (16, 16) b (16, 8)`, fragments as in PTX' `mma.m16n8k16`.
template <class T> void mma(float (&d)[4], const unsigned (&a)[4], const unsigned *b) {
  static thread_local float left[32][16][16], right[32][16][8];
  auto &A = left[sim::block.current / 32];
  auto &B = right[sim::block.current / 32];
  int lane = sim::block.current % 32, group = lane / 4, pair = lane % 4 * 2;
  float x[2];
  for (int r = 0; r < 4; r++) {
    unpack<T>(a[r], x);
    for (int i = 0; i < 2; i++) A[group + r % 2 * 8][pair + r / 2 * 8 + i] = x[i];
  }
  for (int r = 0; r < 2; r++) {
    unpack<T>(b[r], x);
    for (int i = 0; i < 2; i++) B[pair + r * 8 + i][group] = x[i];
  }
  __syncwarp();
  for (int r = 0; r < 4; r++)
    for (int k = 0; k < 16; k++) d[r] += A[group + r / 2 * 8][k] * B[k][pair + r % 2];
  __syncwarp();
}

/// Four 8x8 matrices of 16-bit elements whose rows begin at the lanes' addresses; TRANSPOSED or not.
template <bool TRANSPOSED, class T> void load_matrices(unsigned (&r)[4], const T *row) {
  static thread_local const T *rows[32][32];
  auto &from = rows[sim::block.current / 32];
  int lane = sim::block.current % 32;
  auto start = reinterpret_cast<const unsigned char *>(row);
  bool inside = start >= sim::block.shared && start + 16 <= sim::block.shared + sim::SHARED_BYTES;
  sim::block.misused |= !inside || reinterpret_cast<uintptr_t>(row) % 16 != 0;
  from[lane] = row;
  __syncwarp();
  for (int m = 0; m < 4; m++) {
    T pair[2];
    for (int i = 0; i < 2; i++) {
      int at = lane % 4 * 2 + i, other = lane / 4;
      pair[i] = TRANSPOSED ? from[m * 8 + at][other] : from[m * 8 + other][at];
    }
    memcpy(&r[m], pair, sizeof pair);
  }
  __syncwarp();
}
