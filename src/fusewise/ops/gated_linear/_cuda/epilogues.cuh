// Epilogues of products.cuh. Each processes a tile piece by piece: computes in float32, rounds once, writes the piece to a staging
// slot in shared memory, from which TMA stores it.

#pragma once

#include "gate.cuh"
#include "hopper.cuh"
#include "tiles.cuh"

namespace {

// What a warpgroup needs to know in an epilogue.
template <int EPILOGUE>
struct EpilogueContext {
  using A = Traits<EPILOGUE>;
  const Params& p;
  Shared<EPILOGUE>& shared;
  const Tile<EPILOGUE>& tile;
  const int group, owner = A::OWNERS > 1 ? group : 0, thread = threadIdx.x % GROUP, warp = thread / 32, lane = thread % 32;

  __device__ uint32_t slot(int index) const { return smem_address(shared.slots[owner][index]); }
  // Byte offset in a slot of this lane's stmatrix row: eight values of the 16 features `pair`, in one half of the tile's rows. The
  // 16-byte chunks of a row of 64 or 128 bytes are swizzled, as TMA expects.
  __device__ uint32_t offset(int half, int pair) const {
    const int row = half * 64 % A::HEIGHT + warp * 16 + lane % 16, chunk = 2 * pair + lane / 16;
    return row * A::PIECE * 2 + ((chunk ^ (A::PIECE == 64 ? row & 7 : row >> 1 & 3)) << 4);
  }
  __device__ void sync() const { named_barrier_sync(OWN + group, GROUP); }
  // Waits until TMA has read the staging slots, but for those of the last PENDING pieces. They may then be overwritten.
  template <int PENDING = 0>
  __device__ void wait_stores() const {
    if (thread == 0) tma_store_wait_read<PENDING>();
    sync();
  }
  // Makes all threads' writes to the slots visible to TMA.
  __device__ void fence_writes() const {
    fence_proxy_async();
    sync();
  }
  // Waits for the inputs of a piece; returns their first slot.
  __device__ int wait_inputs(int piece) const {
    mbarrier_wait(smem_address(&shared.inputs_ready[owner][piece % A::AHEAD]), piece / A::AHEAD & 1);
    return A::WRITES * A::BUFFERS + piece % A::AHEAD * A::READS;
  }
  // Releases the input slots of a piece. Only after the values were used: the arrival may otherwise overtake loads still in flight.
  __device__ void release_inputs(int piece) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem_address(&shared.inputs_free[owner][piece % A::AHEAD]));
  }
};

// Pre-activations u, g of the two adjacent features that a thread holds among the eight from `column`, in row `r` (1: eight rows below).
struct Pair {
  float2 u, g;
  template <int EPILOGUE>
  __device__ Pair(const float (&c)[96], const EpilogueContext<EPILOGUE>& at, int column, int r) {
    const int i = column / 2 + 2 * r, mine = column + at.lane % 4 * 2;
    const auto bias = [&](int half) { return *reinterpret_cast<const float2*>(&at.shared.bias[at.group][half][mine]); };
    u = {c[i] + bias(0).x, c[i + 1] + bias(0).y}, g = {c[48 + i] + bias(1).x, c[48 + i + 1] + bias(1).y};
  }
};

// Stores a piece of y, and of u and g if they are kept: from slots of their own, y's from one for each piece otherwise.
template <int EPILOGUE>
__device__ inline void store_piece(const EpilogueContext<EPILOGUE>& at, int piece) {
  constexpr bool KEEP = Traits<EPILOGUE>::KEEP;
  if (at.thread != 0) return;
  const int feature = at.tile.feature + piece * Traits<EPILOGUE>::PIECE, row = at.tile.row;
  tma_store(&at.p.y, feature, row, at.slot(KEEP ? 0 : piece));
  if (KEEP) tma_store(&at.p.u, feature, row, at.slot(1)), tma_store(&at.p.g, feature, row, at.slot(2));
  tma_store_commit();
}

