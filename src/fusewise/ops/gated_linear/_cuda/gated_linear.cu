// The gated linear unit for Hopper, forward:
//
//     y = u · act(g),   u = x W_valueᵀ + b_value,   g = x W_gateᵀ + b_gate
//
// Shape legend: M rows, D features in, F features out.
//
// Two thread blocks, a cluster, have a pair of tiles one above the other: 128 rows of x each by 96 features, which are 192
// columns of the product, u's and g's. The rows of the weights that both need are read once for both, those of the value by
// one and those of the gate by the other. A block's warps have roles: one thread brings blocks of both operands into a ring
// of shared memory by TMA; two groups of four warps take turns at the tensor cores, a whole tile each, so that the epilogue
// of one is behind the product of the other. A warp group's epilogue takes 32 features at a time: u and g of a feature lie
// in one thread, what comes of them passes through slots of shared memory and leaves by TMA, which stores nothing beyond the
// edges of a matrix and loads zeros there. Accumulation, bias and gate are in float32, rounded once where they are stored.

#include <cuda_runtime.h>

#include <algorithm>

#include "gate.cuh"
#include "hopper.cuh"
#include "plan.h"

namespace {

constexpr int ROWS = 128, FEATURES = 96, DEPTH = 64;  // of a tile, and of a block of the ring
constexpr int PIECE = 32;                             // features of an epilogue's step: rows of 64 bytes
constexpr int CLUSTER = 2, STAGES = 5, GROUP = 128;   // threads of four warps
constexpr int GROUP_M = 8;                            // pairs of tiles, one below the other, that are taken together
constexpr int X_BYTES = ROWS * DEPTH * 2, HALF_BYTES = FEATURES * DEPTH * 2, STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;
constexpr int SLOT_BYTES = ROWS * PIECE * 2, SLOTS = FEATURES / PIECE;

struct Shared {
  alignas(1024) char ring[STAGES][STAGE_BYTES];
  alignas(1024) char slots[SLOTS][SLOT_BYTES];
  float bias[2][2][FEATURES];  // of the tile of each group: value, gate
  float sums[4][2 * PIECE];    // of a piece's du and dg, by warps
  uint64_t ready[STAGES], free[STAGES], came, taken;
};
static_assert(sizeof(Shared) <= 227 * 1024, "of shared memory a block may have");

// Names of the barriers of warps: to turns at the tensor cores, at the slots, and of a group's own warps.
enum Name { PRODUCT = 1, SLOT = 3, OWN = 5 };

struct Params {
  CUtensorMap x, value, gate, y, u, g;  // y: or dy, which is read; u, g: or their gradients
  const void *value_bias, *gate_bias;  // or null
  int64_t value_bias_stride, gate_bias_stride;
  float* sums;  // (⌈M / 128⌉, 2, F) of du and dg, or null
  int rows, hidden, steps;  // blocks of the depth
};

// Where the tile of a turn is: in groups of GROUP_M pairs, so that what is read together stays in the cache.
struct Tile {
  int row, feature;
  __device__ Tile(const Params& p, int turn, int rank) {
    const int down = (p.rows + CLUSTER * ROWS - 1) / (CLUSTER * ROWS), across = (p.hidden + FEATURES - 1) / FEATURES;
    const int first = turn / (GROUP_M * across) * GROUP_M, rows = min(down - first, GROUP_M), within = turn % (GROUP_M * across);
    row = ((first + within % rows) * CLUSTER + rank) * ROWS;
    feature = within / rows * FEATURES;
  }
  __host__ __device__ static int count(const Params& p) {
    return (p.rows + CLUSTER * ROWS - 1) / (CLUSTER * ROWS) * ((p.hidden + FEATURES - 1) / FEATURES);
  }
};

// One thread fills the ring, tile after tile, as far ahead of the products as it is long.
__device__ void produce(const Params& p, Shared& shared, int rank) {
  int slot = 0, phase = 1;  // the ring is free at first: a wait for the round before passes
  for (int turn = blockIdx.x / CLUSTER; turn < Tile::count(p); turn += gridDim.x / CLUSTER) {
    const Tile tile(p, turn, rank);
    for (int step = 0; step < p.steps; ++step) {
      const uint32_t ready = shared_address(&shared.ready[slot]), stage = shared_address(shared.ring[slot]);
      barrier_wait(shared_address(&shared.free[slot]), phase);
      barrier_expect(ready, STAGE_BYTES);
      load(&p.x, step * DEPTH, tile.row, stage, ready);
      const uint32_t half = stage + X_BYTES + rank * HALF_BYTES;
      load_for((1 << CLUSTER) - 1, rank == 0 ? &p.value : &p.gate, step * DEPTH, tile.feature, half, ready);
      if (++slot == STAGES) slot = 0, phase ^= 1;
    }
  }
}

// One thread brings dy, a piece into the first slot when the one before has been read.
__device__ void bring_dy(const Params& p, Shared& shared, int rank) {
  const uint32_t came = shared_address(&shared.came), slot = shared_address(shared.slots[0]);
  int phase = 1;
  for (int turn = blockIdx.x / CLUSTER; turn < Tile::count(p); turn += gridDim.x / CLUSTER) {
    const Tile tile(p, turn, rank);
    for (int piece = 0; piece < SLOTS; ++piece, phase ^= 1) {
      barrier_wait(shared_address(&shared.taken), phase);
      barrier_expect(came, SLOT_BYTES);
      load(&p.y, tile.feature + piece * PIECE, tile.row, slot, came);
    }
  }
}

// The product of a tile, from the blocks of the ring that begin with number `block`.
template <bool BFLOAT16>
__device__ void multiply(float (&top)[96], float (&bottom)[96], const Params& p, Shared& shared, int block) {
  const int lane = threadIdx.x % 32;
  int slot = block % STAGES, phase = block / STAGES & 1, last = 0;
  for (int step = 0; step < p.steps; ++step) {
    barrier_wait(shared_address(&shared.ready[slot]), phase);
    const uint32_t stage = shared_address(shared.ring[slot]);
    const uint64_t x = described(stage), w = described(stage + X_BYTES);
    products_begin();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) {
      constexpr uint64_t HALF = 64 * DEPTH * 2 >> 4;
      product<BFLOAT16>(top, x + 2 * k, w + 2 * k, step + k);
      product<BFLOAT16>(bottom, x + HALF + 2 * k, w + 2 * k, step + k);
    }
    products_commit();
    products_wait<1>();
    // The step before this one has read its block: in both thread blocks it may be written.
    if (step > 0 && lane < CLUSTER) barrier_arrive_at(shared_address(&shared.free[last]), lane);
    last = slot;
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
}

// What a group of warps needs to know in an epilogue.
struct Place {
  const Params& p;
  Shared& shared;
  const Tile& tile;
  const int group, thread = threadIdx.x % GROUP, warp = thread / 32, lane = thread % 32;

