// cos θ and sin θ of a token's pairs: finds its position, then reads the table row or computes the angle.

#pragma once

#include <algorithm>

#include "../plan.h"
#include "launch.cuh"
#include "memory.cuh"

namespace {

// How a table row is read: vectorized by dtype, entry by entry, or as angles or frequencies.
enum Read : int32_t { FLOATS, BFLOATS, HALVES, SCALARS, OF_ANGLES, OF_FREQUENCIES };
// Position axis of the pairs of a chunk: there is only one axis, one axis per chunk, or one per pair (M-RoPE).
enum Axes : int32_t { ONE, BY_CHUNK, BY_PAIR };

// Parameters shared by the tensors of a launch: the partition into blocks, and everything that angles depend on.
struct Work {
  uint32_t pairs, rotated;          // rotated: chunks of NP pairs per head
  uint32_t tokens, steps, q_parts;  // a part, the work of a block, is HEADS · steps · blockDim.y heads of one tensor
  Divisor parts, stripe, batches;   // parts per tile, tiles per stripe, batch entries
  bool inverse, in_place, alone, wide_positions, wide_offsets, wide_bounds, sections_interleaved;
  Read read;
  Axes axes;
  Kind table_kind;
  const char *cos, *sin;
  int64_t table_strides[3], rows;  // elements: batch, row, pair
  float scale;
  const void *positions, *offsets, *bounds;
  int64_t position_strides[3], offset;
  int32_t sequences, sections[3], cp_rank, cp_size;
};

__device__ int64_t integer(const void* data, bool wide, int64_t i) {
  return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
}

// scale · cos and scale · sin of a float64 angle, to within half an ulp of 1: range reduction by quarter turns in float64
// (π/2 in two parts, Cody-Waite), then float32 polynomials (Cephes) on [-π/4, π/4].
__device__ void cos_and_sin(double angle, float scale, float& cos, float& sin) {
  const double turns = rint(angle * 0.63661977236758134308);
  const float x = static_cast<float>(fma(turns, -6.123233995736766e-17, fma(turns, -1.5707963267948966, angle)));
  const float x2 = x * x;
  const float s = x + x * x2 * (-1.6666654611e-1f + x2 * (8.3321608736e-3f + x2 * -1.9515295891e-4f));
  const float quartic = 4.166664568298827e-2f + x2 * (-1.388731625493765e-3f + x2 * 2.443315711809948e-5f);
  const float c = 1.0f - 0.5f * x2 + x2 * x2 * quartic;
  const int quadrant = static_cast<int>(static_cast<long long>(turns)) & 3;
  const float new_c = (quadrant & 1 ? s : c) * scale, new_s = (quadrant & 1 ? c : s) * scale;
  cos = quadrant == 1 || quadrant == 2 ? -new_c : new_c;
  sin = quadrant >= 2 ? -new_s : new_s;
}

__device__ float table_entry(const Work& p, const char* table, int64_t i) {
  if (p.table_kind == FLOAT32) return reinterpret_cast<const float*>(table)[i];
  if (p.table_kind == BFLOAT16) return to_float(reinterpret_cast<const __nv_bfloat16*>(table)[i]);
  return to_float(reinterpret_cast<const __half*>(table)[i]);
}

template <class T, int NP>
__device__ void read_row(const Work& p, int64_t index, float (&cos)[NP], float (&sin)[NP]) {
  Pack<T, NP> c, s;
  c.read(p.cos + index * sizeof(T));
  s.read(p.sin + index * sizeof(T));
#pragma unroll
  for (int i = 0; i < NP; ++i) cos[i] = to_float(c.values[i]), sin[i] = to_float(s.values[i]);
}

// One entry of a row that is not loaded as a vector.
__device__ void entry(const Work& p, uint32_t batch, int64_t row, int pair, float& cos, float& sin) {
  if (p.read == OF_FREQUENCIES) {
    const float frequency = table_entry(p, p.cos, pair * p.table_strides[2]);
    cos_and_sin(static_cast<double>(row) * static_cast<double>(frequency), p.scale, cos, sin);
  } else if (row < 0 || row >= p.rows) {
    cos = sin = __int_as_float(0x7fffffff);
  } else {
    const int64_t index = batch * p.table_strides[0] + row * p.table_strides[1] + pair * p.table_strides[2];
    cos = table_entry(p, p.cos, index);
    if (p.read == OF_ANGLES) {
      cos_and_sin(static_cast<double>(cos), p.scale, cos, sin);
    } else {
      sin = table_entry(p, p.sin, index);
    }
  }
}

__device__ int axis_of(const Work& p, int pair) {
  if (p.sections_interleaved) return pair < 3 * p.sections[pair % 3] ? pair % 3 : 0;
  return (pair >= p.sections[0]) + (pair >= p.sections[0] + p.sections[1]);
}

// The table row of a token without an explicit position, and its sequence. Sets `passes` for a token past the last sequence,
// which passes through unrotated.
__device__ int64_t running_row(const Work& p, uint32_t batch, uint32_t token, bool& passes, int64_t& sequence) {
  // alone: batch entries of one token each are launched as the tokens of one entry.
  int64_t row = p.alone ? 0 : token, length = p.tokens;
  sequence = p.alone ? token : batch;
  if (p.bounds) {
    int32_t low = 0, high = p.sequences + 1;  // bound[low] <= token < bound[high]
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      if (integer(p.bounds, p.wide_bounds, middle) / p.cp_size <= token) low = middle; else high = middle;
    }
    passes = low >= p.sequences;
    if (passes) return 0;
    const int64_t start = integer(p.bounds, p.wide_bounds, low) / p.cp_size;
    length = integer(p.bounds, p.wide_bounds, low + 1) / p.cp_size - start;
    row -= start;
    sequence = low;
  }
  if (p.cp_size > 1) {  // local token to position, see `reference._chunk_map`
    const int64_t half = length / 2;
    row += row >= half ? (2 * p.cp_size - 2 - p.cp_rank) * half : p.cp_rank * half;
  }
  if (p.offsets) row += integer(p.offsets, p.wide_offsets, sequence);
  return row + p.offset;
}

