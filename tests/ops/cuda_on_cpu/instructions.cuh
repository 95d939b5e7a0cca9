// In place of ops/gated_linear/_cuda/instructions.cuh.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.0f / x; }

template <bool BFLOAT16>
inline uint16_t narrowed(float x) {
  uint16_t bits;
  const __half half = __float2half_rn(x);
  std::memcpy(&bits, &half, sizeof bits);
  return BFLOAT16 ? __float2bfloat16_rn(x).bits : bits;
}
template <bool BFLOAT16>
inline float widened(const void* from, int64_t index) {
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(from) + 2 * index, sizeof bits);
  __half half;
  std::memcpy(&half, &bits, sizeof bits);
  return BFLOAT16 ? __bfloat162float({bits}) : __half2float(half);
}
template <bool BFLOAT16>
inline uint32_t packed(float a, float b) { return narrowed<BFLOAT16>(a) | uint32_t(narrowed<BFLOAT16>(b)) << 16; }
template <bool BFLOAT16>
inline float2 unpacked(uint32_t bits) { return {widened<BFLOAT16>(&bits, 0), widened<BFLOAT16>(&bits, 1)}; }

}  // namespace