// Y, PREACT
template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__device__ void write_outputs(float (&top)[96], float (&bottom)[96], const EpilogueContext<EPILOGUE>& at) {
  constexpr bool KEEP = Traits<EPILOGUE>::KEEP;
#pragma unroll
  for (int piece = 0; piece < Traits<EPILOGUE>::PIECES; ++piece) {
    if (KEEP && piece > 0) at.wait_stores();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2, pair = i % 2;
      uint32_t y[4], u[4], g[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Pair a(half ? bottom : top, at, piece * Traits<EPILOGUE>::PIECE + pair * 16 + j / 2 * 8, j % 2);
        y[j] = packed<BFLOAT16>(a.u.x * gate<ACTIVATION>(a.g.x).value, a.u.y * gate<ACTIVATION>(a.g.y).value);
        if (KEEP) u[j] = packed<BFLOAT16>(a.u.x, a.u.y), g[j] = packed<BFLOAT16>(a.g.x, a.g.y);
      }
      stmatrix(at.slot(KEEP ? 0 : piece) + at.offset(half, pair), y);
      if (!KEEP) continue;
      stmatrix(at.slot(1) + at.offset(half, pair), u);
      stmatrix(at.slot(2) + at.offset(half, pair), g);
    }
    at.fence_writes();
    store_piece(at, piece);
  }
}

// TF32_Y, TF32_PREACT: a thread's two adjacent features are eight bytes of a row, whose 16-byte chunks are swizzled.
template <int EPILOGUE, int ACTIVATION>
__device__ void write_float32(float (&top)[96], float (&bottom)[96], const EpilogueContext<EPILOGUE>& at) {
  using A = Traits<EPILOGUE>;
#pragma unroll
  for (int piece = 0; piece < A::PIECES; ++piece) {
    if (A::KEEP && piece > 0) at.wait_stores();
#pragma unroll
    for (int i = 0; i < 4 * A::PIECE / 8; ++i) {
      const int half = i / 2 % 2, r = i % 2, eight = i / 4;
      const int row = half * 64 + at.warp * 16 + r * 8 + at.lane / 4, chunk = 2 * eight + at.lane % 4 / 2;
      const uint32_t offset = row * A::PIECE * A::WORD + ((chunk ^ (row & 7)) << 4) + at.lane % 2 * 8;
      const Pair a(half ? bottom : top, at, piece * A::PIECE + eight * 8, r);
      store_pair(at.slot(A::KEEP ? 0 : piece) + offset, a.u.x * gate<ACTIVATION>(a.g.x).value, a.u.y * gate<ACTIVATION>(a.g.y).value);
      if (A::KEEP) store_pair(at.slot(1) + offset, a.u.x, a.u.y), store_pair(at.slot(2) + offset, a.g.x, a.g.y);
    }
    at.fence_writes();
    store_piece(at, piece);
  }
}

// SIDEWAYS: y of 2 N rows. A thread has u of a feature in `top` and g in `bottom`; adjacent accumulators are adjacent rows of x.
template <bool BFLOAT16, int EPILOGUE, int ACTIVATION, int N>
__device__ __forceinline__ void write_sideways(const float (&top)[N], const float (&bottom)[N], const EpilogueContext<EPILOGUE>& at) {
  using A = Traits<EPILOGUE>;
  const int of_warp = at.warp * 16;
  const auto bias = [&](int half, int eight) { return at.shared.bias[at.group][half][of_warp + eight * 8 + at.lane / 4]; };
  const float value_bias[2] = {bias(0, 0), bias(0, 1)}, gate_bias[2] = {bias(1, 0), bias(1, 1)};
  // This lane's stmatrix row, transposed: eight features of one row of x.
  const int chunk = of_warp / 8 + at.lane / 8 % 2, below = at.lane / 16 * 8 + at.lane % 8;
#pragma unroll
  for (int pair = 0; pair < (N + 7) / 8; ++pair) {
    uint32_t y[4]{};  // 2 x 2 matrices of eight features by eight rows
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = ((pair * 2 + j / 2) * 2 + j % 2) * 2;
      if (i >= N) break;
      const auto value = [&](int i) { return (top[i] + value_bias[j % 2]) * gate<ACTIVATION>(bottom[i] + gate_bias[j % 2]).value; };
      y[j] = packed<BFLOAT16>(value(i), value(i + 1));
    }
    const int row = pair * 16 + below;
    stmatrix_trans(at.slot(0) + row * A::PIECE * 2 + ((chunk ^ (row & 7)) << 4), y);
  }
  at.fence_writes();
  if (at.thread == 0) {
    const CUtensorMap* y = at.tile.full ? &at.p.y : &at.p.y_edge;
    const int box = at.tile.box;
    tma_store(y, at.tile.feature, at.tile.row, at.slot(0));
    if (at.tile.half < 0) tma_store(y, at.tile.feature, at.tile.row + box, at.slot(0) + box * A::PIECE * 2);
    tma_store_commit();
  }
}

