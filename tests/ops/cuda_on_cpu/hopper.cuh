// In place of ops/gated_linear/_cuda/hopper.cuh: Hopper's machinery on a CPU, with the rules of the PTX manual.
//
// Loads, stores and products are done at once, or, `late`, when all threads wait for something, when their thread waits for its
// stores, and when it waits for its products: shared memory that is written again too early has then been changed.

#pragma once

#include <cuda.h>

#include "instructions.cuh"

namespace on_cpu {
inline int in_step = 0, timed_out = 0;  // waits for a count that ended either way
}

namespace {

using on_cpu::check;
using on_cpu::Operation;

template <class T>
inline T& shared_memory() {
  static_assert(sizeof(T) <= on_cpu::SHARED);
  return *reinterpret_cast<T*>(on_cpu::block().memory);
}
inline uint32_t smem_address(const void* pointer) {
  const auto address = static_cast<const char*>(pointer) - on_cpu::block().memory;
  check(address >= 0 && address < int64_t(on_cpu::SHARED), "an address is not in shared memory");
  return uint32_t(address);
}
template <int COUNT>
inline void setmaxnreg_dec() {}
template <int COUNT>
inline void setmaxnreg_inc() {}

// mbarrier
struct Barrier {
  int32_t bytes;       // announced, less those that have come
  int16_t missing;     // arrivals
  uint16_t count : 15, phase : 1;
  void over() {
    if (missing == 0 && bytes == 0) phase ^= 1, missing = int16_t(count);
  }
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));
inline Barrier& barrier_of(unsigned rank, uint32_t barrier) {
  return *reinterpret_cast<Barrier*>(on_cpu::blocks[rank].memory + barrier);
}
inline Barrier& barrier_here(uint32_t barrier) { return barrier_of(on_cpu::block().rank, barrier); }
inline void mbarrier_init(uint32_t barrier, int arrivals) { barrier_here(barrier) = {0, int16_t(arrivals), uint16_t(arrivals), 0}; }
inline void mbarrier_arrive_cluster(uint32_t barrier, int rank) {
  Barrier& there = barrier_of(rank, barrier);
  check(there.missing > 0, "more threads arrive at a barrier than it waits for");
  --there.missing, there.over();
}
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_cluster(barrier, on_cpu::block().rank); }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) { barrier_here(barrier).bytes += bytes, mbarrier_arrive(barrier); }
inline void mbarrier_wait(uint32_t barrier, int parity) {
  const Barrier& here = barrier_here(barrier);
  on_cpu::wait_until([&] { return here.phase != parity; });
}

inline void atomic_increment(unsigned* count) { ++*count; }
inline bool wait_for_count(const unsigned* count, unsigned least) {
  const bool there = *count >= least;
  return ++(there ? on_cpu::in_step : on_cpu::timed_out), there;
}

inline void named_barrier_sync(int name, int count) { on_cpu::meet(on_cpu::block().names[name], count); }
inline void named_barrier_arrive(int name, int count) { on_cpu::block().names[name].arrive(count); }

inline int warpgroup() { return threadIdx.x / 128; }

inline int cluster_rank() { return on_cpu::block().rank; }
inline void cluster_sync() { on_cpu::meet(on_cpu::cluster, on_cpu::together * blockDim.x); }
inline void fence_mbarrier_init() {}

// TMA. Chunks of 16 bytes are swizzled by the address of their row.
inline uint32_t swizzled(uint32_t address, int span) { return address ^ (address >> 3 & (span == 128 ? 0x70 : 0x30)); }

