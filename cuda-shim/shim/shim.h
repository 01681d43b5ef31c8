// Runs CUDA kernels as plain C++, to test their logic without a GPU: threads of a block are fibres.
//
// Blocks run one after another, in shuffled order. A fibre runs until it waits at a barrier, a shuffle or a
// tensor-core instruction; then another one, chosen at random, continues, so that a missing barrier shows as a wrong
// result under some seed. Shared memory is filled with NaN before each block. Not modelled: the memory
// model, races between blocks, registers, speed; alignment of global loads by the driver of cuda-shim/driver alone.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct dim3 {
  unsigned x, y, z;
};
struct uint4 {
  unsigned x, y, z, w;
};

namespace sim {

constexpr int MOST_THREADS = 1024;
constexpr size_t STACK = 64 << 10;
/// Most shared memory that declarations take on every architecture, and that a block can have at all (sm_90).
constexpr size_t DECLARED_BYTES = 48 << 10, SHARED_BYTES = 227 << 10;

/// What shared memory is filled with before each block: NaN, or the byte in SHIM_FILL.
inline int fill() {
  static const int byte = getenv("SHIM_FILL") ? atoi(getenv("SHIM_FILL")) : 0xff;
  return byte;
}

/// An asynchronous copy of 16 bytes to shared memory; of zeros if there is no source.
struct Copy {
  unsigned char *to;
  const void *from;
};

struct Fibre {
  ucontext_t start; // its first switch; later ones are jumps, which need no system call
  jmp_buf place;
  dim3 thread;
  bool started, done;
  std::unique_ptr<char[]> stack;
  std::deque<std::vector<Copy>> copies; // groups; the last is still open
};

/// A barrier; `generation` counts how often all fibres have met.
struct Barrier {
  unsigned generation, arrived;
};

/// The block that runs on this OS thread; Rust's tests run on several.
struct Block {
  std::vector<Fibre> fibres;
  jmp_buf home;
  int current, alive, threads;
  uint64_t random;
  Barrier whole, warps[MOST_THREADS / 32];
  size_t arrivals; // at any barrier
  alignas(16) unsigned char slots[MOST_THREADS][16];
  alignas(16) unsigned char shared[SHARED_BYTES];
  std::map<const void *, size_t> places;
  size_t used, dynamic;
  bool misused;
  std::function<void()> body;
  dim3 index, size, grid;
};
inline thread_local Block block;

inline uint64_t draw() {
  uint64_t &x = block.random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return x;
}

/// Leaves the running fibre for the scheduler.
inline void yield() {
  if (_setjmp(block.fibres[block.current].place) == 0) _longjmp(block.home, 1);
}

/// Runs a fibre until it yields.
inline void resume(int index) {
  block.current = index;
  if (_setjmp(block.home) != 0) return;
  Fibre &fibre = block.fibres[index];
  if (fibre.started) _longjmp(fibre.place, 1);
  fibre.started = true;
  setcontext(&fibre.start);
}

inline void meet(Barrier &barrier, int expected) {
  unsigned generation = barrier.generation;
  block.arrivals++;
  if (int(++barrier.arrived) == expected) {
    barrier.arrived = 0, barrier.generation++;
  } else {
    while (barrier.generation == generation) yield();
  }
}

/// Shared memory of a declaration, identified by the address of its own static: the same bytes however often
/// the declaration is executed, as on a GPU.
inline void *shared(const void *key, size_t bytes) {
  auto found = block.places.find(key);
  if (found != block.places.end()) return block.shared + found->second;
  size_t at = block.used;
  block.used = at + (bytes + 15) / 16 * 16;
  if (block.used > SHARED_BYTES || block.used - block.dynamic > DECLARED_BYTES) std::abort();
  block.places[key] = at;
  return block.shared + at;
}

inline void entry() {
  block.body();
  block.fibres[block.current].done = true;
  block.alive--;
  yield();
}

template <class T> void shuffle(std::vector<T> &order) {
  for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[draw() % i]);
}

inline void start_fibres() {
  for (int i = 0; i < block.threads; i++) {
    Fibre &fibre = block.fibres[i];
    unsigned at = i;
    fibre.started = fibre.done = false;
    fibre.copies.assign(1, {});
    fibre.thread = {at % block.size.x, at / block.size.x % block.size.y, at / (block.size.x * block.size.y)};
    if (!fibre.stack) fibre.stack.reset(new char[STACK]);
    getcontext(&fibre.start);
    fibre.start.uc_stack.ss_sp = fibre.stack.get();
    fibre.start.uc_stack.ss_size = STACK;
    fibre.start.uc_link = nullptr;
    makecontext(&fibre.start, entry, 0);
  }
}

/// Runs one block; false if its threads wait for each other forever.
inline bool run_block() {
  memset(block.shared, fill(), std::min(SHARED_BYTES, block.dynamic + DECLARED_BYTES));
  block.places.clear();
  block.used = block.dynamic;
  block.whole = {};
  memset(block.warps, 0, sizeof block.warps);
  block.alive = block.threads;
  start_fibres();
  std::vector<int> order(block.threads);
  std::iota(order.begin(), order.end(), 0);
  // A random half of the warps pauses for some rounds: warps may be far apart where no barrier holds them.
  unsigned warps = 0;
  int rounds = 0;
  while (block.alive) {
    if (rounds-- == 0) warps = draw() >> 32, rounds = draw() >> 32 & 63;
    int alive = block.alive;
    size_t arrivals = block.arrivals;
    shuffle(order);
    for (int i : order)
      if (!block.fibres[i].done && (warps >> i / 32 & 1)) resume(i);
    bool moved = alive != block.alive || arrivals != block.arrivals;
    if (!moved && warps == ~0u) return false;
    if (!moved) warps = ~0u, rounds = 1;
  }
  return true;
}

