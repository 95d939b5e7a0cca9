// Hopper's PTX as functions: TMA, wgmma, clusters, named barriers. Nearly each is one instruction, described in the PTX ISA manual
// under its name.

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
// Waits until all TMA stores of this thread have read their shared memory.
__device__ inline void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void prefetch_tensormap(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Programmatic dependent launch: wait for the previous kernel on the stream to complete, with its writes visible; and allow the next
// kernel's blocks to launch.
__device__ inline void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// wgmma matrix descriptors: K-major rows of 128 bytes in the 128-byte swizzle, in groups of eight; or, transposed, MN-major, with `next`
// bytes between neighbouring blocks of 64 columns.
__device__ inline uint64_t matrix_descriptor(uint32_t address, int next = 16) {
  constexpr uint64_t EIGHT_ROWS = 1024 >> 4, SWIZZLE_128 = 1;
  return SWIZZLE_128 << 62 | EIGHT_ROWS << 32 | uint64_t(next >> 4) << 16 | (address & 0x3ffff) >> 4;
}
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define R8(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define R64 R8(0), R8(8), R8(16), R8(24), R8(32), R8(40), R8(48), R8(56)
#define PRODUCT(N, REGISTERS, A, B, ADD, TYPE, TRANSPOSED, ...)                                                                  \
  asm volatile(                                                                                                                 \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %" ADD ", 0;\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, %" A ", %" B ", add, 1, 1, 0, " TRANSPOSED ";\n}" \
      : __VA_ARGS__                                                                                                             \
      : "l"(a), "l"(b), "r"(add))
#define OF_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TO_16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define TO_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TO_64                                                                                    \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51" \
  ",%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TO_80 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define TO_96 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define SUMS_OF_192 OF_8 TO_16 TO_32 TO_64 TO_80 TO_96
#define OF_192(TYPE, TRANSPOSED) PRODUCT("192", SUMS_OF_192, "96", "97", "98", TYPE, TRANSPOSED, R64, R8(64), R8(72), R8(80), R8(88))
#define TO_104 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define TO_72 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define OF_208(TYPE) \
  PRODUCT("208", SUMS_OF_192 TO_104, "104", "105", "106", TYPE, "0", R64, R8(64), R8(72), R8(80), R8(88), R8(96))
#define OF_144(TYPE) PRODUCT("144", OF_8 TO_16 TO_32 TO_64 TO_72, "72", "73", "74", TYPE, "0", R64, R8(64))
#define OF_160(TYPE) PRODUCT("160", OF_8 TO_16 TO_32 TO_64 TO_80, "80", "81", "82", TYPE, "0", R64, R8(64), R8(72))
#define OF_128(TYPE) PRODUCT("128", OF_8 TO_16 TO_32 TO_64, "64", "65", "66", TYPE, "0", R64)
#define OF_64(TYPE) PRODUCT("64", OF_8 TO_16 TO_32, "32", "33", "34", TYPE, "0", R8(0), R8(8), R8(16), R8(24))
#define OF_32(TYPE) PRODUCT("32", OF_8 TO_16, "16", "17", "18", TYPE, "0", R8(0), R8(8))
#define OF_16(TYPE) PRODUCT("16", OF_8, "8", "9", "10", TYPE, "0", R8(0))

// c = a b + c, or a b where `add` is 0: (64, 16) by (16, N), with N / 2 accumulators c per thread. c[4 j], c[4 j + 1] are columns
// 8 j + 2 (lane % 4) + {0, 1} of row lane / 4 of the warp's sixteen; c[4 j + 2], c[4 j + 3] those of the row eight below.
#define PRODUCT_OF(N)                                                              \
  template <bool BFLOAT16, bool TRANSPOSED>                                        \
  __device__ inline void wgmma(float (&c)[N / 2], uint64_t a, uint64_t b, int add) { \
    static_assert(!TRANSPOSED);                                                    \
    if constexpr (BFLOAT16) OF_##N("bf16");                                        \
    else OF_##N("f16");                                                            \
  }
PRODUCT_OF(208)
PRODUCT_OF(160)
PRODUCT_OF(144)
PRODUCT_OF(128)
PRODUCT_OF(64)
PRODUCT_OF(32)
PRODUCT_OF(16)
template <bool BFLOAT16, bool TRANSPOSED>
__device__ inline void wgmma(float (&c)[96], uint64_t a, uint64_t b, int add) {
  if constexpr (BFLOAT16 && TRANSPOSED) OF_192("bf16", "1");
  else if constexpr (BFLOAT16) OF_192("bf16", "0");
  else if constexpr (TRANSPOSED) OF_192("f16", "1");
  else OF_192("f16", "0");
}
#undef PRODUCT_OF
#undef OF_192
#undef OF_208
#undef OF_160
#undef OF_144
#undef TO_104
#undef TO_72
#undef OF_128
#undef OF_64
#undef OF_32
#undef OF_16
#undef SUMS_OF_192
#undef TO_96
#undef TO_80
#undef TO_64
#undef TO_32
#undef TO_16
#undef OF_8
#undef PRODUCT
#undef R64

// Orders uses of the accumulators after the wait: the compiler may not move them across.
template <int N>
__device__ inline void wgmma_fence_operand(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 8) asm volatile("" : R8(i)::"memory");
}
#undef R8

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

__device__ inline void ldmatrix(uint32_t from, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(from)
               : "memory");
}

}  // namespace
