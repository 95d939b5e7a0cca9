// The tensors of a launch, and where a thread's chunk of a head is in x and in y.

#pragma once

#include "../plan.h"
#include "chunk.cuh"
#include "launch.cuh"

namespace {

struct Operand {
  const char* x;
  char* y;
  int64_t x_strides[3], y_strides[3];  // bytes: batch, token, head
  uint32_t heads;
  uint32_t start, copied;  // bytes before the rotated features; chunks to copy per head
  uint32_t packs;          // accesses that copying a head takes; an odd count leaves the last chunk with one
};

// Byte offsets of a chunk's first access in a head of x and of y, and the distances to the second.
struct Place {
  uint32_t x, y, x_apart, y_apart;
  bool rotates, both;  // both: there is a second access
};

// The place of a chunk: first come those that rotate, then those that are only copied.
template <class T, bool IN, bool OUT, int NP>
__device__ __forceinline__ Place place_of(const Operand& t, uint32_t chunk, uint32_t rotated, uint32_t pairs) {
  constexpr uint32_t SIZE = sizeof(T), PACK = NP * SIZE;
  constexpr bool BOTH_APART = !Chunk<T, IN, NP>::WHOLE && !Chunk<T, OUT, NP>::WHOLE;
  Place at{t.start + chunk * (IN ? 2 : 1) * PACK, t.start + chunk * (OUT ? 2 : 1) * PACK, IN ? SIZE : pairs * SIZE,
           OUT ? SIZE : pairs * SIZE, chunk < rotated, true};
  if (!at.rotates) {
    const uint32_t skipped = 2 * pairs * SIZE, copy = chunk - rotated;
    // With two separate accesses, all first accesses precede all second ones, which coalesces; if the input or the output
    // chunk is one wide access, the two are adjacent.
    const uint32_t one = BOTH_APART ? copy : 2 * copy, other = BOTH_APART ? copy + t.copied : 2 * copy + 1;
    uint32_t one_at = one * PACK, other_at = other * PACK;
    if (one_at >= t.start) one_at += skipped;
    if (other_at >= t.start) other_at += skipped;
    at.x = at.y = one_at;
    at.x_apart = at.y_apart = other_at - one_at;
    at.both = other < t.packs;
  }
  return at;
}

// Set the tensors of a call, and see all their addresses. `alone`: batch entries of one token each are launched as the tokens of
// one entry.
inline void set_operands(Operand (&operands)[2], const Plan& plan, const Call& call, bool alone, Alignment& data) {
  const int64_t size = plan.kind == FLOAT32 ? 4 : 2;
  for (int o = 0; o < plan.operands; ++o) {
    Operand& t = operands[o];
    const int64_t extents[3] = {alone ? 1 : plan.batch, alone ? plan.batch : plan.tokens, plan.heads[o]};
    t.x = static_cast<const char*>(call.x[o]), t.y = static_cast<char*>(call.y[o]);
    data.see(t.x), data.see(t.y);
    for (int i = 0; i < 3; ++i) {
      const int from = alone && i < 2 ? 0 : i;
      t.x_strides[i] = plan.x_strides[o][from] * size, t.y_strides[i] = plan.y_strides[o][from] * size;
      if (extents[i] > 1) data.see(t.x_strides[i]), data.see(t.y_strides[i]);
    }
    t.start = static_cast<uint32_t>(plan.start[o] * size);
    t.heads = static_cast<uint32_t>(plan.heads[o]);
    if (!plan.in_place) data.see((plan.head_dim[o] - plan.start[o] - 2 * plan.pairs) * size);
    data.see(t.start);
  }
  data.see(plan.pairs * size * (plan.interleaved_in || plan.interleaved_out ? 2 : 1));
}

// Set how the unrotated features of the operands are copied in chunks of `np` pairs.
inline void set_copies(Operand (&operands)[2], const Plan& plan, int64_t np) {
  for (int o = 0; o < plan.operands; ++o) {
    operands[o].packs = plan.in_place ? 0 : static_cast<uint32_t>((plan.head_dim[o] - 2 * plan.pairs) / np);
    operands[o].copied = (operands[o].packs + 1) / 2;
  }
}

}  // namespace
