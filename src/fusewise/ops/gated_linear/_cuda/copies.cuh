// Words copied from global to shared memory asynchronously (cp.async), and read four at a time. The reads are volatile, so that they stay
// where they are written among the multiplications.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace {

__device__ inline uint32_t shared_words() {
  extern __shared__ __align__(16) char fusewise_words[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(fusewise_words));
}
// Zero instead of the word if it is not inside, which is then not read.
__device__ inline void copy_word(const char* from, uint32_t to, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0));
}
__device__ inline void group_copies() { asm volatile("cp.async.commit_group;"); }
// Waits for this thread's copies but those of the last PENDING groups.
template <int PENDING>
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING)); }

__device__ inline float4 four_words(uint32_t at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at));
  return x;
}

}  // namespace
