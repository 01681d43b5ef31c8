// Tiles on their way through shared memory to tensor cores: copies that arrive later, and matrices read as operands.
//
// The twins for tests without a GPU are in the shim's types.h.
#pragma once
#include "mma.cuh"

#ifndef CPU_SHIM
/// Four matrices (8, 8) whose rows begin at the addresses of lanes 0 to 7, 8 to 15, and so on.
template <bool TRANSPOSED, class T>
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const T *row) {
  unsigned address = __cvta_generic_to_shared(row);
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/// Starts copying 16 bytes into shared memory, or 16 zeros; `wait_for_copies` waits for them.
template <class T> __device__ __forceinline__ void copy_later(T *to, const T *from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}
/// Makes a group of the copies started since the last call.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
/// Waits until this thread's groups but the last LEFT have arrived.
template <int LEFT> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory");
}
#endif