enum Status { RIGHT = 0, DEADLOCK = 1, MISUSE = 2 };

/// As cuLaunchKernel: `arguments` point at the values.
template <class... A, size_t... I>
int launch(void (*kernel)(A...), const unsigned *grid, const unsigned *size, size_t dynamic, uint64_t seed,
           void **arguments, std::index_sequence<I...>) {
  block.grid = {grid[0], grid[1], grid[2]};
  block.size = {size[0], size[1], size[2]};
  block.threads = size[0] * size[1] * size[2];
  block.random = seed * 0x9e3779b97f4a7c15 | 1;
  block.dynamic = (dynamic + 15) / 16 * 16;
  block.misused = block.threads > MOST_THREADS || block.threads % 32 || block.dynamic > SHARED_BYTES;
  if (block.misused) return MISUSE;
  if (block.fibres.size() < size_t(block.threads)) block.fibres.resize(block.threads);
  block.body = [=] { kernel(*static_cast<std::decay_t<A> *>(arguments[I])...); };
  std::vector<unsigned> order(size_t(grid[0]) * grid[1] * grid[2]);
  std::iota(order.begin(), order.end(), 0);
  shuffle(order);
  for (unsigned i : order) {
    block.index = {i % grid[0], i / grid[0] % grid[1], i / (grid[0] * grid[1])};
    if (!run_block()) return DEADLOCK;
  }
  return block.misused ? MISUSE : RIGHT;
}

template <class... A>
int launch(void (*kernel)(A...), const unsigned *grid, const unsigned *size, size_t dynamic, uint64_t seed,
           void **arguments) {
  return launch(kernel, grid, size, dynamic, seed, arguments, std::index_sequence_for<A...>());
}

/// The sizes of a kernel's arguments, then 0.
template <class... A> const size_t *sizes(void (*)(A...)) {
  static const size_t all[] = {sizeof(std::decay_t<A>)..., 0};
  return all;
}

template <class T> T exchange(T x, int source);

} // namespace sim

#define threadIdx (sim::block.fibres[sim::block.current].thread)
#define blockIdx (sim::block.index)
#define blockDim (sim::block.size)
#define gridDim (sim::block.grid)
#define SHARED(type, name)                                                                                       \
  static const char name##_key = 0;                                                                              \
  Same<type> &name = *static_cast<Same<type> *>(sim::shared(&name##_key, sizeof(Same<type>)))
#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(sim::block.shared)
#define LAUNCHER(kernel)                                                                                         \
  extern "C" int kernel##_launch(const unsigned *grid, const unsigned *size, size_t dynamic, uint64_t seed,      \
                                 void **arguments) {                                                             \
    return sim::launch(kernel, grid, size, dynamic, seed, arguments);                                            \
  }                                                                                                              \
  extern "C" const size_t *kernel##_sizes() { return sim::sizes(kernel); }

inline void __syncthreads() { sim::meet(sim::block.whole, sim::block.threads); }
inline void __syncwarp(unsigned = ~0u) { sim::meet(sim::block.warps[sim::block.current / 32], 32); }

/// The value of lane `source` of the same warp.
template <class T> T sim::exchange(T x, int source) {
  static_assert(sizeof(T) <= 16, "a slot holds 16 bytes");
  int own = block.current;
  memcpy(block.slots[own], &x, sizeof x);
  __syncwarp();
  memcpy(&x, block.slots[own / 32 * 32 + source], sizeof x);
  __syncwarp();
  return x;
}

template <class T> T __shfl_sync(unsigned, T x, int source) { return sim::exchange(x, source & 31); }
template <class T> T __shfl_xor_sync(unsigned, T x, int mask) {
  return sim::exchange(x, (sim::block.current % 32) ^ mask);
}

inline int __all_sync(unsigned, int condition) {
  for (int mask = 1; mask < 32; mask *= 2) condition = __shfl_xor_sync(~0u, condition, mask) && condition;
  return condition != 0;
}

inline int __syncthreads_or(int condition) {
  memcpy(sim::block.slots[sim::block.current], &condition, sizeof condition);
  __syncthreads();
  int any = 0;
  for (int i = 0; i < sim::block.threads; i++) {
    int other;
    memcpy(&other, sim::block.slots[i], sizeof other);
    any |= other != 0;
  }
  __syncthreads();
  return any;
}

/// Blocks run one after another, so nothing comes between.
inline unsigned atomicAdd(unsigned *place, unsigned summand) {
  unsigned before = *place;
  *place += summand;
  return before;
}
inline void __threadfence() {}

/// Rounded each by itself: no compiler joins the two to a fused multiply-add.
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float __fadd_rn(float a, float b) {
  volatile float sum = a + b;
  return sum;
}

using std::max;
using std::min;

#include "types.h"
