// y of up to 208 rows of x, of up to 128 with u and g if wanted, in about the time of reading the weights once:
//
//     y = u · act(g),   u = x W_valueᵀ + b_value,   g = x W_gateᵀ + b_gate
//
// Shape legend: M rows, D features in, F features out.
//
// Memory-bound: a persistent kernel that streams W. A tile is `width` features, chosen so that F divides evenly over the SMs. One
// producer thread keeps all of shared memory in flight by TMA: a ring of stages of 64 (or 128) columns of `width` rows of both weights and
// of x; it runs on into the next tile during the epilogue. Each 64 features have a consumer warpgroup: the weights are the left wgmma
// operand, so that u and g of a feature are in one thread, and x is the right one, as narrow as it has rows. Rows of the weights beyond
// `width`, and of x beyond `x_rows`, are never loaded; what stale shared memory yields in their place is not stored.
//
// Programmatic dependent launch: blocks may start before the previous kernel on the stream ends, and wait for that end before they read,
// since it may have written any operand.

#pragma once

#include <algorithm>

#include "gate.cuh"
#include "hopper.cuh"
#include "matrices.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

namespace {

constexpr int KEEPING_COLUMNS = 128;  // up to which u and g can be stored: with more, addresses would be spilled
constexpr int RING_BYTES = 220 * 1024, MOST_STAGES = 8, SLAB_BYTES = 64 * DEPTH * 2;  // 64 features of a weight

struct FewRows {
  CUtensorMap x, value, gate;  // boxes of DEPTH columns by `x_rows` or `width` rows
  const void *value_bias, *gate_bias;
  int64_t value_bias_stride, gate_bias_stride, y_stride, u_stride, g_stride;  // in elements
  uint16_t *y, *u, *g;  // u and g or nulls
  int rows, x_rows, hidden, depth, width;
  __host__ __device__ int tiles() const { return (hidden + width - 1) / width; }
};

struct FewShared {
  alignas(1024) char ring[RING_BYTES];
  alignas(16) char out[2 * GROUP / 32][16 * 16 * 2];  // per warp: 16 rows of 16 features
  uint64_t ready[MOST_STAGES], free[MOST_STAGES];
};
static_assert(sizeof(FewShared) <= MOST);

// A stage has one or two chunks of 64 columns, each `SLABS` x 64 features of the value and of the gate, and x. Two where three such stages
// fit: adjacent 128-byte lines of a row are then requested together, which DRAM serves faster. With 128 columns of x two chunks
// would leave too few stages.
template <int COLUMNS, int SLABS>
struct Stage {
  static constexpr int X = 2 * SLABS * SLAB_BYTES, CHUNK = X + COLUMNS * DEPTH * 2;
  static constexpr int CHUNKS = COLUMNS <= 64 && 6 * CHUNK <= RING_BYTES ? 2 : 1;
  static constexpr int BYTES = CHUNKS * CHUNK, COUNT = RING_BYTES / BYTES, DEEP = CHUNKS * DEPTH;
  static constexpr int THREADS = SLABS * GROUP + (SLABS > 1 ? GROUP : 32);  // setmaxnreg is per warpgroup
  static_assert(COUNT <= MOST_STAGES);
};

// Position in the ring: slot and mbarrier phase.
template <int COUNT>
struct Turn {
  int slot = 0, phase;
  __device__ void next() {
    if (++slot == COUNT) slot = 0, phase ^= 1;
  }
};

// The producer thread: fills the ring for tile after tile, running ahead of the consumers by up to its length.
template <int COLUMNS, int SLABS>
__device__ void produce_few(const FewRows& p, FewShared& shared) {
  using S = Stage<COLUMNS, SLABS>;
  grid_dependency_wait();
  Turn<S::COUNT> at{0, 1};  // the stages start free: the first wait, for the previous phase, returns at once
  for (int tile = blockIdx.x; tile < p.tiles(); tile += gridDim.x) {
    for (int column = 0; column < p.depth; column += S::DEEP, at.next()) {
      const uint32_t ready = smem_address(&shared.ready[at.slot]), to = smem_address(shared.ring + at.slot * S::BYTES);
      mbarrier_wait(smem_address(&shared.free[at.slot]), at.phase);
      mbarrier_arrive_expect_tx(ready, (2 * p.width + p.x_rows) * S::DEEP * 2);
      const auto load = [&](const CUtensorMap* map, int row, uint32_t to) {
#pragma unroll
        for (int chunk = 0; chunk < S::CHUNKS; ++chunk) tma_load(map, column + chunk * DEPTH, row, to + chunk * S::CHUNK, ready);
      };
      load(&p.value, tile * p.width, to), load(&p.gate, tile * p.width, to + SLABS * SLAB_BYTES), load(&p.x, 0, to + S::X);
    }
  }
}

// The main loop for 64 of a tile's features: u and g.
template <bool BFLOAT16, int COLUMNS, int SLABS>
__device__ void mainloop_few(float (&u)[COLUMNS / 2], float (&g)[COLUMNS / 2], const FewRows& p, FewShared& shared, int slab,
                             Turn<Stage<COLUMNS, SLABS>::COUNT>& at) {
  using S = Stage<COLUMNS, SLABS>;
  constexpr int CHUNK = DEPTH / 16;  // wgmmas of a chunk, k = 16 each
  constexpr uint64_t TO_GATE = SLABS * SLAB_BYTES >> 4;
  const bool first = threadIdx.x % 32 == 0;
  int last = -1;
  for (int column = 0; column < p.depth; column += S::DEEP, at.next()) {
    mbarrier_wait(smem_address(&shared.ready[at.slot]), at.phase);
    wgmma_fence();
    const uint32_t from = smem_address(shared.ring + at.slot * S::BYTES);
    const uint64_t left = matrix_descriptor(from + slab * SLAB_BYTES), right = matrix_descriptor(from + S::X);
#pragma unroll
    for (int k = 0; k < S::DEEP / 16; ++k) {
      const uint64_t along = (k / CHUNK * S::CHUNK + k % CHUNK * 32) >> 4;
      wgmma<BFLOAT16, false>(u, left + along, right + along, column + k);
      wgmma<BFLOAT16, false>(g, left + TO_GATE + along, right + along, column + k);
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if (last >= 0 && first) mbarrier_arrive(smem_address(&shared.free[last]));  // the previous stage's wgmmas are done
    last = at.slot;
  }
  wgmma_wait_group<0>();
  wgmma_fence_operand(u), wgmma_fence_operand(g);
  if (first) mbarrier_arrive(smem_address(&shared.free[last]));
}

// The epilogue for 64 features: each warp transposes its 16 through shared memory and stores 32 bytes per row of a matrix.
template <bool BFLOAT16, int COLUMNS, int ACTIVATION>
__device__ void write_few(const float (&u)[COLUMNS / 2], const float (&g)[COLUMNS / 2], const float (&bias)[2][2], const FewRows& p,
                          FewShared& shared, int feature, int end) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  char* const out = shared.out[threadIdx.x / 32];
  // Byte offset of eight features of a row; swizzled, since rows four apart would conflict in banks.
  const auto place = [](int row, int eight) { return row * 32 + ((eight ^ (row >> 2 & 1)) << 4); };
  const int mine = feature + warp * 16 + lane % 2 * 8;
#pragma unroll
  for (int pair = 0; pair < COLUMNS / 16; ++pair) {
    if (pair * 16 >= p.rows) break;
    const int row = pair * 16 + lane / 2;
    const auto write = [&](uint16_t* to, int64_t stride, const auto& value) {
      uint32_t made[4];  // 2 x 2 matrices of eight features by eight rows
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = ((pair * 2 + j / 2) * 2 + j % 2) * 2;
        made[j] = packed<BFLOAT16>(value(i, j % 2), value(i + 1, j % 2));
      }
      __syncwarp();  // what was there has been read
      stmatrix_trans(smem_address(out + place(lane / 16 * 8 + lane % 8, lane / 8 % 2)), made);
      __syncwarp();
      if (row < p.rows && mine < end)
        *reinterpret_cast<uint4*>(to + row * stride + mine) = *reinterpret_cast<const uint4*>(out + place(lane / 2, lane % 2));
    };
    const auto value = [&](int i, int j) { return u[i] + bias[0][j]; };
    const auto before_gate = [&](int i, int j) { return g[i] + bias[1][j]; };
    write(p.y, p.y_stride, [&](int i, int j) { return value(i, j) * gate<ACTIVATION>(before_gate(i, j)).value; });
    if constexpr (COLUMNS <= KEEPING_COLUMNS) {
      if (p.u != nullptr) write(p.u, p.u_stride, value), write(p.g, p.g_stride, before_gate);
    }
  }
}

