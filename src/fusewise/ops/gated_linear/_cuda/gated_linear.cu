// The products of the gated linear unit for Hopper, with what is made of them:
//
//     y = u · act(g),   u = x W_valueᵀ + b_value,   g = x W_gateᵀ + b_gate
//     du = dy · act(g),   dg = dy · u · act'(g)
//
// Shape legend: M rows, D features in, F features out. Y, PREACT and GRADIENT are behind the product of x with both weights; DOWN
// is behind dy = dz W_down, with dz (M, D) as x and W_down (D, F). KEPT has no product: `kept.cuh`.
//
// Two thread blocks, a cluster, have a pair of tiles one above the other: 128 rows of x each by 192 columns of the product, which
// are u and g of 96 features, or dy of 192. What both need of the weights is read once for both, a half by each. A block's warps
// have roles: one thread brings blocks of both operands into a ring of shared memory by TMA, another what the epilogue reads;
// two groups of four warps take turns at the tensor cores, a whole tile each, so that the epilogue of one is behind the product of
// the other. An epilogue takes 32 or 64 features at a time: u and g of a feature lie in one thread; what it reads and writes passes
// through slots of shared memory by TMA, which stores nothing beyond the edges of a matrix and loads zeros there. Accumulation,
// bias and gate are in float32, rounded once where they are stored.

#include <cuda_runtime.h>

#include <algorithm>

#include "gate.cuh"
#include "hopper.cuh"
#include "kept.cuh"
#include "plan.h"
#include "sums.cuh"