  __device__ uint32_t slot(int index) const { return shared_address(shared.slots[index]); }
  // Where in a slot this lane's row of eight values is, of the 16 features `pair` in a half of the tile's rows: chunks of 16
  // bytes are swizzled in 64.
  __device__ uint32_t offset(int half, int pair) const {
    const int row = half * 64 + warp * 16 + lane % 16, chunk = 2 * pair + lane / 16;
    return row * PIECE * 2 + ((chunk ^ (row >> 1 & 3)) << 4);
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
};

// The pre-activations of the two neighbours that a thread has in row `r` (0 or 1, eight below) of the eight features from `column`.
struct Pair {
  float2 u, g;
  __device__ Pair(const float (&c)[96], const Place& at, int column, int r) {
    const int i = column / 2 + 2 * r, mine = column + at.lane % 4 * 2;
    const auto bias = [&](int half) { return *reinterpret_cast<const float2*>(&at.shared.bias[at.group][half][mine]); };
    u = {c[i] + bias(0).x, c[i + 1] + bias(0).y}, g = {c[48 + i] + bias(1).x, c[48 + i + 1] + bias(1).y};
  }
};

// y, and u and g with it.
template <bool BFLOAT16, bool PREACT, int ACTIVATION>
__device__ void write_outputs(float (&top)[96], float (&bottom)[96], const Place& at) {
#pragma unroll
  for (int piece = 0; piece < SLOTS; ++piece) {
    if (PREACT && piece > 0) at.stored();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2, pair = i % 2;
      uint32_t y[4], u[4], g[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Pair a(half ? bottom : top, at, piece * PIECE + pair * 16 + j / 2 * 8, j % 2);
        y[j] = packed<BFLOAT16>(a.u.x * gate<ACTIVATION>(a.g.x).value, a.u.y * gate<ACTIVATION>(a.g.y).value);
        if (PREACT) u[j] = packed<BFLOAT16>(a.u.x, a.u.y), g[j] = packed<BFLOAT16>(a.g.x, a.g.y);
      }
      store_matrices(at.slot(PREACT ? 0 : piece) + at.offset(half, pair), y);
      if (!PREACT) continue;
      store_matrices(at.slot(1) + at.offset(half, pair), u);
      store_matrices(at.slot(2) + at.offset(half, pair), g);
    }
    at.written();
    if (at.thread == 0) {
      const int feature = at.tile.feature + piece * PIECE, row = at.tile.row;
      store(&at.p.y, feature, row, at.slot(PREACT ? 0 : piece));
      if (PREACT) store(&at.p.u, feature, row, at.slot(1)), store(&at.p.g, feature, row, at.slot(2));
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

// du and dg from dy, which comes into the first slot piece by piece, and their sums over the rows of the tile. `came` is how many
// pieces have come before.
template <bool BFLOAT16, int ACTIVATION>
__device__ void write_gradient(float (&top)[96], float (&bottom)[96], const Place& at, int came) {
  const Params& p = at.p;
#pragma unroll
  for (int piece = 0; piece < SLOTS; ++piece) {
    barrier_wait(shared_address(&at.shared.came), came + piece & 1);
    if (piece > 0) at.stored();
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      float sums[8] = {};  // of du, then of dg: two of either in eight features, two in the next eight
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t dy[4], du[4], dg[4];
        load_matrices(at.slot(0) + at.offset(half, pair), dy);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const Pair a(half ? bottom : top, at, piece * PIECE + pair * 16 + j / 2 * 8, j % 2);
          const float2 d = unpacked<BFLOAT16>(dy[j]);
          const Gradient left = gate_gradient<ACTIVATION>(d.x, a.u.x, a.g.x);
          const Gradient right = gate_gradient<ACTIVATION>(d.y, a.u.y, a.g.y);
          du[j] = packed<BFLOAT16>(left.u, right.u), dg[j] = packed<BFLOAT16>(left.g, right.g);
          const int row = at.tile.row + half * 64 + at.warp * 16 + j % 2 * 8 + at.lane / 4, k = j / 2 * 2;
          if (p.sums != nullptr && row < p.rows)  // a bias of infinity makes NaN beyond the last row
            sums[k] += left.u, sums[k + 1] += right.u, sums[4 + k] += left.g, sums[5 + k] += right.g;
        }
        store_matrices(at.slot(1) + at.offset(half, pair), du);
        store_matrices(at.slot(2) + at.offset(half, pair), dg);
      }
      if (pair == 1) {  // not before dy was used: this would overtake loads that nobody has waited for
        __syncwarp();
        if (at.lane == 0) barrier_arrive(shared_address(&at.shared.taken));
      }
      if (p.sums != nullptr) {
        const int feature = pair * 16 + at.lane / 8 % 2 * 8 + at.lane % 4 * 2 + at.lane / 4 % 2;
        at.shared.sums[at.warp][at.lane / 16 * PIECE + feature] = add_rows(sums, at.lane);
      }
    }
    at.written();
    const int feature = at.tile.feature + piece * PIECE;
    if (at.thread == 0) {
      store(&p.u, feature, at.tile.row, at.slot(1)), store(&p.g, feature, at.tile.row, at.slot(2));
      stores_commit();
    }
    if (p.sums != nullptr && at.thread < 2 * PIECE && at.tile.row < p.rows) {
      const int mine = feature + at.thread % PIECE;
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) sum += at.shared.sums[warp][at.thread];
      if (mine < p.hidden) p.sums[(int64_t(at.tile.row / ROWS) * 2 + at.thread / PIECE) * p.hidden + mine] = sum;
    }
  }
}

