// What is made of a tile's product, and how it leaves: each epilogue takes a piece of the tile at a time, rounds once, and has TMA
// store what it put into slots of shared memory.

#pragma once

#include "gate.cuh"
#include "hopper.cuh"
#include "tiles.cuh"

namespace {

// What a group of warps needs to know in an epilogue.
template <int EPILOGUE>
struct Place {
  using A = Of<EPILOGUE>;
  const Params& p;
  Shared<EPILOGUE>& shared;
  const Tile<EPILOGUE>& tile;
  const int group, thread = threadIdx.x % GROUP, warp = thread / 32, lane = thread % 32;

  __device__ uint32_t slot(int index) const { return shared_address(shared.slots[index]); }
  // Where in a slot this lane's row of eight values is, of the 16 features `pair` in a half of the tile's rows: chunks of 16
  // bytes are swizzled in the 64 or 128 of a row.
  __device__ uint32_t offset(int half, int pair) const {
    const int row = half * 64 % A::HEIGHT + warp * 16 + lane % 16, chunk = 2 * pair + lane / 16;
    return row * A::PIECE * 2 + ((chunk ^ (A::PIECE == 64 ? row & 7 : row >> 1 & 3)) << 4);
  }
  __device__ void meet() const { warps_wait(OWN + group, GROUP); }
  // The slots to write may be written again.
  __device__ void stored() const {
    if (thread == 0) stores_have_read();
    meet();
  }
  // What all have written to slots is seen by TMA.
  __device__ void written() const {
    written_for_tma();
    meet();
  }
  // The first slot of what was read for a piece of that number, when it has come.
  __device__ int read(int piece) const {
    barrier_wait(shared_address(&shared.came[piece % A::AHEAD]), piece / A::AHEAD & 1);
    return A::WRITES + piece % A::AHEAD * A::READS;
  }
  // It may be written again. Not before values were used: this would overtake loads that nobody has waited for.
  __device__ void taken(int piece) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.taken[piece % A::AHEAD]));
  }
};

// The pre-activations of the two neighbours that a thread has in row `r` (0 or 1, eight below) of the eight features from `column`.
struct Pair {
  float2 u, g;
  template <int EPILOGUE>
  __device__ Pair(const float (&c)[96], const Place<EPILOGUE>& at, int column, int r) {
    const int i = column / 2 + 2 * r, mine = column + at.lane % 4 * 2;
    const auto bias = [&](int half) { return *reinterpret_cast<const float2*>(&at.shared.bias[at.group][half][mine]); };
    u = {c[i] + bias(0).x, c[i + 1] + bias(0).y}, g = {c[48 + i] + bias(1).x, c[48 + i + 1] + bias(1).y};
  }
};

// Y, PREACT
template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__device__ void write_outputs(float (&top)[96], float (&bottom)[96], const Place<EPILOGUE>& at) {
  constexpr bool KEEP = EPILOGUE == PREACT;
#pragma unroll
  for (int piece = 0; piece < Of<EPILOGUE>::PIECES; ++piece) {
    if (KEEP && piece > 0) at.stored();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2, pair = i % 2;
      uint32_t y[4], u[4], g[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Pair a(half ? bottom : top, at, piece * Of<EPILOGUE>::PIECE + pair * 16 + j / 2 * 8, j % 2);
        y[j] = packed<BFLOAT16>(a.u.x * gate<ACTIVATION>(a.g.x).value, a.u.y * gate<ACTIVATION>(a.g.y).value);
        if (KEEP) u[j] = packed<BFLOAT16>(a.u.x, a.u.y), g[j] = packed<BFLOAT16>(a.g.x, a.g.y);
      }
      store_matrices(at.slot(KEEP ? 0 : piece) + at.offset(half, pair), y);
      if (!KEEP) continue;
      store_matrices(at.slot(1) + at.offset(half, pair), u);
      store_matrices(at.slot(2) + at.offset(half, pair), g);
    }
    at.written();
    if (at.thread == 0) {
      const int feature = at.tile.feature + piece * Of<EPILOGUE>::PIECE, row = at.tile.row;
      store(&at.p.y, feature, row, at.slot(KEEP ? 0 : piece));
      if (KEEP) store(&at.p.u, feature, row, at.slot(1)), store(&at.p.g, feature, row, at.slot(2));
      stores_commit();
    }
  }
}

// SIDEWAYS: y, where a thread has u of a feature in `top` and g in `bottom`, and neighbours are rows of x.
template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__device__ void write_sideways(const float (&top)[Of<EPILOGUE>::COLUMNS / 2], const float (&bottom)[Of<EPILOGUE>::COLUMNS / 2],
                               const Place<EPILOGUE>& at) {
  using A = Of<EPILOGUE>;
  const int of_warp = at.warp * 16;
  const auto bias = [&](int half, int eight) { return at.shared.bias[at.group][half][of_warp + eight * 8 + at.lane / 4]; };
  const float value_bias[2] = {bias(0, 0), bias(0, 1)}, gate_bias[2] = {bias(1, 0), bias(1, 1)};
#pragma unroll
  for (int piece = 0; piece < A::PIECES; ++piece) {
    // The row of eight values that this lane has the address of: rows of x, once they are transposed.
    const int chunk = of_warp / 8 + at.lane / 8 % 2, below = at.lane / 16 * 8 + at.lane % 8;
#pragma unroll
    for (int pair = 0; pair < A::HEIGHT / 16; ++pair) {
      uint32_t y[4];  // eight features and the next, of eight rows and the next
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = ((piece * A::HEIGHT / 8 + pair * 2 + j / 2) * 2 + j % 2) * 2;
        const auto made = [&](int i) { return (top[i] + value_bias[j % 2]) * gate<ACTIVATION>(bottom[i] + gate_bias[j % 2]).value; };
        y[j] = packed<BFLOAT16>(made(i), made(i + 1));
      }
      const int row = pair * 16 + below;
      store_transposed(at.slot(piece) + row * A::PIECE * 2 + ((chunk ^ (row & 7)) << 4), y);
    }
    at.written();
    if (at.thread == 0) store(&at.p.y, at.tile.feature, at.tile.row + piece * A::HEIGHT, at.slot(piece)), stores_commit();
  }
}

