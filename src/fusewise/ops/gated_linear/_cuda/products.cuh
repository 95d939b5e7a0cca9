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
// multicasts it to both. For few rows of x there are other tile shapes (`tiles.cuh`), and up to 208 rows FEW may stream the weights
// (`few_rows.cuh`).
//
// Warp roles: a producer thread fills a ring of shared-memory stages with both operands by TMA; a second one loads what the epilogue
// reads; two consumer warpgroups alternate (ping-pong), a whole tile each, so that the epilogue of one overlaps the main loop of the
// other. The epilogue processes a few features at a time: u and g of a feature are in the same thread, and outputs go through
// shared memory to TMA stores, which clip at the matrix edges; TMA loads fill with zeros there. Accumulators, bias and gate are float32,
// rounded once when they are stored.

#pragma once

#include <cuda_runtime.h>

#include "epilogues.cuh"
#include "hopper.cuh"
#include "plan.h"
#include "tiles.cuh"
#include "wgmma.cuh"

// An instantiated kernel: its shared memory, the distances between the tiles of neighbouring clusters, rows of x in a tile and how many
// blocks share them, the sizes of its TMA boxes (rows of a weight; rows and columns of what the epilogue reads and writes), the depth of
// a k-step, and whether it is of float32 matrices.
struct Product {
  void (*kernel)(Params);
  size_t shared;
  int down_step, across_step, high, sharing, weight_box, height, piece, step;
  bool tf32;
};

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
  const int near_end = max(0, p.steps - SYNC_EARLY) * A::STEP;
  for (int turn = blockIdx.x / CLUSTER; turn < p.turns; turn += gridDim.x / CLUSTER) {
    const Tile<EPILOGUE> tile(p, turn, rank);
    // Out-of-bounds rows take TMA longer than rows that exist, so a tile that x fills in part has smaller boxes; the stale data below them
    // only reaches rows that are not stored. SIDEWAYS, x is the right operand, of both blocks: each loads a box of it, or in half a tile
    // the only one at every other step, and multicasts that to both.
    const CUtensorMap* x_map = tile.full ? &p.x : &p.x_edge;
    const bool halved = tile.half >= 0, there = A::SIDEWAYS || tile.row < p.rows;
    const int box_bytes = there ? tile.box * DEPTH_BYTES : 0, x_bytes = A::SIDEWAYS && !halved ? CLUSTER * box_bytes : box_bytes;
    const int second = A::SIDEWAYS && !halved ? rank : 0;
    wave.wait();
    for (int depth = 0; depth < p.steps * A::STEP; depth += A::STEP) {
      if (depth == near_end) wave.arrive();
      const uint32_t ready = smem_address(&shared.ready[slot]), left = smem_address(shared.ring[slot]), right = left + LEFT_BYTES;
      const uint32_t x = A::SIDEWAYS ? right : left;
      mbarrier_wait(smem_address(&shared.free[slot]), phase);
      mbarrier_arrive_expect_tx(ready, x_bytes + (A::SIDEWAYS ? LEFT_BYTES : A::RIGHT_BYTES));
      if constexpr (A::DOWNWARD) {  // in boxes of 64 columns; each block loads the upper or lower half of the depth
        for (int box = 0; box < A::COLUMNS / BOX; ++box)
          tma_load_multicast(ALL, &p.value, tile.feature + box * BOX, depth + rank * DEPTH / 2, right + (2 * box + rank) * BOX * DEPTH,
                             ready);
      } else if constexpr (A::SIDEWAYS) {
        tma_load(&p.value, depth, tile.feature, left, ready), tma_load(&p.gate, depth, tile.feature, left + LEFT_BYTES / 2, ready);
      } else {
        tma_load_multicast(ALL, rank == 0 ? &p.value : &p.gate, depth, tile.feature, right + rank * A::RIGHT_BYTES / 2, ready);
      }
      if constexpr (A::SIDEWAYS) {
        if (!halved || depth / A::STEP % CLUSTER == rank)
          tma_load_multicast(ALL, x_map, depth, tile.row + second * tile.box, x + second * box_bytes, ready);
      } else if (there) {
        tma_load(x_map, depth, tile.row, x, ready);
      }
      if (++slot == A::STAGES) slot = 0, phase ^= 1;
    }
  }
}

