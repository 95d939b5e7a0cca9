// The products of the gated linear unit for Hopper, with what is made of them:
//
//     y = u · act(g),   u = x W_valueᵀ + b_value,   g = x W_gateᵀ + b_gate
//     du = dy · act(g),   dg = dy · u · act'(g)
//
// Shape legend: M rows, D features in, F features out. Y, PREACT and GRADIENT are behind the product of x with both weights; DOWN
// is behind dy = dz W_down, with dz (M, D) as x and W_down (D, F). GATE has no product: `gate_gradient.cuh`.
//
// A persistent, warp-specialized kernel. A cluster of two thread blocks computes a pair of tiles, one above the other: 128 rows of x by
// 192 columns of the product each, which are u and g of 96 features, or dy of 192. Each block loads half of the weight tile and
// multicasts it to both. For few rows of x there are other tile shapes (`tiles.cuh`), and up to 160 rows FEW streams the weights
// (`few_rows.cuh`).
//
// Warp roles: a producer thread fills a ring of shared-memory stages with both operands by TMA; a second one loads what the epilogue
// reads; two consumer warpgroups alternate (ping-pong), a whole tile each, so that the epilogue of one overlaps the main loop of the
// other. The epilogue processes a few features at a time: u and g of a feature are in the same thread, and outputs go through
// shared memory to TMA stores, which clip at the matrix edges; TMA loads fill with zeros there. Accumulators, bias and gate are float32,
// rounded once when they are stored.

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "epilogues.cuh"
#include "gate_gradient.cuh"
#include "hopper.cuh"
#include "matrices.cuh"
#include "plan.h"
#include "sums.cuh"
#include "tiles.cuh"

#ifdef FUSEWISE_PARTS
cudaError_t fusewise_few_rows(const Plan&, const Call&, int processors, cudaStream_t);  // few_rows.cu
#else
#include "few_rows.cuh"
#endif

namespace {

// Keeps the clusters of a wave in step. With a large reduction dimension the tiles of a wave read more than L2 retains: a cluster that
// falls behind misses in L2 on operands that the others hit, reads them from DRAM and falls further behind. So clusters begin a wave
// together, once all of them are close to the end of the previous one. It is a performance hint only, no result depends on it: a cluster
// that times out, because others are not resident yet, stops waiting.
class WaveSync {
  unsigned* count;
  unsigned due = 0;