// cos θ and sin θ of NP pairs from `first` on: NaN for a row outside the table.
template <int NP>
__device__ void angles(const Work& p, uint32_t batch, uint32_t token, int first, float (&cos)[NP], float (&sin)[NP],
                       bool& passes) {
  int64_t position = batch * p.position_strides[1] + token * p.position_strides[2], row = 0;
  if (p.axes == BY_CHUNK) position += axis_of(p, first) * p.position_strides[0];
  if (!p.positions) {
    int64_t sequence;
    row = running_row(p, batch, token, passes, sequence);
  } else if (p.axes != BY_PAIR) {
    row = integer(p.positions, p.wide_positions, position);
  }
  const bool inside = row >= 0 && row < p.rows;
  const int64_t index = batch * p.table_strides[0] + row * p.table_strides[1] + first;
  if (p.read <= HALVES && inside) {
    if (p.read == FLOATS) read_row<float>(p, index, cos, sin);
    if (p.read == BFLOATS) read_row<__nv_bfloat16>(p, index, cos, sin);
    if (p.read == HALVES) read_row<__half>(p, index, cos, sin);
  } else {
#pragma unroll 1
    for (int i = 0; i < NP; ++i) {
      if (p.axes == BY_PAIR)
        row = integer(p.positions, p.wide_positions, position + axis_of(p, first + i) * p.position_strides[0]);
      float c, s;
      entry(p, batch, row, first + i, c, s);
#pragma unroll
      for (int j = 0; j < NP; ++j)
        if (i == j) cos[j] = c, sin[j] = s;
    }
  }
#pragma unroll
  for (int i = 0; i < NP; ++i)
    if (p.inverse) sin[i] = -sin[i];
}

// Set all parameters that angles depend on, for chunks of `np` pairs. `alone`: batch entries of one token each are launched as the
// tokens of one entry.
inline void set_angles(Work& p, const Plan& plan, const Call& call, int64_t np, bool alone) {
  p.pairs = static_cast<uint32_t>(plan.pairs), p.rotated = static_cast<uint32_t>(plan.pairs / np);
  p.tokens = static_cast<uint32_t>(alone ? plan.batch : plan.tokens);
  p.inverse = plan.inverse, p.alone = alone;

  // The table.
  const int64_t size = plan.table_kind == FLOAT32 ? 4 : 2;
  Alignment table;
  table.see(call.cos), table.see(call.sin);
  if (plan.batch > 1 && !alone) table.see(plan.table_strides[0] * size);
  if (plan.rows > 1) table.see(plan.table_strides[1] * size);
  p.cos = static_cast<const char*>(call.cos), p.sin = static_cast<const char*>(call.sin);
  for (int i = 0; i < 3; ++i) p.table_strides[i] = plan.table_strides[i];
  p.rows = plan.rows;
  p.table_kind = static_cast<Kind>(plan.table_kind);
  p.scale = static_cast<float>(plan.scale);

  // Positions.
  p.positions = call.positions, p.offsets = call.offsets, p.bounds = call.bounds, p.offset = call.offset;
  p.wide_positions = plan.wide_positions, p.wide_offsets = plan.wide_offsets, p.wide_bounds = plan.wide_bounds;
  for (int i = 0; i < 3; ++i) p.position_strides[i] = plan.position_strides[alone && i == 2 ? 1 : i];
  for (int i = 0; i < 3; ++i) p.sections[i] = static_cast<int32_t>(plan.sections[i]);
  p.sections_interleaved = plan.sections_interleaved;
  p.sequences = static_cast<int32_t>(plan.sequences);
  p.cp_rank = static_cast<int32_t>(plan.cp_rank), p.cp_size = static_cast<int32_t>(plan.cp_size);
  if (plan.has_sections) {
    const bool whole = !plan.sections_interleaved && plan.sections[0] % np == 0 && plan.sections[1] % np == 0;
    p.axes = whole ? BY_CHUNK : BY_PAIR;
  }
  if (plan.table != COS_SIN) {
    p.read = plan.table == ANGLES ? OF_ANGLES : OF_FREQUENCIES;
  } else if (plan.table_strides[2] != 1 || table.bytes() < std::min<int64_t>(16, np * size) || p.axes == BY_PAIR) {
    p.read = SCALARS;
  } else {
    p.read = plan.table_kind == FLOAT32 ? FLOATS : plan.table_kind == BFLOAT16 ? BFLOATS : HALVES;
  }
}

}  // namespace
