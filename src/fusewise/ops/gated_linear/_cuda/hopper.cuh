// Hopper's PTX as functions: TMA, clusters, named barriers, matrices in shared memory (wgmma: wgmma.cuh).
// Nearly each is one instruction, described in the PTX ISA manual under its name.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../../_shared/mbarrier.cuh"

namespace {

// The block's dynamic shared memory.
template <class T>
__device__ inline T& shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return *reinterpret_cast<T*>(memory);
}

// Moves registers between warpgroups.
template <int COUNT>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// This thread's warpgroup. Broadcast, so that the compiler knows that a warp's threads agree on it: what follows from it, such as the
// descriptors of wgmma's operands, is then computed once per warp, in the uniform registers that wgmma reads. Otherwise each is moved
// there, twice as many instructions in a main loop.
__device__ inline int warpgroup() { return __shfl_sync(~0u, int(threadIdx.x / 128), 0); }

// A counter in global memory that signals progress only: relaxed, no data depends on it.
__device__ inline void atomic_increment(unsigned* count) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
// Spins until the counter reaches `least`; false after a timeout of some 50 µs.
__device__ inline bool wait_for_count(const unsigned* count, unsigned least) {
  constexpr long long TIMEOUT = 100000;  // cycles
  for (const long long begin = clock64(); clock64() - begin < TIMEOUT; __nanosleep(32)) {
    unsigned now;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
    if (now >= least) return true;
  }
  return false;
}

// Named barriers: `count` threads take part in all, those that arrive and those that wait.
__device__ inline void named_barrier_sync(int name, int count) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(count) : "memory"); }
__device__ inline void named_barrier_arrive(int name, int count) { asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(count) : "memory"); }

__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// TMA: loads a box of a matrix into shared memory; multicast, at the same address in each of the cluster's blocks of the mask `blocks`.
__device__ inline void tma_load(const CUtensorMap* map, int column, int row, uint32_t to, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
__device__ inline void tma_load_multicast(uint16_t blocks, const CUtensorMap* map, int column, int row, uint32_t to, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}
__device__ inline void tma_store(const CUtensorMap* map, int column, int row, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column), "r"(row),
               "r"(from)
               : "memory");
}
__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the TMA stores of this thread, but for its last PENDING groups, have read their shared memory.
template <int PENDING = 0>
__device__ inline void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
__device__ inline void prefetch_tensormap(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Programmatic dependent launch: wait for the previous kernel on the stream to complete, with its writes visible; and allow the next
// kernel's blocks to launch.
__device__ inline void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Four 8 x 8 matrices of 16-bit values to or from shared memory; lane l has the address of row l % 8 of matrix l / 8.
__device__ inline void stmatrix(uint32_t to, const uint32_t (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
               : "memory");
}
// The same, transposed.
__device__ inline void stmatrix_trans(uint32_t to, const uint32_t (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]),
               "r"(a[3])
               : "memory");
}

// Two words to shared memory.
__device__ inline void store_pair(uint32_t to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}

__device__ inline void ldmatrix(uint32_t from, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(from)
               : "memory");
}

}  // namespace