// The sum over the 32 rows of this warp of one of 8 values, that with number lane / 4.
__device__ inline float add_rows(float (&sums)[8], int lane) {
#pragma unroll
  for (int step = 16; step >= 4; step /= 2) {
    const int count = step / 4;
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float sent = upper ? sums[i] : sums[i + count], kept = upper ? sums[i + count] : sums[i];
      sums[i] = kept + __shfl_xor_sync(~0u, sent, step);
    }
  }
  return sums[0];
}

// GRADIENT, DOWN: du and dg, their sums over the rows of the tile, and y where it is behind DOWN. `number` is that of the first
// piece of the tile.
template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__device__ void write_gradient(float (&top)[96], float (&bottom)[96], const Place<EPILOGUE>& at, int number) {
  using A = Of<EPILOGUE>;
  const Params& p = at.p;
#pragma unroll
  for (int piece = 0; piece < A::PIECES; ++piece) {
    const int from = at.read(number + piece), group = piece / A::HALVES * A::PIECE;
    if (piece > 0) at.stored();
    float sums[8];  // of du, then of dg: two of either in eight features, two in the next eight
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 16 features by 64 rows: one half below the other, or features side by side
      const int half = A::HALVES == 1 ? i % 2 : piece % 2, pair = A::HALVES == 1 ? i / 2 : i;
      const uint32_t offset = at.offset(half, pair);
      uint32_t first[4], second[4], du[4], dg[4], y[4];
      load_matrices(at.slot(from) + offset, first);
      if (A::READS > 1) load_matrices(at.slot(from + 1) + offset, second);
      if (A::HALVES > 1 || half == 0) {
#pragma unroll
        for (int k = 0; k < 8; ++k) sums[k] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float(&c)[96] = half ? bottom : top;
        const int column = group + pair * 16 + j / 2 * 8;
        float2 dy, u, g;
        if constexpr (A::DOWNWARD) {
          const int k = column / 2 + j % 2 * 2;
          dy = {c[k], c[k + 1]}, u = unpacked<BFLOAT16>(first[j]), g = unpacked<BFLOAT16>(second[j]);
        } else {
          const Pair a(c, at, column, j % 2);
          dy = unpacked<BFLOAT16>(first[j]), u = a.u, g = a.g;
        }
        const Gradient left = gate_gradient<ACTIVATION>(dy.x, u.x, g.x), right = gate_gradient<ACTIVATION>(dy.y, u.y, g.y);
        du[j] = packed<BFLOAT16>(left.u, right.u), dg[j] = packed<BFLOAT16>(left.g, right.g);
        if (A::DOWNWARD) y[j] = packed<BFLOAT16>(u.x * left.gate, u.y * right.gate);
        const int row = at.tile.row + half * 64 + at.warp * 16 + j % 2 * 8 + at.lane / 4, k = j / 2 * 2;
        if (p.sums != nullptr && row < p.rows)  // beyond the last row is what the ring held before
          sums[k] += left.u, sums[k + 1] += right.u, sums[4 + k] += left.g, sums[5 + k] += right.g;
      }
      store_matrices(at.slot(0) + offset, du);
      store_matrices(at.slot(1) + offset, dg);
      if (A::DOWNWARD) store_matrices(at.slot(2) + offset, y);
      if (i == 3) at.taken(number + piece);
      if (p.sums != nullptr && (A::HALVES > 1 || half == 1)) {
        const int feature = pair * 16 + at.lane / 8 % 2 * 8 + at.lane % 4 * 2 + at.lane / 4 % 2;
        at.shared.sums[piece % A::HALVES * 4 + at.warp][at.lane / 16 * A::PIECE + feature] = add_rows(sums, at.lane);
      }
    }
    at.written();
    const int feature = at.tile.feature + group, row = at.tile.row + piece % A::HALVES * A::HEIGHT;
    if (at.thread == 0) {
      store(&p.u, feature, row, at.slot(0)), store(&p.g, feature, row, at.slot(1));
      if (A::DOWNWARD) store(&p.y, feature, row, at.slot(2));
      stores_commit();
    }
    if (p.sums != nullptr && piece % A::HALVES == A::HALVES - 1 && at.thread < 2 * A::PIECE && at.tile.row < p.rows) {
      const int mine = feature + at.thread % A::PIECE;
      float sum = 0.0f;
#pragma unroll
      for (int part = 0; part < 4 * A::HALVES; ++part) sum += at.shared.sums[part][at.thread];
      if (mine < p.hidden) p.sums[(int64_t(at.tile.row / ROWS) * 2 + at.thread / A::PIECE) * p.hidden + mine] = sum;
    }
  }
}

}  // namespace
