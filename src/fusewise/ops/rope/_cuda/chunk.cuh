// A thread's chunk of a head, 2 · NP elements, and its rotation.

#pragma once

#include "memory.cuh"

namespace {

// A chunk of one head: NP pairs, interleaved or in two halves, or 2 · NP elements to copy.
template <class T, bool INTERLEAVED, int NP>
struct Chunk {
  static constexpr bool WHOLE = INTERLEAVED && NP > 1;  // one wide access; a single pair may not be aligned for one
  Pack<T, WHOLE ? 2 * NP : NP> first;
  Pack<T, NP> second;
  __device__ void read(const char* from, uint32_t apart, bool both) {
    first.read(from);
    if (!WHOLE && both) second.read(from + apart);
  }
  __device__ void write(char* to, uint32_t apart, bool both) const {
    first.write(to);
    if (!WHOLE && both) second.write(to + apart);
  }
  // Copied features when input and output pairing differ: one wide access, aligned like the interleaved side.
  __device__ void read_on(const char* from) {
    Pack<T, 2 * NP> whole;
    whole.read(from);
#pragma unroll
    for (int i = 0; i < 2 * NP; ++i) element(i) = whole.values[i];
  }
  __device__ void write_on(char* to) {
    Pack<T, 2 * NP> whole;
#pragma unroll
    for (int i = 0; i < 2 * NP; ++i) whole.values[i] = element(i);
    whole.write(to);
  }
  __device__ T& a(int i) { return first.values[WHOLE ? 2 * i : i]; }
  __device__ T& b(int i) { return WHOLE ? first.values[(2 * i + 1) % (2 * NP)] : second.values[i]; }
  __device__ T& element(int i) { return WHOLE || i < NP ? first.values[i % (WHOLE ? 2 * NP : NP)] : second.values[i % NP]; }
};

// The output chunk: rotated, or copied if not `rotates`. With `passes` (a token past the last sequence) the values stay
// unrotated but are reordered to the output's pairing.
template <class T, bool IN, bool OUT, int NP>
__device__ __forceinline__ void turn(Chunk<T, IN, NP>& from, Chunk<T, OUT, NP>& to, const float (&cos)[NP],
                                     const float (&sin)[NP], bool rotates, bool passes) {
  if (rotates) {
#pragma unroll
    for (int j = 0; j < NP; ++j) {
      const T a = from.a(j), b = from.b(j);
      const float x_a = to_float(a), x_b = to_float(b);
      to.a(j) = IN != OUT && passes ? a : from_float<T>(fmaf(x_a, cos[j], -(x_b * sin[j])));
      to.b(j) = IN != OUT && passes ? b : from_float<T>(fmaf(x_b, cos[j], x_a * sin[j]));
    }
  } else {
#pragma unroll
    for (int j = 0; j < 2 * NP; ++j) to.element(j) = from.element(j);
  }
}

}  // namespace