namespace {

constexpr int ROWS = 128, COLUMNS = 192, DEPTH = 64;  // of a tile, and of a block of the ring
constexpr int CLUSTER = 2, GROUP = 128;               // thread blocks; threads of four warps
constexpr int GROUP_M = 8;                            // pairs of tiles, one below the other, that are taken together
constexpr int X_BYTES = ROWS * DEPTH * 2, W_BYTES = COLUMNS * DEPTH * 2;
constexpr int SLOT_BYTES = 8192;  // of a piece, what an epilogue takes at a time
constexpr int BOX = 64;           // columns of W_down side by side: 128 bytes
constexpr int EDGE = 16;          // rows of x that are asked for at once where a tile has fewer than ROWS

// What depends on the epilogue: features of a tile and of a piece, which is of all its rows or of one half; stages of the ring; slots
// to write, tensors it reads and how many pieces of each there is room for. TMA takes its time for each row of a piece, so they are
// as wide as u and g of the same features allow.
template <int EPILOGUE>
struct Of {
  static constexpr bool DOWNWARD = EPILOGUE == DOWN;
  static constexpr int FEATURES = DOWNWARD ? COLUMNS : COLUMNS / 2, STAGES = DOWNWARD ? 4 : 5;
  static constexpr int WRITES = EPILOGUE == GRADIENT ? 2 : 3, READS = EPILOGUE == GRADIENT ? 1 : DOWNWARD ? 2 : 0;
  static constexpr int PIECE = DOWNWARD ? 64 : 32, HEIGHT = DOWNWARD ? ROWS / 2 : ROWS, AHEAD = DOWNWARD ? 2 : 1;
  static constexpr int HALVES = ROWS / HEIGHT, PIECES = FEATURES / PIECE * HALVES;
  static_assert(PIECE * HEIGHT * 2 == SLOT_BYTES);
};

template <int EPILOGUE>
struct Shared {
  using A = Of<EPILOGUE>;
  alignas(1024) char ring[A::STAGES][X_BYTES + W_BYTES];
  alignas(1024) char slots[A::WRITES + A::READS * A::AHEAD][SLOT_BYTES];
  float bias[2][2][COLUMNS / 2];            // of the tile of each group: value, gate
  float sums[4 * A::HALVES][2 * A::PIECE];  // of a piece's du and dg, by warps and halves
  uint64_t ready[A::STAGES], free[A::STAGES], came[A::AHEAD], taken[A::AHEAD];
};
static_assert(sizeof(Shared<GRADIENT>) <= 227 * 1024 && sizeof(Shared<DOWN>) <= 227 * 1024, "of shared memory a block may have");

// Names of the barriers of warps: to turns at the tensor cores, at the slots to write, and of a group's own warps.
enum Name { PRODUCT = 1, SLOT = 3, OWN = 5 };

struct Params {
  CUtensorMap x, x_edge, value, gate, y, u, g, first, second;  // as in plan.h; x_edge: x in boxes of EDGE rows
  const void *value_bias, *gate_bias;                          // or null
  int64_t value_bias_stride, gate_bias_stride;
  float* sums;              // (⌈M / 128⌉, 2, F) of du and dg, or null
  int rows, hidden, steps;  // blocks of the depth
};

// Where the tile of a turn is: in groups of GROUP_M pairs, so that what is read together stays in the cache.
template <int FEATURES>
struct Tile {
  int row, feature;
  __device__ Tile(const Params& p, int turn, int rank) {
    const int down = ceil_div(p.rows, CLUSTER * ROWS), across = ceil_div(p.hidden, FEATURES);
    const int first = turn / (GROUP_M * across) * GROUP_M, rows = min(down - first, GROUP_M), within = turn % (GROUP_M * across);
    row = ((first + within % rows) * CLUSTER + rank) * ROWS;
    feature = within / rows * FEATURES;
  }
  __host__ __device__ static int count(const Params& p) { return ceil_div(p.rows, CLUSTER * ROWS) * ceil_div(p.hidden, FEATURES); }
  __host__ __device__ static int ceil_div(int a, int b) { return (a + b - 1) / b; }
};

// One thread fills the ring, tile after tile, as far ahead of the products as it is long.
template <int EPILOGUE>
__device__ void bring_operands(const Params& p, Shared<EPILOGUE>& shared, int rank) {
  using A = Of<EPILOGUE>;
  constexpr uint16_t ALL = (1 << CLUSTER) - 1;
  int slot = 0, phase = 1;  // the ring is free at first: a wait for the round before passes
  for (int turn = blockIdx.x / CLUSTER; turn < Tile<A::FEATURES>::count(p); turn += gridDim.x / CLUSTER) {
    const Tile<A::FEATURES> tile(p, turn, rank);
    // Rows of x that are not there would take longer than those that are. What lies in their place is for rows of no output.
    const bool whole = tile.row + ROWS - EDGE < p.rows;
    const int end = whole ? tile.row + ROWS : p.rows;
    for (int depth = 0; depth < p.steps * DEPTH; depth += DEPTH) {
      const uint32_t ready = shared_address(&shared.ready[slot]);
      uint32_t to = shared_address(shared.ring[slot]);
      barrier_wait(shared_address(&shared.free[slot]), phase);
      barrier_expect(ready, W_BYTES + (whole ? X_BYTES : max(0, end - tile.row + EDGE - 1) / EDGE * EDGE * DEPTH * 2));
      if constexpr (A::DOWNWARD) {  // 64 columns after 64, of each the upper or the lower half of the depth
        for (int box = 0; box < COLUMNS / BOX; ++box)
          load_for(ALL, &p.value, tile.feature + box * BOX, depth + rank * DEPTH / 2, to + X_BYTES + (2 * box + rank) * BOX * DEPTH, ready);
      } else {
        load_for(ALL, rank == 0 ? &p.value : &p.gate, depth, tile.feature, to + X_BYTES + rank * W_BYTES / 2, ready);
      }
      if (whole) {
        load(&p.x, depth, tile.row, to, ready);
      } else {
#pragma unroll 1
        for (int row = tile.row; row < end; row += EDGE, to += EDGE * DEPTH * 2) load(&p.x_edge, depth, row, to, ready);
      }
      if (++slot == A::STAGES) slot = 0, phase ^= 1;
    }
  }
}

// One thread brings what the epilogue reads, a piece when the one before in the same slots has been read.
template <int EPILOGUE>
__device__ void bring_pieces(const Params& p, Shared<EPILOGUE>& shared, int rank) {
  using A = Of<EPILOGUE>;
  int ahead = 0, phase = 1;
  for (int turn = blockIdx.x / CLUSTER; turn < Tile<A::FEATURES>::count(p); turn += gridDim.x / CLUSTER) {
    const Tile<A::FEATURES> tile(p, turn, rank);
    for (int piece = 0; piece < A::PIECES; ++piece) {
      const uint32_t came = shared_address(&shared.came[ahead]), slot = shared_address(shared.slots[A::WRITES + ahead * A::READS]);
      barrier_wait(shared_address(&shared.taken[ahead]), phase);
      barrier_expect(came, A::READS * SLOT_BYTES);
      const int feature = tile.feature + piece / A::HALVES * A::PIECE, row = tile.row + piece % A::HALVES * A::HEIGHT;
      load(&p.first, feature, row, slot, came);
      if (A::READS > 1) load(&p.second, feature, row, slot + SLOT_BYTES, came);
      if (++ahead == A::AHEAD) ahead = 0, phase ^= 1;
    }
  }
}

// The product of a tile, from the blocks of the ring that begin with number `block`.
template <bool BFLOAT16, int EPILOGUE>
__device__ void multiply(float (&top)[96], float (&bottom)[96], const Params& p, Shared<EPILOGUE>& shared, int block) {
  using A = Of<EPILOGUE>;
  constexpr uint64_t HALF = 64 * DEPTH * 2 >> 4, ALONG = 32 >> 4, ACROSS = 16 * BOX * 2 >> 4;  // to 64 rows, to 16 of the depth
  const int lane = threadIdx.x % 32;
  int slot = block % A::STAGES, phase = block / A::STAGES & 1, last = 0;
  for (int step = 0; step < p.steps; ++step) {
    barrier_wait(shared_address(&shared.ready[slot]), phase);
    const uint32_t stage = shared_address(shared.ring[slot]);
    const uint64_t x = described(stage), w = described(stage + X_BYTES, A::DOWNWARD ? BOX * DEPTH * 2 : 16);
    products_begin();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) {
      const uint64_t of_w = w + k * (A::DOWNWARD ? ACROSS : ALONG);
      product<BFLOAT16, A::DOWNWARD>(top, x + k * ALONG, of_w, step + k);
      product<BFLOAT16, A::DOWNWARD>(bottom, x + HALF + k * ALONG, of_w, step + k);
    }
    products_commit();
    products_wait<1>();
    // The step before this one has read its block: in both thread blocks it may be written.
    if (step > 0 && lane < CLUSTER) barrier_arrive_at(shared_address(&shared.free[last]), lane);
    last = slot;
    if (++slot == A::STAGES) slot = 0, phase ^= 1;
  }
}

