// The products of the gated linear unit for Hopper, with what is made of them:
//
//     y = u · act(g),   u = x W_valueᵀ + b_value,   g = x W_gateᵀ + b_gate
//     du = dy · act(g),   dg = dy · u · act'(g)
//
// Shape legend: M rows, D features in, F features out. Y, PREACT and GRADIENT are behind the product of x with both weights; DOWN
// is behind dy = dz W_down, with dz (M, D) as x and W_down (D, F). GATE has no product: `gate_gradient.cuh`.
//
// Two thread blocks, a cluster, have a pair of tiles one above the other: 128 rows of x each by 192 columns of the product, which
// are u and g of 96 features, or dy of 192. What both need of the weights is read once for both, a half by each. Where rows are
// few, y may have tiles that lie on their side: `tiles.cuh`; where they are fewer still, FEW streams the weights: `few_rows.cuh`. A
// block's warps have roles: one thread brings blocks of both operands into a ring of shared memory by TMA, another what the
// epilogue reads; two groups of four warps take turns at the tensor cores, a whole tile each, so that the epilogue of one is behind
// the product of the other. An epilogue takes some features at a time: u and g of a feature lie in one thread; what it reads and
// writes passes through slots of shared memory by TMA, which stores nothing beyond the edges of a matrix and loads zeros there.
// Accumulation, bias and gate are in float32, rounded once where they are stored.

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "epilogues.cuh"
#include "few_rows.cuh"
#include "gate_gradient.cuh"
#include "hopper.cuh"
#include "matrices.cuh"
#include "plan.h"
#include "sums.cuh"
#include "tiles.cuh"

namespace {

// Of deep products the tiles of a round read more than the cache holds for long: a cluster that is behind the others would read from
// memory what they had from the cache, and be still later. So a round begins when all are about to end the one before. No result depends
// on it: a cluster that has waited in vain, since others have no multiprocessor yet, waits no more.
class Pace {
  unsigned* count;
  unsigned due = 0;