// Every other tile of this thread block, those of the group with this number.
template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__device__ void consume(const Params& p, Shared& shared, int rank, int group) {
  const int thread = threadIdx.x % GROUP, lane = thread % 32, stride = gridDim.x / CLUSTER;
  float top[96], bottom[96];
  if (group == 1) warps_arrive(PRODUCT, 2 * GROUP), warps_arrive(SLOT, 2 * GROUP);  // the first turns are the other's
  int block = group * p.steps;
  for (int turn = blockIdx.x / CLUSTER + group * stride; turn < Tile::count(p); turn += 2 * stride) {
    const Tile tile(p, turn, rank);
    if (thread < FEATURES) {
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
    if (lane < CLUSTER) barrier_arrive_at(shared_address(&shared.free[(block + p.steps - 1) % STAGES]), lane);
    warps_wait(SLOT + group, 2 * GROUP);
    const Place at{p, shared, tile, group};
    if constexpr (EPILOGUE == GRADIENT) write_gradient<BFLOAT16, ACTIVATION>(top, bottom, at, block / p.steps * SLOTS);
    else write_outputs<BFLOAT16, EPILOGUE == PREACT, ACTIVATION>(top, bottom, at);
    if (at.thread == 0) stores_have_read();
    warps_arrive(SLOT + 1 - group, 2 * GROUP);
    block += 2 * p.steps;
  }
}

template <bool BFLOAT16, int EPILOGUE, int ACTIVATION>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(3 * GROUP, 1)
gated_linear_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared_address(&shared.ready[i]), 1);
      barrier_init(shared_address(&shared.free[i]), CLUSTER * GROUP / 32);
    }
    barrier_init(shared_address(&shared.came), 1), barrier_init(shared_address(&shared.taken), GROUP / 32);
    barriers_are_there();
  }
  cluster_wait();
  if (threadIdx.x / GROUP == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 2 * GROUP) produce(p, shared, rank);
    if (EPILOGUE == GRADIENT && threadIdx.x == 2 * GROUP + 32) bring_dy(p, shared, rank);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume<BFLOAT16, EPILOGUE, ACTIVATION>(p, shared, rank, threadIdx.x / GROUP);
  }
  __syncwarp();
  cluster_wait();  // the other one may still arrive at barriers here