template <class Move>
inline void each_element(const CUtensorMap& map, int column, int row, uint32_t at, const Move& move) {
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < map.box_columns; ++c) {
      const bool inside = row + r >= 0 && row + r < map.rows && column + c >= 0 && column + c < map.columns;
      move(swizzled(at + map.word * (r * map.box_columns + c), map.swizzle),
           inside ? map.matrix + (row + r) * map.stride + map.word * (column + c) : nullptr);
    }
}
inline void tma_load_multicast(uint16_t ranks, const CUtensorMap* of, int column, int row, uint32_t to, uint32_t barrier) {
  const CUtensorMap map = *of;
  check(to % 128 == 0, "TMA writes to an address that is not aligned");
  check(!on_cpu::early || on_cpu::fibers[on_cpu::running].waited, "TMA reads before the kernel ahead has ended");
  const Operation operation = [=] {
    for (unsigned rank = 0; rank < on_cpu::together; ++rank) {
      if (!(ranks >> rank & 1)) continue;
      char* const memory = on_cpu::blocks[rank].memory;
      each_element(map, column, row, to, [&](uint32_t address, const char* from) {
        const char zeros[4] = {};
        std::memcpy(memory + address, from ? from : zeros, map.word);
        if (!map.rounded) return;
        uint32_t bits;
        std::memcpy(&bits, memory + address, 4), bits = bits + 0x1000 & ~0x1fffu, std::memcpy(memory + address, &bits, 4);
      });
      Barrier& there = barrier_of(rank, barrier);
      there.bytes -= map.word * map.box_rows * map.box_columns, there.over();
    }
  };
  if (on_cpu::late) on_cpu::flying.push_back(operation);
  else operation();
}
inline void tma_load(const CUtensorMap* map, int column, int row, uint32_t to, uint32_t barrier) {
  tma_load_multicast(uint16_t(1 << on_cpu::block().rank), map, column, row, to, barrier);
}
inline void tma_store(const CUtensorMap* of, int column, int row, uint32_t from) {
  const CUtensorMap map = *of;
  const char* const memory = on_cpu::block().memory;
  check(from % 128 == 0, "TMA reads from an address that is not aligned");
  const Operation operation = [=] {
    each_element(map, column, row, from, [&](uint32_t address, char* to) {
      if (to) std::memcpy(to, memory + address, map.word);
    });
  };
  if (on_cpu::late) on_cpu::fibers[on_cpu::running].stores.push_back(operation);
  else operation();
}
inline void prefetch_tensormap(const CUtensorMap*) {}
inline void grid_dependency_wait() { on_cpu::fibers[on_cpu::running].waited = true; }
inline void launch_dependents() {}
inline void tma_store_commit() {
  on_cpu::Fiber& mine = on_cpu::fibers[on_cpu::running];
  mine.store_groups.push_back(std::exchange(mine.stores, {}));
}
template <int PENDING = 0>
inline void tma_store_wait_read() {
  auto& groups = on_cpu::fibers[on_cpu::running].store_groups;
  for (; groups.size() > PENDING; groups.pop_front())
    for (const Operation& operation : groups.front()) operation();
}
inline void fence_proxy_async() {}

inline void store_pair(uint32_t to, float a, float b) {
  check(to % 8 == 0, "two words are stored to an address that is not aligned");
  const float both[] = {a, b};
  std::memcpy(on_cpu::block().memory + to, both, sizeof both);
}

// stmatrix and ldmatrix. `place` gives the shared address of two bytes, and the halves of registers that lie there.
template <class EpilogueContext>
inline void each_half(uint32_t mine, const EpilogueContext& place) {
  on_cpu::Warp& warp = on_cpu::warp();
  warp.given[threadIdx.x % 32] = mine;
  on_cpu::meet_warp();
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int half = 0; half < 2; ++half) place(matrix, half, warp.given + 8 * matrix, on_cpu::block().memory);
  on_cpu::meet_warp();
}
inline void stmatrix(uint32_t to, const uint32_t (&a)[4]) {
  const int lane = threadIdx.x % 32;
  each_half(to, [&](int matrix, int half, const uint32_t* rows, char* memory) {
    const auto bits = uint16_t(a[matrix] >> 16 * half);
    std::memcpy(memory + rows[lane / 4] + lane % 4 * 4 + half * 2, &bits, 2);
  });
}
inline void stmatrix_trans(uint32_t to, const uint32_t (&a)[4]) {
  const int lane = threadIdx.x % 32;
  each_half(to, [&](int matrix, int half, const uint32_t* rows, char* memory) {
    const auto bits = uint16_t(a[matrix] >> 16 * half);
    std::memcpy(memory + rows[lane % 4 * 2 + half] + lane / 4 * 2, &bits, 2);
  });
}
inline void ldmatrix(uint32_t from, uint32_t (&a)[4]) {
  const int lane = threadIdx.x % 32;
  each_half(from, [&](int matrix, int half, const uint32_t* rows, const char* memory) {
    uint16_t bits;
    std::memcpy(&bits, memory + rows[lane / 4] + lane % 4 * 4 + half * 2, 2);
    a[matrix] = half ? a[matrix] | uint32_t(bits) << 16 : bits;
  });
}

}  // namespace

// How many waits for a count ended in step, and how many timed out, since the last call.
extern "C" __attribute__((visibility("default"), weak)) void fusewise_waits(int* waits) {
  waits[0] = std::exchange(on_cpu::in_step, 0), waits[1] = std::exchange(on_cpu::timed_out, 0);
}