 public:
  __device__ Pace(const Params& p, int rank) : count(rank == 0 ? p.pace : nullptr) {}  // the other block of a cluster waits for the first
  __device__ void nearly_there() {
    if (count != nullptr) count_up(count), due += gridDim.x / CLUSTER;
  }
  __device__ void wait() {
    if (count != nullptr && due > 0 && !counted(count, due)) count = nullptr;
  }
};

// One thread fills the ring, tile after tile, as far ahead of the products as it is long.
template <int EPILOGUE>
__device__ void bring_operands(const Params& p, Shared<EPILOGUE>& shared, int rank) {
  using A = Of<EPILOGUE>;
  constexpr uint16_t ALL = (1 << CLUSTER) - 1;
  int slot = 0, phase = 1;  // the ring is free at first: a wait for the round before passes
  Pace pace(p, rank);
  const int nearly = max(0, p.steps - EARLY) * DEPTH;
  for (int turn = blockIdx.x / CLUSTER; turn < Tile<EPILOGUE>::count(p); turn += gridDim.x / CLUSTER) {
    const Tile<EPILOGUE> tile(p, turn, rank);
    // Rows of x that are not there would take longer than those that are. What lies in their place is for rows of no output.
    const bool whole = tile.row + A::HIGH - EDGE < p.rows;
    const int there = whole ? A::HIGH : max(0, p.rows - tile.row + EDGE - 1) / EDGE * EDGE, x_bytes = there * DEPTH * 2;
    // Sideways x is on the right, of which each block brings one half for both.
    constexpr int EACH = A::SIDEWAYS ? A::HIGH / CLUSTER : A::HIGH;
    const int first = A::SIDEWAYS ? rank * EACH : 0, end = min(there, first + EACH);
    pace.wait();
    for (int depth = 0; depth < p.steps * DEPTH; depth += DEPTH) {
      if (depth == nearly) pace.nearly_there();
      const uint32_t ready = shared_address(&shared.ready[slot]), left = shared_address(shared.ring[slot]), right = left + LEFT_BYTES;
      const uint32_t x = A::SIDEWAYS ? right : left;
      barrier_wait(shared_address(&shared.free[slot]), phase);
      barrier_expect(ready, x_bytes + (A::SIDEWAYS ? LEFT_BYTES : A::RIGHT_BYTES));
      if constexpr (A::DOWNWARD) {  // 64 columns after 64, of each the upper or the lower half of the depth
        for (int box = 0; box < A::COLUMNS / BOX; ++box)
          load_for(ALL, &p.value, tile.feature + box * BOX, depth + rank * DEPTH / 2, right + (2 * box + rank) * BOX * DEPTH, ready);
      } else if constexpr (A::SIDEWAYS) {
        load(&p.value, depth, tile.feature, left, ready), load(&p.gate, depth, tile.feature, left + LEFT_BYTES / 2, ready);
      } else {
        load_for(ALL, rank == 0 ? &p.value : &p.gate, depth, tile.feature, right + rank * A::RIGHT_BYTES / 2, ready);
      }
      const auto bring = [&](const CUtensorMap* map, int row) {
        if constexpr (A::SIDEWAYS) load_for(ALL, map, depth, tile.row + row, x + row * DEPTH * 2, ready);
        else load(map, depth, tile.row + row, x + row * DEPTH * 2, ready);
      };
      if (whole) {
        bring(&p.x, first);
      } else {
#pragma unroll 1
        for (int row = first; row < end; row += EDGE) bring(&p.x_edge, row);
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
  for (int turn = blockIdx.x / CLUSTER; turn < Tile<EPILOGUE>::count(p); turn += gridDim.x / CLUSTER) {
    const Tile<EPILOGUE> tile(p, turn, rank);
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
__device__ void multiply(float (&top)[Of<EPILOGUE>::COLUMNS / 2], float (&bottom)[Of<EPILOGUE>::COLUMNS / 2], const Params& p,
                         Shared<EPILOGUE>& shared, int block) {
  using A = Of<EPILOGUE>;
  constexpr uint64_t HALF = 64 * DEPTH * 2 >> 4, ALONG = 32 >> 4, ACROSS = 16 * BOX * 2 >> 4;  // to 64 rows, to 16 of the depth
  const int lane = threadIdx.x % 32;
  int slot = block % A::STAGES, phase = block / A::STAGES & 1, last = 0;
  for (int step = 0; step < p.steps; ++step) {
    barrier_wait(shared_address(&shared.ready[slot]), phase);
    const uint32_t stage = shared_address(shared.ring[slot]);
    const uint64_t left = described(stage), right = described(stage + LEFT_BYTES, A::DOWNWARD ? BOX * DEPTH * 2 : 16);
    products_begin();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) {
      const uint64_t of_right = right + k * (A::DOWNWARD ? ACROSS : ALONG);
      product<BFLOAT16, A::DOWNWARD>(top, left + k * ALONG, of_right, step + k);
      product<BFLOAT16, A::DOWNWARD>(bottom, left + HALF + k * ALONG, of_right, step + k);
    }
    products_commit();
    products_wait<1>();
    // The step before this one has read its block: in both thread blocks it may be written.
    if (step > 0 && lane < CLUSTER) barrier_arrive_at(shared_address(&shared.free[last]), lane);
    last = slot;
    if (++slot == A::STAGES) slot = 0, phase ^= 1;
  }
}

// Every other tile of this thread block, those of the group with this number.
template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__device__ void consume(const Params& p, Shared<EPILOGUE>& shared, int rank, int group) {
  using A = Of<EPILOGUE>;
  const int thread = threadIdx.x % GROUP, lane = thread % 32, stride = gridDim.x / CLUSTER;
  float top[A::COLUMNS / 2], bottom[A::COLUMNS / 2];
  if (group == 1) warps_arrive(PRODUCT, 2 * GROUP), warps_arrive(SLOT, 2 * GROUP);  // the first turns are the other's
  int block = group * p.steps, number = group * A::PIECES;
  for (int turn = blockIdx.x / CLUSTER + group * stride; turn < Tile<EPILOGUE>::count(p); turn += 2 * stride) {
    const Tile<EPILOGUE> tile(p, turn, rank);
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
    else if constexpr (A::SIDEWAYS) write_sideways<BFLOAT16, EPILOGUE, ACTIVATION>(top, bottom, at);
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
  auto& shared = shared_memory<Shared<EPILOGUE>>();
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
    fewer_registers<24>();
    if (threadIdx.x == 2 * GROUP) bring_operands(p, shared, rank);
    if (A::READS > 0 && threadIdx.x == 2 * GROUP + 32) bring_pieces(p, shared, rank);
  } else {
    more_registers<240>();
    consume<BFLOAT16, EPILOGUE, ACTIVATION>(p, shared, rank, threadIdx.x / GROUP);
  }
  __syncwarp();
  cluster_wait();  // the other one may still arrive at barriers here
#endif
}

// Numbers by which the clusters of a launch keep together, of launches one after the other: some may run at once.
__device__ unsigned paces[64];

// One of them, zeroed on the stream.
cudaError_t next_pace(unsigned*& pace, cudaStream_t on) {
  static std::atomic<unsigned> launches;
  void* all;
  if (const auto error = cudaGetSymbolAddress(&all, paces)) return error;
  pace = static_cast<unsigned*>(all) + launches++ % (sizeof(paces) / sizeof(*paces));
  return cudaMemsetAsync(pace, 0, sizeof(*pace), on);
}

// A kernel behind a product: its shared memory, how many clusters have something to do, and the boxes of matrices that it asks for,
// rows of x, of a weight, and rows and columns of what epilogues read and write.
struct Chosen {
  void (*kernel)(Params);
  size_t shared;
  int (*clusters)(const Params&);
  int x_box, weight_box, height, piece;
};

// All for a dtype and an activation.
struct Kernels {
  Chosen products[7];  // by epilogue
  void (*gate_gradient)(GateGradient);
  cudaError_t (*launch_few_rows)(const Plan&, const Call&, int processors, cudaStream_t);
};

template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
Chosen chosen() {
  using A = Of<EPILOGUE>;
  const auto kernel = gated_linear_kernel<BFLOAT16, EPILOGUE, ACTIVATION>;
  const int x_box = A::SIDEWAYS ? A::HIGH / CLUSTER : A::HIGH, weight_box = A::DOWNWARD ? DEPTH / CLUSTER : A::FEATURES;
  return {kernel, sizeof(Shared<EPILOGUE>), Tile<EPILOGUE>::count, x_box, weight_box, A::HEIGHT, A::PIECE};
}

template <bool BFLOAT16, int ACTIVATION>
Kernels kernels() {
  return {{chosen<BFLOAT16, Y, ACTIVATION>(), chosen<BFLOAT16, PREACT, ACTIVATION>(), chosen<BFLOAT16, GRADIENT, ACTIVATION>(),
           chosen<BFLOAT16, DOWN, ACTIVATION>(), chosen<BFLOAT16, SIDE_192, ACTIVATION>(), chosen<BFLOAT16, SIDE_160, ACTIVATION>(),
           chosen<BFLOAT16, SIDE_128, ACTIVATION>()},
          gate_gradient_kernel<BFLOAT16, ACTIVATION>, launch_few_rows<BFLOAT16, ACTIVATION>};
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

}  // namespace

// Make what the plan says on the stream of the current device. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusewise_gated_linear(const Plan* plan, const Call* call, void* stream) {
  const Plan& of = *plan;
  const Call& c = *call;
  const Kernels kernels = kernels_of(of);
  if (kernels.gate_gradient == nullptr) return cudaErrorInvalidValue;
  int device, processors;
  if (const auto error = cudaGetDevice(&device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
  const auto on = static_cast<cudaStream_t>(stream);
  if (of.epilogue == GATE) return launch_gate_gradient(kernels.gate_gradient, of, c, processors, on);
  if (of.epilogue == FEW) return kernels.launch_few_rows(of, c, processors, on);

  Params p{};
  p.value_bias = c.value_bias, p.gate_bias = c.gate_bias, p.sums = c.sums;
  p.value_bias_stride = of.value_bias_stride, p.gate_bias_stride = of.gate_bias_stride;
  p.rows = int(of.rows), p.hidden = int(of.hidden), p.steps = int((of.depth + DEPTH - 1) / DEPTH);
  const Chosen& found = kernels.products[of.epilogue];
  // Ahead of the descriptors, since it makes the device's context this thread's, without which the driver describes no matrix.
  const int bytes = int(found.shared);
  if (const auto error = cudaFuncSetAttribute(found.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;

  const auto weight = [&](CUtensorMap* map, const void* matrix, int64_t stride) {
    if (of.epilogue == DOWN) return describe(map, of, matrix, stride, of.depth, of.hidden, found.weight_box, BOX);
    return describe(map, of, matrix, stride, of.hidden, of.depth, found.weight_box, DEPTH);
  };
  const auto outer = [&](CUtensorMap* map, const void* matrix, int64_t stride) {
    return describe(map, of, matrix, stride, of.rows, of.hidden, found.height, found.piece);
  };
  if (!describe(&p.x, of, c.x, of.x_stride, of.rows, of.depth, found.x_box, DEPTH) ||
      !describe(&p.x_edge, of, c.x, of.x_stride, of.rows, of.depth, EDGE, DEPTH) ||
      !weight(&p.value, c.value, of.value_stride) || !weight(&p.gate, c.gate, of.gate_stride) || !outer(&p.y, c.y, of.y_stride) ||
      !outer(&p.u, c.u, of.u_stride) || !outer(&p.g, c.g, of.g_stride) || !outer(&p.first, c.first, of.first_stride) ||
      !outer(&p.second, c.second, of.second_stride))
    return cudaErrorInvalidValue;

  const int tiles = found.clusters(p), clusters = std::min(tiles, processors / CLUSTER);
  const bool together = of.epilogue <= DOWN && p.steps >= DEEP && tiles > (ROUNDS - 1) * clusters;
  p.group = together ? 8 : 16;  // what a round of tiles reads is least if that is as high as wide
  if (together)
    if (const auto error = next_pace(p.pace, on)) return error;
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
