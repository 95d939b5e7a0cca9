// In place of ops/gated_linear/_cuda/wgmma.cuh: products of a warpgroup on a CPU, done at once, or, `late`, when it waits for them.

#pragma once

#include "hopper.cuh"

namespace {

// As there, what describes an operand counts in 16 bytes.
inline uint64_t matrix_descriptor(uint32_t address, int next = 16) { return uint64_t(next) << 32 | address >> 4; }
inline void wgmma_fence() {}
inline void wgmma_commit_group() {
  auto& fiber = on_cpu::fibers[on_cpu::running];
  fiber.groups.push_back(std::exchange(fiber.products, {}));
}
template <int PENDING>
inline void wgmma_wait_group() {  // of a whole warp: .sync.aligned
  on_cpu::meet_warp();
  auto& groups = on_cpu::fibers[on_cpu::running].groups;
  for (; groups.size() > PENDING; groups.pop_front())
    for (const Operation& operation : groups.front()) operation();
}
// `word` bytes of an element, whose value is that of `at(address)`.
template <bool TRANSPOSED, int REGISTERS, class Element>
inline void multiply(float (&c)[REGISTERS], uint64_t a, uint64_t b, int add, int word, const Element& at) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float* const sums = c;
  const Operation operation = [=] {
    const uint32_t from_a = uint32_t(a) << 4, from_b = uint32_t(b) << 4, next = uint32_t(b >> 32);
    for (int i = 0; i < REGISTERS; ++i) {
      const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = add ? sums[i] : 0.0f;
      for (int k = 0; k < 32 / word; ++k) {
        const uint32_t of_b = TRANSPOSED ? column / 64 * next + k / 8 * 1024 + k % 8 * 128 + column % 64 * 2
                                         : column / 8 * 1024 + column % 8 * 128 + k * word;
        sum += at(from_a + row / 8 * 1024 + row % 8 * 128 + k * word) * at(from_b + of_b);
      }
      sums[i] = sum;
    }
  };
  if (on_cpu::late) on_cpu::fibers[on_cpu::running].products.push_back(operation);
  else operation();
}
template <bool BFLOAT16, bool TRANSPOSED, int REGISTERS>
inline void wgmma(float (&c)[REGISTERS], uint64_t a, uint64_t b, int add) {
  const char* const memory = on_cpu::block().memory;
  multiply<TRANSPOSED>(c, a, b, add, 2, [=](uint32_t address) { return widened<BFLOAT16>(memory + swizzled(address, 128), 0); });
}
inline void wgmma_tf32(float (&c)[96], uint64_t a, uint64_t b, int add) {
  const char* const memory = on_cpu::block().memory;
  multiply<false>(c, a, b, add, 4, [=](uint32_t address) {
    uint32_t bits;
    std::memcpy(&bits, memory + swizzled(address, 128), 4), bits &= ~0x1fffu;  // cuts off
    float value;
    return std::memcpy(&value, &bits, 4), value;
  });
}
template <int N>
inline void wgmma_fence_operand(float (&)[N]) {
  check(on_cpu::fibers[on_cpu::running].groups.empty(), "sums are read before their products are waited for");
}

}  // namespace