// What a group of warps needs to know in an epilogue.
template <int EPILOGUE>
struct Place {
  using A = Of<EPILOGUE>;
  const Params& p;
  Shared<EPILOGUE>& shared;
  const Tile<A::FEATURES>& tile;
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

// Every other tile of this thread block, those of the group with this number.
template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__device__ void consume(const Params& p, Shared<EPILOGUE>& shared, int rank, int group) {
  using A = Of<EPILOGUE>;
  const int thread = threadIdx.x % GROUP, lane = thread % 32, stride = gridDim.x / CLUSTER;
  float top[96], bottom[96];
  if (group == 1) warps_arrive(PRODUCT, 2 * GROUP), warps_arrive(SLOT, 2 * GROUP);  // the first turns are the other's
  int block = group * p.steps, number = group * A::PIECES;
  for (int turn = blockIdx.x / CLUSTER + group * stride; turn < Tile<A::FEATURES>::count(p); turn += 2 * stride) {
    const Tile<A::FEATURES> tile(p, turn, rank);
    if (!A::DOWNWARD && thread < A::FEATURES) {
      const int feature = tile.feature + thread;
      const auto of = [&](const void* bias, int64_t stride) {
        return bias != nullptr && feature < p.hidden ? widened<BFLOAT16>(bias, feature * stride) : 0.0f;
      };
      shared.bias[group][0][thread] = of(p.value_bias, p.value_bias_stride);
      shared.bias[group][1][thread] = of(p.gate_bias, p.gate_bias_stride);
    }
    warps_wait(PRODUCT + group, 2 * GROUP);
    multiply<BFLOAT16>(top, bottom, p, shared, block);
    warps_arrive(PRODUCT + 1 - group, 2 * GROUP);
    products_wait<0>();
    products_are_there(top), products_are_there(bottom);
    if (lane < CLUSTER) barrier_arrive_at(shared_address(&shared.free[(block + p.steps - 1) % A::STAGES]), lane);
    warps_wait(SLOT + group, 2 * GROUP);
    const Place<EPILOGUE> at{p, shared, tile, group};
    if constexpr (A::READS > 0) write_gradient<BFLOAT16, EPILOGUE, ACTIVATION>(top, bottom, at, number);
    else write_outputs<BFLOAT16, EPILOGUE, ACTIVATION>(top, bottom, at);
    if (thread == 0) stores_have_read();
    warps_arrive(SLOT + 1 - group, 2 * GROUP);
    block += 2 * p.steps, number += 2 * A::PIECES;
  }
}

template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(3 * GROUP, 1)
gated_linear_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using A = Of<EPILOGUE>;
  extern __shared__ __align__(1024) char memory[];
  Shared<EPILOGUE>& shared = *reinterpret_cast<Shared<EPILOGUE>*>(memory);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < A::STAGES; ++i) {
      barrier_init(shared_address(&shared.ready[i]), 1);
      barrier_init(shared_address(&shared.free[i]), CLUSTER * GROUP / 32);
    }
    for (int i = 0; i < A::AHEAD; ++i) {
      barrier_init(shared_address(&shared.came[i]), 1);
      barrier_init(shared_address(&shared.taken[i]), GROUP / 32);
    }
    barriers_are_there();
  }
  cluster_wait();
  if (threadIdx.x / GROUP == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 2 * GROUP) bring_operands(p, shared, rank);
    if (A::READS > 0 && threadIdx.x == 2 * GROUP + 32) bring_pieces(p, shared, rank);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume<BFLOAT16, EPILOGUE, ACTIVATION>(p, shared, rank, threadIdx.x / GROUP);
  }
  __syncwarp();
  cluster_wait();  // the other one may still arrive at barriers here
