// float32 SIMD vectors, and the conversion of float32, bfloat16 and float16 elements to and from them.
//
// Uses the vector extensions common to GCC and Clang, which lower to SSE, AVX, AVX-512 or NEON; the only exception is the
// float16 conversion of x86, which needs intrinsics.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512BW__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// Vector types with N lanes of float32, 32-bit and 16-bit integers.
template <int N>
struct Lanes;

#define DEFINE_LANES(N)                                                                                \
  template <>                                                                                          \
  struct Lanes<N> {                                                                                    \
    typedef float F __attribute__((vector_size(4 * N)));                                               \
    typedef uint32_t U __attribute__((vector_size(4 * N)));                                            \
    typedef uint16_t H __attribute__((vector_size(2 * N)));                                            \
    static U wide(H x) { return __builtin_convertvector(x, U); }                                       \
    static H thin(U x) { return __builtin_convertvector(x, H); }                                       \
  };

DEFINE_LANES(1)
DEFINE_LANES(4)
#if defined(__AVX2__)
DEFINE_LANES(8)
#endif
#if defined(__AVX512BW__)
DEFINE_LANES(16)
#endif

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
inline void store(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

// Shuffle: the elements I of the concatenation of x and y. GCC before 12 has no builtin but recognizes the permutation.
template <int... I, class V>
inline auto shuffled(V x, V y) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(x, y, I...);
#else
  constexpr int N = sizeof(V) / sizeof(x[0]);
  typedef std::decay_t<decltype(x[0])> Result __attribute__((vector_size(sizeof...(I) * sizeof(x[0]))));
  return Result{(I < N ? x[I % N] : y[I % N])...};
#endif
}

// Deinterleave N pairs in two vectors into the vectors of their first and second elements, and back.
template <class V, int... I>
inline void part(V low, V high, V& a, V& b, std::integer_sequence<int, I...>) {
  a = shuffled<2 * I...>(low, high);
  b = shuffled<2 * I + 1 ...>(low, high);
}

template <class V, int... I>
inline void join(V a, V b, V& low, V& high, std::integer_sequence<int, I...>) {
  constexpr int N = sizeof...(I);
  low = shuffled<I / 2 + I % 2 * N...>(a, b);
  high = shuffled<(I + N) / 2 + (I + N) % 2 * N...>(a, b);
}

// The same between two vectors and one of twice the length.
template <class H, int... I>
inline auto interleaved(H a, H b, std::integer_sequence<int, I...>) {
  constexpr int N = sizeof...(I) / 2;
  return shuffled<I / 2 + I % 2 * N...>(a, b);
}

template <class U, class H, int... I, int... J>
inline void separate(U both, H& a, H& b, std::integer_sequence<int, I...>, std::integer_sequence<int, J...>) {
  typedef uint16_t Both __attribute__((vector_size(sizeof(U))));
  constexpr int N = sizeof...(I);
  const auto rows = shuffled<(J < N ? 2 * J : 2 * J - 2 * N + 1)...>((Both)both, (Both)both);
  a = shuffled<I...>(rows, rows);
  b = shuffled<I + N...>(rows, rows);
}

// Load N elements as float32 lanes, and round to nearest even and store them: from a row of a and a row of b, or from N pairs.
template <class T, int N>
struct Elements;

template <int N>
struct Elements<float, N> {
  using F = typename Lanes<N>::F;

  static F get(const float* x) { return load<F>(x); }
  static void get(const float* x_a, const float* x_b, F& a, F& b) { a = load<F>(x_a), b = load<F>(x_b); }
  static void put(float* y_a, float* y_b, F a, F b) { store(y_a, a), store(y_b, b); }
  static void get_pairs(const float* x, F& a, F& b) {
    part(load<F>(x), load<F>(x + N), a, b, std::make_integer_sequence<int, N>());
  }
  static void put_pairs(float* y, F a, F b) {
    F low, high;
    join(a, b, low, high, std::make_integer_sequence<int, N>());
    store(y, low), store(y + N, high);
  }
};

struct Bf16 {
  uint16_t bits;
};

