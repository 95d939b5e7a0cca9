// In place of ops/rope/_cuda/async.cuh: copies are made at once, or, `late`, when their thread waits for them.

#pragma once

#include <cuda_runtime.h>

namespace {

inline char* dynamic_smem() { return on_cpu::block().memory; }
inline void copy_async(const char* from, char* to) {
  const bool right = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  on_cpu::check(right, "a copy of 16 bytes that is not aligned");
  if (!right) return;
  const on_cpu::Operation operation = [=] { std::memcpy(to, from, 16); };
  if (on_cpu::late) on_cpu::fibers[on_cpu::running].products.push_back(operation);
  else operation();
}
inline void group_copies() {
  auto& fiber = on_cpu::fibers[on_cpu::running];
  fiber.groups.push_back(std::exchange(fiber.products, {}));
}
template <int PENDING>
inline void wait_for_copies() {
  auto& groups = on_cpu::fibers[on_cpu::running].groups;
  for (; groups.size() > PENDING; groups.pop_front())
    for (const on_cpu::Operation& operation : groups.front()) operation();
}

}  // namespace
