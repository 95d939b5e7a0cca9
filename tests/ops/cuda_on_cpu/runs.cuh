// In place of ops/rope/_cuda/runs.cuh: Hopper's copy engine on a CPU. Runs are copied at once, or, `late`, in when all threads wait for
// something and out when their thread waits for them.

#pragma once

#include "async.cuh"
#include "hopper.cuh"

namespace {

inline bool whole(const void* place, uint32_t at, uint32_t bytes) {
  const bool right = (reinterpret_cast<uintptr_t>(place) | at | bytes) % 16 == 0;
  check(right, "a run of bytes that is not aligned");
  return right;
}
inline void bulk_load(const char* from, uint32_t to, uint32_t bytes, uint32_t barrier) {
  char* const memory = on_cpu::block().memory;
  Barrier* const here = &barrier_here(barrier);
  if (!whole(from, to, bytes)) return;
  const Operation operation = [=] {
    std::memcpy(memory + to, from, bytes);
    here->bytes -= int32_t(bytes), here->over();
  };
  if (on_cpu::late) on_cpu::flying.push_back(operation);
  else operation();
}
inline void bulk_store(char* to, uint32_t from, uint32_t bytes) {
  const char* const memory = on_cpu::block().memory;
  if (!whole(to, from, bytes)) return;
  const Operation operation = [=] { std::memcpy(to, memory + from, bytes); };
  if (on_cpu::late) on_cpu::fibers[on_cpu::running].stores.push_back(operation);
  else operation();
}
inline void bulk_store_wait_read() {
  auto& stores = on_cpu::fibers[on_cpu::running].stores;
  for (const Operation& store : stores) store();
  stores.clear();
}

}  // namespace