#endif
}

// A kernel behind a product, its shared memory, and how many clusters have something to do.
struct Chosen {
  void (*kernel)(Params);
  size_t shared;
  int (*clusters)(const Params&);
};

// All for a dtype and an activation.
struct Kernels {
  Chosen products[4];  // by epilogue
  void (*kept)(Kept);
};

template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
Chosen chosen() {
  return {gated_linear_kernel<BFLOAT16, EPILOGUE, ACTIVATION>, sizeof(Shared<EPILOGUE>), Tile<Of<EPILOGUE>::FEATURES>::count};
}

template <bool BFLOAT16, int ACTIVATION>
Kernels kernels() {
  return {{chosen<BFLOAT16, Y, ACTIVATION>(), chosen<BFLOAT16, PREACT, ACTIVATION>(), chosen<BFLOAT16, GRADIENT, ACTIVATION>(),
           chosen<BFLOAT16, DOWN, ACTIVATION>()},
          kept_gradient_kernel<BFLOAT16, ACTIVATION>};
}

// Those of a plan, or nulls if this library does not have them: it may be compiled for one dtype and activation.
Kernels kernels_of(const Plan& plan) {
#ifdef FUSEWISE_ACTIVATION
  if (plan.bfloat16 != FUSEWISE_BFLOAT16 || plan.activation != FUSEWISE_ACTIVATION) return {};
  return kernels<FUSEWISE_BFLOAT16, FUSEWISE_ACTIVATION>();
#else
  constexpr Kernels (*ALL[])() = {
      kernels<false, GELU_TANH>, kernels<true, GELU_TANH>, kernels<false, GELU>,     kernels<true, GELU>,
      kernels<false, SILU>,      kernels<true, SILU>,      kernels<false, RELU>,     kernels<true, RELU>,
      kernels<false, SIGMOID>,   kernels<true, SIGMOID>,   kernels<false, IDENTITY>, kernels<true, IDENTITY>,
  };
  return ALL[2 * plan.activation + plan.bfloat16]();
#endif
}

decltype(&cuTensorMapEncodeTiled) encode = nullptr;