 public:
  __device__ WaveSync(const Params& p, int rank) : count(rank == 0 ? p.wave_counter : nullptr) {}  // block 1 depends on block 0's multicast
  __device__ void arrive() {
    if (count != nullptr) atomic_increment(count), due += gridDim.x / CLUSTER;
  }
  __device__ void wait() {
    if (count != nullptr && due > 0 && !wait_for_count(count, due)) count = nullptr;
  }
};

// The producer thread: fills the ring for tile after tile, running ahead of the consumers by up to its length.
template <int EPILOGUE>
__device__ void produce_operands(const Params& p, Shared<EPILOGUE>& shared, int rank) {
  using A = Traits<EPILOGUE>;
  constexpr uint16_t ALL = (1 << CLUSTER) - 1;
  int slot = 0, phase = 1;  // the stages start free: the first wait, for the previous phase, returns at once
  WaveSync wave(p, rank);
  const int near_end = max(0, p.steps - SYNC_EARLY) * DEPTH;
  for (int turn = blockIdx.x / CLUSTER; turn < Tile<EPILOGUE>::count(p); turn += gridDim.x / CLUSTER) {
    const Tile<EPILOGUE> tile(p, turn, rank);
    // Out-of-bounds rows take TMA longer than rows that exist, so a tile that x fills in part has smaller boxes; the stale data below them
    // only reaches rows that are not stored. SIDEWAYS, x is the right operand: each block loads half of it and multicasts that to both.
    const int there = p.rows - tile.row;
    const bool whole = there >= A::HIGH;
    const CUtensorMap* map = whole ? &p.x : &p.x_edge;
    const int box_bytes = there > 0 ? (whole ? A::HIGH / A::SHARING : p.edge) * DEPTH * 2 : 0;
    wave.wait();
    for (int depth = 0; depth < p.steps * DEPTH; depth += DEPTH) {
      if (depth == near_end) wave.arrive();
      const uint32_t ready = smem_address(&shared.ready[slot]), left = smem_address(shared.ring[slot]), right = left + LEFT_BYTES;
      const uint32_t x = A::SIDEWAYS ? right : left;
      mbarrier_wait(smem_address(&shared.free[slot]), phase);
      mbarrier_arrive_expect_tx(ready, A::SHARING * box_bytes + (A::SIDEWAYS ? LEFT_BYTES : A::RIGHT_BYTES));
      if constexpr (A::DOWNWARD) {  // in boxes of 64 columns; each block loads the upper or lower half of the depth
        for (int box = 0; box < A::COLUMNS / BOX; ++box)
          tma_load_multicast(ALL, &p.value, tile.feature + box * BOX, depth + rank * DEPTH / 2, right + (2 * box + rank) * BOX * DEPTH,
                             ready);
      } else if constexpr (A::SIDEWAYS) {
        tma_load(&p.value, depth, tile.feature, left, ready), tma_load(&p.gate, depth, tile.feature, left + LEFT_BYTES / 2, ready);
      } else {
        tma_load_multicast(ALL, rank == 0 ? &p.value : &p.gate, depth, tile.feature, right + rank * A::RIGHT_BYTES / 2, ready);
      }
      if constexpr (A::SIDEWAYS)
        tma_load_multicast(ALL, map, depth, tile.row + rank * box_bytes / (DEPTH * 2), x + rank * box_bytes, ready);
      else if (there > 0) tma_load(map, depth, tile.row, x, ready);
      if (++slot == A::STAGES) slot = 0, phase ^= 1;
    }
  }
}

// The epilogue's producer thread: loads a piece of its inputs once the previous piece in the same slots has been consumed.
template <int EPILOGUE>
__device__ void produce_epilogue_inputs(const Params& p, Shared<EPILOGUE>& shared, int rank) {
  using A = Traits<EPILOGUE>;
  int ahead = 0, phase = 1;
  for (int turn = blockIdx.x / CLUSTER; turn < Tile<EPILOGUE>::count(p); turn += gridDim.x / CLUSTER) {
    const Tile<EPILOGUE> tile(p, turn, rank);
    for (int piece = 0; piece < A::PIECES; ++piece) {
      const uint32_t ready = smem_address(&shared.inputs_ready[ahead]), slot = smem_address(shared.slots[A::WRITES + ahead * A::READS]);
      mbarrier_wait(smem_address(&shared.inputs_free[ahead]), phase);
      mbarrier_arrive_expect_tx(ready, A::READS * SLOT_BYTES);
      const int feature = tile.feature + piece / A::HALVES * A::PIECE, row = tile.row + piece % A::HALVES * A::HEIGHT;
      tma_load(&p.first, feature, row, slot, ready);
      if (A::READS > 1) tma_load(&p.second, feature, row, slot + SLOT_BYTES, ready);
      if (++ahead == A::AHEAD) ahead = 0, phase ^= 1;
    }
  }
}

// The main loop of a tile; its first stage is number `block` of all that went through the ring.
template <bool BFLOAT16, int EPILOGUE>
__device__ void mainloop(float (&top)[Traits<EPILOGUE>::COLUMNS / 2], float (&bottom)[Traits<EPILOGUE>::COLUMNS / 2], const Params& p,
                         Shared<EPILOGUE>& shared, int block) {
  using A = Traits<EPILOGUE>;
  constexpr uint64_t HALF = 64 * DEPTH * 2 >> 4, ALONG = 32 >> 4, ACROSS = 16 * BOX * 2 >> 4;  // to 64 rows, to 16 of the depth
  const int lane = threadIdx.x % 32;
  int slot = block % A::STAGES, phase = block / A::STAGES & 1, last = 0;
  for (int step = 0; step < p.steps; ++step) {
    mbarrier_wait(smem_address(&shared.ready[slot]), phase);
    const uint32_t stage = smem_address(shared.ring[slot]);
    const uint64_t left = matrix_descriptor(stage), right = matrix_descriptor(stage + LEFT_BYTES, A::DOWNWARD ? BOX * DEPTH * 2 : 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) {
      const uint64_t of_right = right + k * (A::DOWNWARD ? ACROSS : ALONG);
      wgmma<BFLOAT16, A::DOWNWARD>(top, left + k * ALONG, of_right, step + k);
      wgmma<BFLOAT16, A::DOWNWARD>(bottom, left + HALF + k * ALONG, of_right, step + k);
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();
    // The previous step's wgmmas are done: release its stage in both thread blocks.
    if (step > 0 && lane < CLUSTER) mbarrier_arrive_cluster(smem_address(&shared.free[last]), lane);
    last = slot;
    if (++slot == A::STAGES) slot = 0, phase ^= 1;
  }
}

// A consumer warpgroup: every other tile of this thread block.
template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__device__ void consume(const Params& p, Shared<EPILOGUE>& shared, int rank, int group) {
  using A = Traits<EPILOGUE>;
  const int thread = threadIdx.x % GROUP, lane = thread % 32, stride = gridDim.x / CLUSTER;
  float top[A::COLUMNS / 2], bottom[A::COLUMNS / 2];
  if (group == 1) named_barrier_arrive(PRODUCT, 2 * GROUP), named_barrier_arrive(SLOT, 2 * GROUP);  // group 0 goes first
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
    named_barrier_sync(PRODUCT + group, 2 * GROUP);
    mainloop<BFLOAT16>(top, bottom, p, shared, block);
    named_barrier_arrive(PRODUCT + 1 - group, 2 * GROUP);
    wgmma_wait_group<0>();
    wgmma_fence_operand(top), wgmma_fence_operand(bottom);
    if (lane < CLUSTER) mbarrier_arrive_cluster(smem_address(&shared.free[(block + p.steps - 1) % A::STAGES]), lane);
    named_barrier_sync(SLOT + group, 2 * GROUP);
    const EpilogueContext<EPILOGUE> at{p, shared, tile, group};
    if constexpr (A::READS > 0) write_gradient<BFLOAT16, EPILOGUE, ACTIVATION>(top, bottom, at, number);
    else if constexpr (A::SIDEWAYS) write_sideways<BFLOAT16, EPILOGUE, ACTIVATION>(top, bottom, at);
    else write_outputs<BFLOAT16, EPILOGUE, ACTIVATION>(top, bottom, at);
    if (thread == 0) tma_store_wait_read();
    named_barrier_arrive(SLOT + 1 - group, 2 * GROUP);
    block += 2 * p.steps, number += 2 * A::PIECES;
  }
}

template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(3 * GROUP, 1)
gated_linear_kernel(const __grid_constant__ Params p) {
  static_assert(sizeof(Shared<EPILOGUE>) <= MOST);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using A = Traits<EPILOGUE>;
  auto& shared = shared_memory<Shared<EPILOGUE>>();
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < A::STAGES; ++i) {
      mbarrier_init(smem_address(&shared.ready[i]), 1);
      mbarrier_init(smem_address(&shared.free[i]), CLUSTER * GROUP / 32);
    }
    for (int i = 0; i < A::AHEAD; ++i) {
      mbarrier_init(smem_address(&shared.inputs_ready[i]), 1);
      mbarrier_init(smem_address(&shared.inputs_free[i]), GROUP / 32);
    }
    fence_mbarrier_init();
  }
  cluster_sync();
  if (threadIdx.x / GROUP == 2) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == 2 * GROUP) produce_operands(p, shared, rank);
    if (A::READS > 0 && threadIdx.x == 2 * GROUP + 32) produce_epilogue_inputs(p, shared, rank);
  } else {
    setmaxnreg_inc<240>();
    consume<BFLOAT16, EPILOGUE, ACTIVATION>(p, shared, rank, threadIdx.x / GROUP);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive at barriers in this one's shared memory
#endif
}

