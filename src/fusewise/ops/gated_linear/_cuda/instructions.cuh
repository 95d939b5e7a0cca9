// Approximate-math instructions without a CUDA C++ intrinsic, and packing of two 16-bit values in a register.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace {

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two values in one register, the first in the lower half.
template <bool BFLOAT16>
__device__ inline uint32_t packed(float a, float b) {
  uint32_t bits;
  if constexpr (BFLOAT16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
  return bits;
}

template <bool BFLOAT16>
__device__ inline float2 unpacked(uint32_t bits) {
  if constexpr (BFLOAT16) return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000)};
  else return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

template <bool BFLOAT16>
__device__ inline float widened(const void* from, int64_t index) {
  const auto bits = static_cast<const uint16_t*>(from)[index];
  return BFLOAT16 ? __uint_as_float(uint32_t(bits) << 16) : __half2float(__ushort_as_half(bits));
}

}  // namespace