// The driver's function that makes descriptors of matrices, by its name: the library is not linked with the driver.
cudaError_t find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const char* name = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
  const auto error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const auto error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error) return error;
  encode = reinterpret_cast<decltype(encode)>(found);
  return found == nullptr ? cudaErrorNotSupported : cudaSuccess;
}

// The descriptor of a matrix in boxes, unless it is null; whether that went well.
bool describe(CUtensorMap* map, const Plan& plan, const void* matrix, int64_t stride, int64_t rows, int64_t columns, int box_rows,
              int box_columns) {
  if (matrix == nullptr) return true;
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[] = {cuuint64_t(stride * 2)};
  const cuuint32_t box[] = {cuuint32_t(box_columns), cuuint32_t(box_rows)}, steps[] = {1, 1};
  const auto type = plan.bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto swizzle = box_columns * 2 == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return encode(map, type, 2, const_cast<void*>(matrix), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

// Make what the plan says on the stream of the current device. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusewise_gated_linear(const Plan* plan, const Call* call, void* stream) {
  const Plan& of = *plan;
  const Call& c = *call;
  const Kernels kernels = kernels_of(of);
  if (kernels.kept == nullptr) return cudaErrorInvalidValue;
  int device, processors;
  if (const auto error = cudaGetDevice(&device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
  const auto on = static_cast<cudaStream_t>(stream);
  if (of.epilogue == KEPT) return launch_kept(kernels.kept, of, c, processors, on);

  const Chosen& found = kernels.products[of.epilogue];
  // Ahead of the descriptors, since it makes the device's context this thread's, without which the driver describes no matrix.
  const int bytes = int(found.shared);
  if (const auto error = cudaFuncSetAttribute(found.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;

  const bool down = of.epilogue == DOWN;
  Params p{};
  p.value_bias = c.value_bias, p.gate_bias = c.gate_bias, p.sums = c.sums;
  p.value_bias_stride = of.value_bias_stride, p.gate_bias_stride = of.gate_bias_stride;
  p.rows = int(of.rows), p.hidden = int(of.hidden), p.steps = int((of.depth + DEPTH - 1) / DEPTH);
  const auto weight = [&](CUtensorMap* map, const void* matrix, int64_t stride) {
    if (down) return describe(map, of, matrix, stride, of.depth, of.hidden, DEPTH / CLUSTER, BOX);
    return describe(map, of, matrix, stride, of.hidden, of.depth, COLUMNS / 2, DEPTH);
  };
  const auto outer = [&](CUtensorMap* map, const void* matrix, int64_t stride) {
    if (down) return describe(map, of, matrix, stride, of.rows, of.hidden, Of<DOWN>::HEIGHT, Of<DOWN>::PIECE);
    return describe(map, of, matrix, stride, of.rows, of.hidden, Of<Y>::HEIGHT, Of<Y>::PIECE);
  };
  if (!describe(&p.x, of, c.x, of.x_stride, of.rows, of.depth, ROWS, DEPTH) ||
      !describe(&p.x_edge, of, c.x, of.x_stride, of.rows, of.depth, EDGE, DEPTH) ||
      !weight(&p.value, c.value, of.value_stride) || !weight(&p.gate, c.gate, of.gate_stride) || !outer(&p.y, c.y, of.y_stride) ||
      !outer(&p.u, c.u, of.u_stride) || !outer(&p.g, c.g, of.g_stride) || !outer(&p.first, c.first, of.first_stride) ||
      !outer(&p.second, c.second, of.second_stride))
    return cudaErrorInvalidValue;

  const int clusters = std::min(found.clusters(p), processors / CLUSTER);
  found.kernel<<<unsigned(clusters * CLUSTER), 3 * GROUP, bytes, on>>>(p);
  if (const auto error = cudaGetLastError()) return error;
  return add_up(of, c, (of.rows + ROWS - 1) / ROWS, on);
}

// Why the kernels cannot run on the current device, as a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusewise_gated_linear_probe() {
  cudaFuncAttributes attributes;
  if (const auto error = find_encode()) return error;
  return cudaFuncGetAttributes(&attributes, add_up_kernel);
}

extern "C" __attribute__((visibility("default"))) const char* fusewise_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