// Counters for `WaveSync`, used in turn since launches on several streams may overlap.
__device__ unsigned wave_counters[64];

// The next counter, zeroed on the stream.
cudaError_t next_wave_counter(unsigned*& counter, cudaStream_t on) {
  static std::atomic<unsigned> launches;
  void* all;
  if (const auto error = cudaGetSymbolAddress(&all, wave_counters)) return error;
  counter = static_cast<unsigned*>(all) + launches++ % (sizeof(wave_counters) / sizeof(*wave_counters));
  return cudaMemsetAsync(counter, 0, sizeof(*counter), on);
}

// An instantiated kernel: its shared memory, the number of cluster tiles, rows of x in a tile and how many blocks share them, and the
// sizes of its TMA boxes (rows of a weight; rows and columns of what the epilogue reads and writes).
struct Chosen {
  void (*kernel)(Params);
  size_t shared;
  int (*clusters)(const Params&);
  int high, sharing, weight_box, height, piece;
};

// All kernels for a dtype and an activation.
struct Kernels {
  Chosen products[9];  // by epilogue
  void (*gate_gradient)(GateGradient);
  cudaError_t (*launch_few_rows)(const Plan&, const Call&, int processors, cudaStream_t);
};

template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
Chosen chosen() {
  using A = Traits<EPILOGUE>;
  const auto kernel = gated_linear_kernel<BFLOAT16, EPILOGUE, ACTIVATION>;
  const int weight_box = A::DOWNWARD ? DEPTH / CLUSTER : A::FEATURES;
  return {kernel, sizeof(Shared<EPILOGUE>), Tile<EPILOGUE>::count, A::HIGH, A::SHARING, weight_box, A::HEIGHT, A::PIECE};
}

