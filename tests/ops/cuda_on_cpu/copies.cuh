// In place of ops/gated_linear/_cuda/copies.cuh: copies are made at once, or, `late`, when their thread waits for them.

#pragma once

#include "async.cuh"

namespace {

inline uint32_t shared_words() { return 0; }
inline void copy_word(const char* from, uint32_t to, bool inside) {
  char* const place = on_cpu::block().memory + to;
  on_cpu::check(to % 4 == 0 && to < on_cpu::SHARED, "a word that is not aligned, or not in shared memory");
  const on_cpu::Operation operation = [=] {
    if (inside) std::memcpy(place, from, 4);
    else std::memset(place, 0, 4);
  };
  if (on_cpu::late) on_cpu::fibers[on_cpu::running].products.push_back(operation);
  else operation();
}
inline float4 four_words(uint32_t at) {
  on_cpu::check(at % 16 == 0, "four words that are not aligned");
  float4 x;
  std::memcpy(&x, on_cpu::block().memory + at, sizeof x);
  return x;
}

}  // namespace