// The epilogue's producer thread, one for each owner of slots: loads a piece of its inputs once the previous piece in the same slots has
// been consumed.
template <int EPILOGUE>
__device__ void produce_epilogue_inputs(const Params& p, Shared<EPILOGUE>& shared, int rank, int owner) {
  using A = Traits<EPILOGUE>;
  const int stride = gridDim.x / CLUSTER;
  int ahead = 0, phase = 1;
  for (int turn = blockIdx.x / CLUSTER + owner * stride; turn < p.turns; turn += A::OWNERS * stride) {
    const Tile<EPILOGUE> tile(p, turn, rank);
    for (int piece = 0; piece < A::PIECES; ++piece) {
      const uint32_t ready = smem_address(&shared.inputs_ready[owner][ahead]);
      const uint32_t slot = smem_address(shared.slots[owner][A::WRITES * A::BUFFERS + ahead * A::READS]);
      mbarrier_wait(smem_address(&shared.inputs_free[owner][ahead]), phase);
      mbarrier_arrive_expect_tx(ready, A::READS * A::PIECE_BYTES);
      const int feature = tile.feature + piece / A::HALVES * A::PIECE, row = tile.row + piece % A::HALVES * A::HEIGHT;
      tma_load(&p.first, feature, row, slot, ready);
      if (A::READS > 1) tma_load(&p.second, feature, row, slot + A::PIECE_BYTES, ready);
      if (++ahead == A::AHEAD) ahead = 0, phase ^= 1;
    }
  }
}

