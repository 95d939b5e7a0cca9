// Memory accesses of up to 16 bytes, dtype conversions, and division by launch-time constants.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

// n / d for n < 2³¹ by multiplication with a magic number.
struct Divisor {
  uint32_t d = 1, magic = 0, shift = 0;
  Divisor() = default;
  explicit Divisor(int64_t divisor) : d(static_cast<uint32_t>(divisor)) {
    if (d == 1) return;
    while ((uint64_t(1) << (shift + 1)) < d) ++shift;
    magic = static_cast<uint32_t>((uint64_t(1) << (32 + shift)) / d + 1);
  }
  __device__ uint32_t operator()(uint32_t n) const { return d == 1 ? n : __umulhi(n, magic) >> shift; }
};

// Loads that L2 evicts last, for what many blocks read, such as a table.
template <class Word>
__device__ __forceinline__ Word load_evict_last(const Word* from) {
#ifdef __CUDA_ARCH__
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  Word to;
  if constexpr (sizeof(Word) == 16)
    asm("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
        : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
        : "l"(from), "l"(policy));
  else if constexpr (sizeof(Word) == 8)
    asm("ld.global.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;" : "=r"(to.x), "=r"(to.y) : "l"(from), "l"(policy));
  else
    to = *from;
  return to;
#else
  return *from;
#endif
}

template <int BYTES> struct Word;
template <> struct Word<16> { using type = uint4; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<4> { using type = uint32_t; };
template <> struct Word<2> { using type = uint16_t; };

// N consecutive elements, loaded and stored in one or several accesses of up to 16 bytes.
template <class T, int N>
struct Pack {
  static constexpr int BYTES = sizeof(T) * N < 16 ? sizeof(T) * N : 16;
  static constexpr int WORDS = sizeof(T) * N / BYTES;
  union {
    typename Word<BYTES>::type words[WORDS];
    T values[N];
  };
  __device__ Pack() {}
  Pack(const Pack&) = default;
  __device__ Pack& operator=(const Pack& from) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = from.words[i];
    return *this;
  }
  __device__ void read(const char* from) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = reinterpret_cast<const typename Word<BYTES>::type*>(from)[i];
  }
  __device__ void read_evict_last(const char* from) {
    using Mine = typename Word<BYTES>::type;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = load_evict_last(reinterpret_cast<const Mine*>(from) + i);
  }
  __device__ void write(char* to) const {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) reinterpret_cast<typename Word<BYTES>::type*>(to)[i] = words[i];
  }
};

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_float(__half x) { return __half2float(x); }
template <class T> __device__ T from_float(float x);
template <> __device__ float from_float(float x) { return x; }
template <> __device__ __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __half from_float(float x) { return __float2half_rn(x); }

}  // namespace