// A pair is processed in one 32-bit lane: unpacking takes two operations, and half as many shuffles are needed.
template <int N>
struct Elements<Bf16, N> {
  using L = Lanes<N>;
  using F = typename L::F;
  using U = typename L::U;
  using H = typename L::H;

  static U round(F v) {  // the result is in the upper half of the lane
    const U bits = (U)v;
    return v == v ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x00400000;
  }
  static void unpack(U both, F& a, F& b) { a = (F)(both << 16), b = (F)(both & 0xffff0000); }
  static U pack(F a, F b) { return round(a) >> 16 | (round(b) & 0xffff0000); }

  static F get(const Bf16* x) { return (F)(L::wide(load<H>(x)) << 16); }
  static void get(const Bf16* x_a, const Bf16* x_b, F& a, F& b) {
    unpack((U)interleaved(load<H>(x_a), load<H>(x_b), std::make_integer_sequence<int, 2 * N>()), a, b);
  }
  static void put(Bf16* y_a, Bf16* y_b, F a, F b) {
    H low, high;
    separate(pack(a, b), low, high, std::make_integer_sequence<int, N>(), std::make_integer_sequence<int, 2 * N>());
    store(y_a, low), store(y_b, high);
  }
  static void get_pairs(const Bf16* x, F& a, F& b) { unpack(load<U>(x), a, b); }
  static void put_pairs(Bf16* y, F a, F b) { store(y, pack(a, b)); }
};

struct Fp16 {
  uint16_t bits;
};

template <int N>
struct Elements<Fp16, N> {
  using L = Lanes<N>;
  using F = typename L::F;
  using U = typename L::U;
  using H = typename L::H;

  static F widen(H x) {
#if defined(__F16C__)
    if constexpr (N == 4) return (F)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)&x));
    if constexpr (N == 8) return (F)_mm256_cvtph_ps((__m128i)x);
#if defined(__AVX512F__)
    if constexpr (N == 16) return (F)_mm512_cvtph_ps((__m256i)x);
#endif
#endif
    const U bits = L::wide(x), magnitude = (bits & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
    const F subnormal = (F)(magnitude + (113u << 23)) - (F)(U{} + (113u << 23));
    const U finite = exponent == 0 ? (U)subnormal : magnitude + (112u << 23);
    const U value = exponent == 0x0f800000 ? magnitude + (224u << 23) : finite;
    return (F)(value | (bits & 0x8000) << 16);
  }

  static H narrow(F v) {
#if defined(__F16C__)
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    if constexpr (N == 4) {
      const __m128i four = _mm_cvtps_ph((__m128)v, NEAREST);
      return load<H>(&four);
    }
    if constexpr (N == 8) return (H)_mm256_cvtps_ph((__m256)v, NEAREST);
#if defined(__AVX512F__)
    if constexpr (N == 16) return (H)_mm512_cvtps_ph((__m512)v, NEAREST);
#endif
#endif
    const U sign = (U)v >> 16 & 0x8000, bits = (U)v & 0x7fffffff;
    const U normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    const U subnormal = (U)((F)bits + 0.5f) - 0x3f000000;  // an ulp of 0.5 is the smallest fp16
    const U finite = bits < 0x38800000 ? subnormal : normal;
    const U beyond = bits > 0x7f800000 ? U{} + 0x7e00 : U{} + 0x7c00;
    return L::thin(sign | (bits >= 0x47800000 ? beyond : finite));
  }

  static F get(const Fp16* x) { return widen(load<H>(x)); }
  static void get(const Fp16* x_a, const Fp16* x_b, F& a, F& b) { a = get(x_a), b = get(x_b); }
  static void put(Fp16* y, F v) { store(y, narrow(v)); }
  static void put(Fp16* y_a, Fp16* y_b, F a, F b) { put(y_a, a), put(y_b, b); }
  static void get_pairs(const Fp16* x, F& a, F& b) {
    H first, second;
    part(load<H>(x), load<H>(x + N), first, second, std::make_integer_sequence<int, N>());
    a = widen(first), b = widen(second);
  }
  static void put_pairs(Fp16* y, F a, F b) {
    H low, high;
    join(narrow(a), narrow(b), low, high, std::make_integer_sequence<int, N>());
    store(y, low), store(y + N, high);
  }
};

}  // namespace