template <bool BFLOAT16, int COLUMNS, int SLABS, int ACTIVATION>
__device__ void make_few(const FewRows& p, FewShared& shared, int slab) {
  float u[COLUMNS / 2], g[COLUMNS / 2];
  Turn<Stage<COLUMNS, SLABS>::COUNT> at{0, 0};
  grid_dependency_wait();
  for (int tile = blockIdx.x; tile < p.tiles(); tile += gridDim.x) {
    const int feature = tile * p.width + slab * 64;
    float bias[2][2];  // value and gate bias of this thread's two features, eight apart
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int mine = feature + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + j * 8;
      const auto of = [&](const void* bias, int64_t stride) {
        return bias != nullptr && mine < p.hidden ? widened<BFLOAT16>(bias, mine * stride) : 0.0f;
      };
      bias[0][j] = of(p.value_bias, p.value_bias_stride), bias[1][j] = of(p.gate_bias, p.gate_bias_stride);
    }
    mainloop_few<BFLOAT16, COLUMNS, SLABS>(u, g, p, shared, slab, at);
    write_few<BFLOAT16, COLUMNS, ACTIVATION>(u, g, bias, p, shared, feature, min(p.hidden, (tile + 1) * p.width));
  }
}

template <bool BFLOAT16, int COLUMNS, int SLABS, int ACTIVATION>
__global__ void __launch_bounds__(Stage<COLUMNS, SLABS>::THREADS, 1) few_rows_kernel(const __grid_constant__ FewRows p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = shared_memory<FewShared>();
  if (threadIdx.x == SLABS * GROUP) {
    prefetch_tensormap(&p.value), prefetch_tensormap(&p.gate), prefetch_tensormap(&p.x);
    for (int i = 0; i < Stage<COLUMNS, SLABS>::COUNT; ++i) {
      mbarrier_init(smem_address(&shared.ready[i]), 1);
      mbarrier_init(smem_address(&shared.free[i]), SLABS * GROUP / 32);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  launch_dependents();
  if (threadIdx.x < SLABS * GROUP) {
    if constexpr (SLABS > 1) setmaxnreg_inc<240>();
    make_few<BFLOAT16, COLUMNS, SLABS, ACTIVATION>(p, shared, warpgroup());
    return;
  }
  if constexpr (SLABS > 1) setmaxnreg_dec<24>();
  if (threadIdx.x == SLABS * GROUP) produce_few<COLUMNS, SLABS>(p, shared);
#endif
}

// Encodes the TMA descriptors; false if the driver refuses one.
bool describe_few(FewRows& p, const Plan& of, const Call& c) {
  // No 256-byte L2 promotion: both halves are requested anyway, and each request would fetch both.
  const auto in_boxes = [&](CUtensorMap* map, const void* matrix, int64_t stride, int64_t rows, int box_rows) {
    return describe(map, half_type(of), matrix, stride, rows, of.depth, box_rows, DEPTH, CU_TENSOR_MAP_L2_PROMOTION_NONE);
  };
  return in_boxes(&p.x, c.x, of.x_stride, of.rows, p.x_rows) && in_boxes(&p.value, c.value, of.value_stride, of.hidden, p.width) &&
         in_boxes(&p.gate, c.gate, of.gate_stride, of.hidden, p.width);
}

template <bool BFLOAT16, int COLUMNS, int SLABS, int ACTIVATION>
cudaError_t launch_few_rows_of(FewRows& p, const Plan& of, const Call& c, int processors, cudaStream_t on) {
  const auto kernel = few_rows_kernel<BFLOAT16, COLUMNS, SLABS, ACTIVATION>;
  constexpr int bytes = sizeof(FewShared);
  // Before the descriptors are encoded, as in gated_linear.cu.
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return cudaGetLastError(), error;  // clears the sticky error
  if (!describe_few(p, of, c)) return cudaErrorInvalidValue;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(std::min(p.tiles(), processors)), config.blockDim = dim3(Stage<COLUMNS, SLABS>::THREADS);
  config.dynamicSmemBytes = bytes, config.stream = on;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early, config.numAttrs = 1;
  if (const auto error = cudaLaunchKernelEx(&config, kernel, p)) return cudaGetLastError(), error;
  return cudaSuccess;
}

template <bool BFLOAT16, int SLABS, int ACTIVATION>
cudaError_t launch_slabs(FewRows& p, const Plan& of, const Call& c, int processors, cudaStream_t on) {
  if (p.rows <= 16) return launch_few_rows_of<BFLOAT16, 16, SLABS, ACTIVATION>(p, of, c, processors, on);
  if (p.rows <= 32) return launch_few_rows_of<BFLOAT16, 32, SLABS, ACTIVATION>(p, of, c, processors, on);
  if (p.rows <= 64) return launch_few_rows_of<BFLOAT16, 64, SLABS, ACTIVATION>(p, of, c, processors, on);
  if (p.rows <= 128) return launch_few_rows_of<BFLOAT16, 128, SLABS, ACTIVATION>(p, of, c, processors, on);
  if (p.rows <= 160) return launch_few_rows_of<BFLOAT16, 160, SLABS, ACTIVATION>(p, of, c, processors, on);
  if (p.rows <= 208) return launch_few_rows_of<BFLOAT16, 208, SLABS, ACTIVATION>(p, of, c, processors, on);
  return cudaErrorInvalidValue;
}

// Launches the kernel on the stream, with the tile width of the plan.
template <bool BFLOAT16, int ACTIVATION>
cudaError_t launch_few_rows(const Plan& of, const Call& c, int processors, cudaStream_t on) {
  FewRows p{};
  p.value_bias = c.value_bias, p.gate_bias = c.gate_bias;
  p.value_bias_stride = of.value_bias_stride, p.gate_bias_stride = of.gate_bias_stride;
  const auto written = [](const void* matrix) { return static_cast<uint16_t*>(const_cast<void*>(matrix)); };
  p.y = written(c.y), p.u = written(c.u), p.g = written(c.g);
  p.y_stride = of.y_stride, p.u_stride = of.u_stride, p.g_stride = of.g_stride;
  if (p.u != nullptr && of.rows > KEEPING_COLUMNS) return cudaErrorInvalidValue;
  p.rows = int(of.rows), p.hidden = int(of.hidden), p.depth = int(of.depth), p.width = int(of.width);
  // Rows of the TMA box of x: out-of-bounds rows take TMA longer than rows that exist.
  for (p.x_rows = 8; p.x_rows < p.rows && p.x_rows < 64;) p.x_rows *= 2;
  if (p.rows > 64) p.x_rows = (p.rows + 15) / 16 * 16;
  const auto launch = p.width > 64 ? launch_slabs<BFLOAT16, 2, ACTIVATION> : launch_slabs<BFLOAT16, 1, ACTIVATION>;
  return launch(p, of, c, processors, on);
}

}  // namespace