#endif
}

// The sums over R rows of (R, width), 32 columns a block.
__global__ void __launch_bounds__(256) add_up_kernel(const float* sums, float* to, int64_t rows, int64_t width) {
  __shared__ float parts[8][32];
  const int64_t column = int64_t(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0.0f;
  if (column < width)
    for (int64_t row = threadIdx.y; row < rows; row += 8) sum += sums[row * width + column];
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < width) {
    for (int i = 1; i < 8; ++i) sum += parts[i][threadIdx.x];
    to[column] = sum;
  }
}

using Kernel = void (*)(Params);

template <bool BFLOAT16, int ACTIVATION>
Kernel with_epilogue(int64_t epilogue) {
  if (epilogue == Y) return gated_linear_kernel<BFLOAT16, Y, ACTIVATION>;
  if (epilogue == PREACT) return gated_linear_kernel<BFLOAT16, PREACT, ACTIVATION>;
  return gated_linear_kernel<BFLOAT16, GRADIENT, ACTIVATION>;
}

// The kernel of a plan, or null if this library does not have it: it may be compiled for one dtype and activation.
Kernel kernel_of(const Plan& plan) {
#ifdef FUSEWISE_ACTIVATION
  if (plan.bfloat16 != FUSEWISE_BFLOAT16 || plan.activation != FUSEWISE_ACTIVATION) return nullptr;
  return with_epilogue<FUSEWISE_BFLOAT16, FUSEWISE_ACTIVATION>(plan.epilogue);
#else
  constexpr Kernel (*KERNELS[])(int64_t) = {
      with_epilogue<false, GELU_TANH>, with_epilogue<true, GELU_TANH>, with_epilogue<false, GELU>,     with_epilogue<true, GELU>,
      with_epilogue<false, SILU>,      with_epilogue<true, SILU>,      with_epilogue<false, RELU>,     with_epilogue<true, RELU>,
      with_epilogue<false, SIGMOID>,   with_epilogue<true, SIGMOID>,   with_epilogue<false, IDENTITY>, with_epilogue<true, IDENTITY>,
  };
  return KERNELS[2 * plan.activation + plan.bfloat16](plan.epilogue);
#endif
}

decltype(&cuTensorMapEncodeTiled) encode = nullptr;

// The driver's function that makes descriptors of matrices, by its name: the library is not linked with the driver.
cudaError_t find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const char* name = "cuTensorMapEncodeTiled";
  if (const auto error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result)) return error;
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
  const Kernel kernel = kernel_of(of);
  Params p{};
  p.value_bias = c.value_bias, p.gate_bias = c.gate_bias, p.sums = c.sums;
  p.value_bias_stride = of.value_bias_stride, p.gate_bias_stride = of.gate_bias_stride;
  p.rows = int(of.rows), p.hidden = int(of.hidden), p.steps = int((of.depth + DEPTH - 1) / DEPTH);
  if (kernel == nullptr || !describe(&p.x, of, c.x, of.x_stride, of.rows, of.depth, ROWS, DEPTH) ||
      !describe(&p.value, of, c.value, of.value_stride, of.hidden, of.depth, FEATURES, DEPTH) ||
      !describe(&p.gate, of, c.gate, of.gate_stride, of.hidden, of.depth, FEATURES, DEPTH) ||
      !describe(&p.y, of, c.y, of.y_stride, of.rows, of.hidden, ROWS, PIECE) ||
      !describe(&p.u, of, c.u, of.u_stride, of.rows, of.hidden, ROWS, PIECE) ||
      !describe(&p.g, of, c.g, of.g_stride, of.rows, of.hidden, ROWS, PIECE))
    return cudaErrorInvalidValue;

  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared))) return error;
  int device, processors;
  if (const auto error = cudaGetDevice(&device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
  const int64_t clusters = std::min<int64_t>(Tile::count(p), processors / CLUSTER);
  const auto on = static_cast<cudaStream_t>(stream);
  kernel<<<unsigned(clusters * CLUSTER), 3 * GROUP, sizeof(Shared), on>>>(p);
  if (const auto error = cudaGetLastError()) return error;
  if (c.sums == nullptr) return cudaSuccess;
  const int64_t tiles = (of.rows + ROWS - 1) / ROWS, width = 2 * of.hidden;
  add_up_kernel<<<unsigned((width + 31) / 32), dim3(32, 8), 0, on>>>(c.sums, c.dbias, tiles, width);
  return cudaGetLastError();
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