// Sums each of 8 values over the 32 rows of this warp; a lane gets the sum of value lane / 4.
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

// GRADIENT, DOWN: du and dg and their sums over the rows of the tile, and y for DOWN. `number` counts the pieces that went through the
// same slots; it is that of the tile's first.
template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__device__ void write_gradient(float (&top)[96], float (&bottom)[96], const EpilogueContext<EPILOGUE>& at, int number) {
  using A = Traits<EPILOGUE>;
  const Params& p = at.p;
  float sums[A::PIECE / 16];  // of the upper half, then of both, per 16 features
#pragma unroll
  for (int piece = 0; piece < A::PIECES; ++piece) {
    const int half = piece % A::HALVES, group = piece / A::HALVES * A::PIECE, to = piece % A::BUFFERS * A::WRITES;
    const int from = at.wait_inputs(number + piece);
    if (A::OWNERS > 1 || piece > 0) at.template wait_stores<A::BUFFERS - 1>();
#pragma unroll
    for (int pair = 0; pair < A::PIECE / 16; ++pair) {
      const uint32_t offset = at.offset(half, pair);
      uint32_t first[4], second[4], du[4], dg[4], y[4];
      ldmatrix(at.slot(from) + offset, first);
      if (A::READS > 1) ldmatrix(at.slot(from + 1) + offset, second);
      float rows[8]{};  // summed over this thread's rows, du then dg: two adjacent features of each eight
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
        if (p.sums != nullptr && row < p.rows)  // rows beyond the last hold stale data
          rows[k] += left.u, rows[k + 1] += right.u, rows[4 + k] += left.g, rows[5 + k] += right.g;
      }
      stmatrix(at.slot(to) + offset, du);
      stmatrix(at.slot(to + 1) + offset, dg);
      if (A::DOWNWARD) stmatrix(at.slot(to + 2) + offset, y);
      if (pair == A::PIECE / 16 - 1) at.release_inputs(number + piece);
      if (p.sums != nullptr) {
        const float sum = add_rows(rows, at.lane);
        sums[pair] = half == 0 ? sum : sums[pair] + sum;
        const int feature = pair * 16 + at.lane / 8 % 2 * 8 + at.lane % 4 * 2 + at.lane / 4 % 2;
        if (half == A::HALVES - 1) at.shared.sums[at.owner][at.warp][at.lane / 16 * A::PIECE + feature] = sums[pair];
      }
    }
    at.fence_writes();
    const int feature = at.tile.feature + group, row = at.tile.row + half * A::HEIGHT;
    if (at.thread == 0) {
      tma_store(&p.u, feature, row, at.slot(to)), tma_store(&p.g, feature, row, at.slot(to + 1));
      if (A::DOWNWARD) tma_store(&p.y, feature, row, at.slot(to + 2));
      tma_store_commit();
    }
    if (p.sums != nullptr && half == A::HALVES - 1 && at.thread < 2 * A::PIECE && at.tile.row < p.rows) {
      const int mine = feature + at.thread % A::PIECE;
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) sum += at.shared.sums[at.owner][warp][at.thread];
      if (mine < p.hidden) p.sums[(int64_t(at.tile.row / ROWS) * 2 + at.thread / A::PIECE) * p.hidden + mine] = sum;
    }
  }
}

}  // namespace