// The main loop of a tile, or of half of one; its first stage is number `block` of all that went through the ring.
template <bool BFLOAT16, int EPILOGUE, int N>
__device__ __forceinline__ void mainloop(float (&top)[N], float (&bottom)[N], const Params& p, Shared<EPILOGUE>& shared, int block) {
  using A = Traits<EPILOGUE>;
  constexpr uint64_t HALF = 64 * DEPTH_BYTES >> 4, ALONG = 32 >> 4, ACROSS = 16 * BOX * 2 >> 4;  // to 64 rows, to the depth of a wgmma
  const int lane = threadIdx.x % 32;
  int slot = block % A::STAGES, phase = block / A::STAGES & 1, last = 0;
  for (int step = 0; step < p.steps; ++step) {
    mbarrier_wait(smem_address(&shared.ready[slot]), phase);
    const uint32_t stage = smem_address(shared.ring[slot]);
    const uint64_t left = matrix_descriptor(stage), right = matrix_descriptor(stage + LEFT_BYTES, A::DOWNWARD ? BOX * DEPTH * 2 : 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH_BYTES / 32; ++k) {
      const uint64_t of_left = left + k * ALONG, of_right = right + k * (A::DOWNWARD ? ACROSS : ALONG);
      if constexpr (A::TF32) {
        wgmma_tf32(top, of_left, of_right, step + k), wgmma_tf32(bottom, of_left + HALF, of_right, step + k);
      } else {
        wgmma<BFLOAT16, A::DOWNWARD>(top, of_left, of_right, step + k);
        wgmma<BFLOAT16, A::DOWNWARD>(bottom, of_left + HALF, of_right, step + k);
      }
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();
    // The previous step's wgmmas are done: release its stage in both thread blocks.
    if (step > 0 && lane < CLUSTER) mbarrier_arrive_cluster(smem_address(&shared.free[last]), lane);
    last = slot;
    if (++slot == A::STAGES) slot = 0, phase ^= 1;
  }
}

// A tile, or half of one, with 2 N columns of the product. `block` counts the stages of all tiles of this thread block, `number` the pieces
// of those whose slots its warpgroup has.
template <int N, bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__device__ __forceinline__ void compute(const Params& p, Shared<EPILOGUE>& shared, const Tile<EPILOGUE>& tile, int group, int block,
                                        int number) {
  using A = Traits<EPILOGUE>;
  const int thread = threadIdx.x % GROUP, lane = thread % 32;
  float top[N], bottom[N];
  if constexpr (A::SIDEWAYS) {  // else ptxas takes the registers of whole tiles and of halves to be in use at once
#pragma unroll
    for (int i = 0; i < N; ++i) top[i] = bottom[i] = 0.0f;
  }
  named_barrier_sync(PRODUCT + group, 2 * GROUP);
  mainloop<BFLOAT16>(top, bottom, p, shared, block);
  named_barrier_arrive(PRODUCT + 1 - group, 2 * GROUP);
  wgmma_wait_group<0>();
  wgmma_fence_operand(top), wgmma_fence_operand(bottom);
  if (lane < CLUSTER) mbarrier_arrive_cluster(smem_address(&shared.free[(block + p.steps - 1) % A::STAGES]), lane);
  if constexpr (A::OWNERS == 1) named_barrier_sync(SLOT + group, 2 * GROUP);
  const EpilogueContext<EPILOGUE> at{p, shared, tile, group};
  if constexpr (A::READS > 0) write_gradient<BFLOAT16, EPILOGUE, ACTIVATION>(top, bottom, at, number);
  else if constexpr (A::SIDEWAYS) write_sideways<BFLOAT16, EPILOGUE, ACTIVATION>(top, bottom, at);
  else if constexpr (A::TF32) write_float32<EPILOGUE, ACTIVATION>(top, bottom, at);
  else write_outputs<BFLOAT16, EPILOGUE, ACTIVATION>(top, bottom, at);
  if constexpr (A::OWNERS == 1) {
    if (thread == 0) tma_store_wait_read();
    named_barrier_arrive(SLOT + 1 - group, 2 * GROUP);
  }
}

// A consumer warpgroup: every other tile of this thread block.
template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__device__ void consume(const Params& p, Shared<EPILOGUE>& shared, int rank, int group) {
  using A = Traits<EPILOGUE>;
  const int thread = threadIdx.x % GROUP, stride = gridDim.x / CLUSTER;
  if (group == 1) {  // group 0 goes first
    named_barrier_arrive(PRODUCT, 2 * GROUP);
    if constexpr (A::OWNERS == 1) named_barrier_arrive(SLOT, 2 * GROUP);
  }
  int block = group * p.steps, number = A::OWNERS > 1 ? 0 : group * A::PIECES;
  for (int turn = blockIdx.x / CLUSTER + group * stride; turn < p.turns; turn += 2 * stride) {
    const Tile<EPILOGUE> tile(p, turn, rank);
    if (!A::DOWNWARD && thread < A::FEATURES) {
      const int feature = tile.feature + thread;
      const auto of = [&](const void* bias, int64_t stride) {
        if (bias == nullptr || feature >= p.hidden) return 0.0f;
        return A::TF32 ? static_cast<const float*>(bias)[feature * stride] : widened<BFLOAT16>(bias, feature * stride);
      };
      shared.bias[group][0][thread] = of(p.value_bias, p.value_bias_stride);
      shared.bias[group][1][thread] = of(p.gate_bias, p.gate_bias_stride);
    }
    if constexpr (A::SIDEWAYS) {
      if (tile.half >= 0) compute<A::COLUMNS / 4, BFLOAT16, EPILOGUE, ACTIVATION>(p, shared, tile, group, block, number);
      else compute<A::COLUMNS / 2, BFLOAT16, EPILOGUE, ACTIVATION>(p, shared, tile, group, block, number);
    } else {
      compute<A::COLUMNS / 2, BFLOAT16, EPILOGUE, ACTIVATION>(p, shared, tile, group, block, number);
    }
    block += 2 * p.steps, number += 2 / A::OWNERS * A::PIECES;
  }
  if (A::OWNERS > 1 && thread == 0) tma_store_wait_read();
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
    for (int i = 0; i < A::OWNERS * A::AHEAD; ++i) {
      mbarrier_init(smem_address(&shared.inputs_ready[0][i]), 1);
      mbarrier_init(smem_address(&shared.inputs_free[0][i]), GROUP / 32);
    }
    fence_mbarrier_init();
  }
  cluster_sync();
  if (threadIdx.x / GROUP == 2) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == 2 * GROUP) produce_operands(p, shared, rank);
    const int owner = threadIdx.x / 32 % 4 - 1;
    if (A::READS > 0 && threadIdx.x % 32 == 0 && owner >= 0 && owner < A::OWNERS) produce_epilogue_inputs(p, shared, rank, owner);
  } else {
    setmaxnreg_inc<240>();
    consume<BFLOAT16, EPILOGUE, ACTIVATION>(p, shared, rank, warpgroup());
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive at barriers in this one's shared memory
#endif
}

template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
Product product() {
  using A = Traits<EPILOGUE>;
  const auto kernel = gated_linear_kernel<BFLOAT16, EPILOGUE, ACTIVATION>;
  const int weight_box = A::DOWNWARD ? DEPTH / CLUSTER : A::FEATURES;
  return {kernel, sizeof(Shared<EPILOGUE>), A::DOWN_STEP, A::ACROSS_STEP, A::HIGH, A::SHARING, weight_box, A::HEIGHT, A::PIECE, A::STEP, A::TF32};
}

// y in tiles with the weights as left operand.
template <bool BFLOAT16, int ACTIVATION>
Product sideways(int64_t epilogue) {
  constexpr Product (*ALL[])() = {product<BFLOAT16, SIDE_208, ACTIVATION>, product<BFLOAT16, SIDE_192, ACTIVATION>,
                                  product<BFLOAT16, SIDE_160, ACTIVATION>, product<BFLOAT16, SIDE_144, ACTIVATION>,
                                  product<BFLOAT16, SIDE_128, ACTIVATION>};
  return ALL[epilogue - SIDE_208]();
}

}  // namespace
