// Consecutive elements kept packed in 32-bit words, for kernels that are short of registers: an element is unpacked when it
// is used.

#pragma once

#include <cstring>
#include <type_traits>

#include "memory.cuh"

namespace {

// Convert a 32-bit word to float32 elements and back: one of float32, two of 16 bits; or a 16-bit word, one element.
template <class T>
__device__ __forceinline__ void unpack(uint32_t word, float* x) {
  if constexpr (std::is_same_v<T, float>) {
    x[0] = __int_as_float(static_cast<int>(word));
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    x[0] = __int_as_float(static_cast<int>(word << 16)), x[1] = __int_as_float(static_cast<int>(word & 0xffff0000u));
  } else {
    __half2 both;
    memcpy(&both, &word, sizeof word);
    x[0] = __low2float(both), x[1] = __high2float(both);
  }
}

template <class T>
__device__ __forceinline__ void unpack(uint16_t word, float* x) {
  T element;
  memcpy(&element, &word, sizeof word);
  *x = to_float(element);
}

template <class T, class WORD = uint32_t>
__device__ __forceinline__ WORD pack(const float* x) {
  WORD word;
  if constexpr (sizeof(WORD) == 2) {
    const T element = from_float<T>(*x);
    memcpy(&word, &element, sizeof word);
  } else if constexpr (std::is_same_v<T, float>) {
    memcpy(&word, x, sizeof word);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(x[0], x[1]);
    memcpy(&word, &both, sizeof word);
  } else {
    const __half2 both = __floats2half2_rn(x[0], x[1]);
    memcpy(&word, &both, sizeof word);
  }
  return word;
}

// N consecutive elements; `get` and `set` convert M of them, starting at `first`.
template <class T, int N>
struct Words {
  using Word = std::conditional_t<N * sizeof(T) == 2, uint16_t, uint32_t>;
  static constexpr int EACH = sizeof(Word) / sizeof(T);
  Pack<Word, N / EACH> words;
  __device__ __forceinline__ void read(const char* from) { words.read(from); }
  __device__ __forceinline__ void read_evict_last(const char* from) { words.read_evict_last(from); }
  __device__ __forceinline__ void write(char* to) const { words.write(to); }
  // Load the nth half in a separate access.
  __device__ __forceinline__ void read_part(const char* from, int nth) {
    Pack<Word, N / EACH / 2> part;
    part.read(from);
#pragma unroll
    for (int i = 0; i < N / EACH / 2; ++i) words.values[nth * (N / EACH / 2) + i] = part.values[i];
  }
  __device__ __forceinline__ void fill(uint32_t word) {
#pragma unroll
    for (int i = 0; i < N / EACH; ++i) words.values[i] = static_cast<Word>(word);
  }
  template <int M = N>
  __device__ __forceinline__ void get(float* x, int first = 0) const {
#pragma unroll
    for (int i = 0; i < M; i += EACH) unpack<T>(words.values[(first + i) / EACH], x + i);
  }
  template <int M = N>
  __device__ __forceinline__ void set(const float* x, int first = 0) {
#pragma unroll
    for (int i = 0; i < M; i += EACH) words.values[(first + i) / EACH] = pack<T, Word>(x + i);
  }
};

}  // namespace
