// Copies of 16 bytes from global to shared memory that a thread starts and later waits for (cp.async), in groups.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace {

__device__ __forceinline__ char* dynamic_smem() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

// Start a copy into this block's shared memory. Addresses must be multiples of 16 bytes.
__device__ __forceinline__ void copy_async(const char* from, char* to) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
}
// The copies that the thread has started since the last call are a group.
__device__ __forceinline__ void group_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait for all groups of the thread but the last PENDING. Only the thread itself sees what has arrived.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

}  // namespace