template <bool BFLOAT16, int ACTIVATION>
Kernels kernels() {
#ifdef FUSEWISE_PARTS
  const auto few_rows = fusewise_few_rows;
#else
  const auto few_rows = launch_few_rows<BFLOAT16, ACTIVATION>;
#endif
  return {{chosen<BFLOAT16, Y, ACTIVATION>(), chosen<BFLOAT16, PREACT, ACTIVATION>(), chosen<BFLOAT16, GRADIENT, ACTIVATION>(),
           chosen<BFLOAT16, DOWN, ACTIVATION>(), chosen<BFLOAT16, SIDE_208, ACTIVATION>(), chosen<BFLOAT16, SIDE_192, ACTIVATION>(),
           chosen<BFLOAT16, SIDE_160, ACTIVATION>(), chosen<BFLOAT16, SIDE_144, ACTIVATION>(), chosen<BFLOAT16, SIDE_128, ACTIVATION>()},
          gate_gradient_kernel<BFLOAT16, ACTIVATION>, few_rows};
}

// The kernels for a plan, or nulls if this library lacks them: it may be compiled for a single dtype and activation.
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

// Launches what the plan says on a stream of the current device. Returns a cudaError_t.
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
  // Before the descriptors are encoded: it binds the device's primary context to this thread, without which the driver encodes none.
  const int bytes = int(found.shared);
  if (const auto error = cudaFuncSetAttribute(found.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;

  const auto weight = [&](CUtensorMap* map, const void* matrix, int64_t stride) {
    if (of.epilogue == DOWN) return describe(map, of, matrix, stride, of.depth, of.hidden, found.weight_box, BOX);
    return describe(map, of, matrix, stride, of.hidden, of.depth, found.weight_box, DEPTH);
  };
  const auto outer = [&](CUtensorMap* map, const void* matrix, int64_t stride) {
    return describe(map, of, matrix, stride, of.rows, of.hidden, found.height, found.piece);
  };
  p.edge = std::max(1, (p.rows % found.high + 8 * found.sharing - 1) / (8 * found.sharing)) * 8;
  if (!describe(&p.x, of, c.x, of.x_stride, of.rows, of.depth, found.high / found.sharing, DEPTH) ||
      !describe(&p.x_edge, of, c.x, of.x_stride, of.rows, of.depth, p.edge, DEPTH) ||
      !weight(&p.value, c.value, of.value_stride) || !weight(&p.gate, c.gate, of.gate_stride) || !outer(&p.y, c.y, of.y_stride) ||
      !outer(&p.u, c.u, of.u_stride) || !outer(&p.g, c.g, of.g_stride) || !outer(&p.first, c.first, of.first_stride) ||
      !outer(&p.second, c.second, of.second_stride))
    return cudaErrorInvalidValue;

  const int tiles = found.clusters(p), clusters = std::min(tiles, processors / CLUSTER);
  if (of.epilogue <= DOWN && p.steps >= SYNC_STEPS && tiles > (SYNC_WAVES - 1) * clusters)
    if (const auto error = next_wave_counter(p.wave_counter, on)) return error;
  found.kernel<<<unsigned(clusters * CLUSTER), 3 * GROUP, bytes, on>>>(p);
  if (const auto error = cudaGetLastError()) return error;
  return add_up(of, c, (of.rows + ROWS - 1) / ROWS, on);
}

// A cudaError_t that says why the kernels cannot run on the current device.
extern "C" __attribute__((visibility("default"))) int fusewise_gated_linear_probe() {
  cudaFuncAttributes attributes;
  if (const auto error = find_encode()) return error;
  return cudaFuncGetAttributes(&attributes, add_up_kernel);
}

extern "C" __attribute__((visibility("default"))) const char* fusewise_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
