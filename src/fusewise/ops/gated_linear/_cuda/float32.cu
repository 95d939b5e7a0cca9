// The gated linear unit in float32 without tensor cores, for any strides:
//
//     y = (x W_valueᵀ + b_value) · act(x W_gateᵀ + b_gate)
//
// A block of eight warps computes 128 rows by 128 features of both products, a thread eight rows by eight features of each: 128 fused
// multiply-adds for every six reads of four words from shared memory. What binds is the rate at which instructions are issued, so the
// main loop is unrolled over a stage and has little else: operands are copied word by word into a ring of stages, transposed, so that one
// read gives four rows or features of the same k, and need no registers on the way; their reads are spread among the multiplications.
// Neighbouring threads copy eight consecutive words of a row; a few spare words per k put these into different banks.

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "copies.cuh"
#include "gate.cuh"
#include "plan.h"

namespace {

constexpr int ROWS = 128, FEATURES = 128;  // of a tile
constexpr int THREADS = 256, MINE = 8;     // a thread's rows, and its features of each half
constexpr int DEEP = 16, STAGES = 4;       // columns of a stage
constexpr int GROUPS = 4;                  // of the copies of a stage
constexpr int COPIED = 8, SPARE = 32 / COPIED, COPIES = DEEP / COPIED;  // columns that neighbouring threads copy; of a row by a thread
constexpr int GROUP = 8;                                               // rows of tiles visited together, so that weights stay in L2
constexpr uint32_t X_STEP = 4 * (ROWS + SPARE), W_STEP = 4 * (2 * FEATURES + SPARE);  // bytes of a column of x and of both weights
constexpr uint32_t W_START = DEEP * X_STEP, STAGE = DEEP * (X_STEP + W_STEP);

struct Unit {
  const char *x, *value, *gate;
  int64_t x_stride, value_stride, gate_stride;  // of rows, in bytes; 128 of them are less than 4 GiB
  const float *value_bias, *gate_bias;
  int64_t value_bias_stride, gate_bias_stride;
  float *y, *u, *g;  // u and g may be null
  int64_t y_stride, u_stride, g_stride;
  int rows, hidden, depth;
};

// Calls f with 0 to N - 1 as types: nested loops as long as these are not unrolled by a pragma.
template <class F, int... I>
__device__ __forceinline__ void each(F&& f, std::integer_sequence<int, I...>) { (f(std::integral_constant<int, I>{}), ...); }
template <int N, class F>
__device__ __forceinline__ void each(F&& f) { each(f, std::make_integer_sequence<int, N>{}); }

__device__ __forceinline__ float of(const float4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// act(g) to float32's precision, unlike that of gate.cuh.
template <int ACTIVATION>
__device__ inline float activated(float g) {
  if constexpr (ACTIVATION == GELU_TANH) return g / (1.0f + expf(g * (-1.5957691216057308f - 0.07135481627159882f * g * g)));
  else if constexpr (ACTIVATION == GELU) return 0.5f * g * erfcf(g * -0.7071067811865476f);
  else if constexpr (ACTIVATION == SILU) return g / (1.0f + expf(-g));
  else if constexpr (ACTIVATION == RELU) return g <= 0.0f ? 0.0f : g;  // NaN stays
  else if constexpr (ACTIVATION == SIGMOID) return 1.0f / (1.0f + expf(-g));
  else return g;
}

// Stores four features of a row from `column` on, as far as there are so many.
__device__ inline void store(float* matrix, int64_t stride, int row, int column, int hidden, const float (&x)[4]) {
  float* const to = matrix + row * stride + column;
  if (column + 3 < hidden && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<uint4*>(to) = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (column + i < hidden) to[i] = x[i];
}

template <int ACTIVATION>
__global__ void __launch_bounds__(THREADS, 1) unit_kernel(const __grid_constant__ Unit p) {
  const int across = (p.hidden + FEATURES - 1) / FEATURES, down = (p.rows + ROWS - 1) / ROWS;
  const int group = blockIdx.x / (GROUP * across), in_group = blockIdx.x % (GROUP * across);
  const int high = min(down - group * GROUP, GROUP);
  const int row = (group * GROUP + in_group % high) * ROWS, column = in_group / high * FEATURES;

  // What this thread copies: word `first` (and every eighth from it) of every 32nd row of x and of both weights.
  constexpr int STRIDE = THREADS / COPIED, X_ROWS = ROWS / STRIDE, W_ROWS = 2 * FEATURES / STRIDE;
  const int first = threadIdx.x % COPIED, from_row = threadIdx.x / COPIED;
  const char *x = p.x + row * p.x_stride, *value = p.value + column * p.value_stride, *gate = p.gate + column * p.gate_stride;
  uint32_t x_at[X_ROWS], w_at[W_ROWS];  // offsets; rows beyond the last are copies of it
#pragma unroll
  for (int i = 0; i < X_ROWS; ++i) x_at[i] = min(from_row + i * STRIDE, p.rows - row - 1) * uint32_t(p.x_stride) + first * 4;
#pragma unroll
  for (int i = 0; i < W_ROWS; ++i) {
    const uint32_t stride = uint32_t(i < W_ROWS / 2 ? p.value_stride : p.gate_stride);
    w_at[i] = min(from_row + i % (W_ROWS / 2) * STRIDE, p.hidden - column - 1) * stride + first * 4;
  }
  const uint32_t shared = shared_words(), x_to = shared + first * X_STEP + from_row * 4;
  const uint32_t w_to = shared + W_START + first * W_STEP + from_row * 4;
  int left = p.depth - first;  // words of a row from the first that it copies next
  constexpr int EACH = (X_ROWS + W_ROWS) * COPIES;  // copies of a stage
  const auto copy = [&](uint32_t stage, auto which) {
    constexpr int i = which.value / COPIES, part = which.value % COPIES * COPIED, w = i - X_ROWS;
    if constexpr (i < X_ROWS) copy_word(x + part * 4 + x_at[i], x_to + stage + part * X_STEP + i * STRIDE * 4, part < left);
    else copy_word((w < W_ROWS / 2 ? value : gate) + part * 4 + w_at[w], w_to + stage + part * W_STEP + w * STRIDE * 4, part < left);
  };
  const auto next_columns = [&] {
    x += DEEP * 4, value += DEEP * 4, gate += DEEP * 4, left -= DEEP;
    group_copies();
  };
  each<STAGES - 2>([&](auto stage) {
    each<EACH>([&](auto which) { copy(stage.value * STAGE, which); });
    next_columns();
  });

  // What it multiplies: rows my_row + {0, 1, 2, 3} + {0, 32} by features my_column + {0, 1, 2, 3} + {0, 16} of each half.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int my_row = warp % 2 * 64 + (lane >> 1 & 7) * 4, my_column = warp / 2 * 32 + ((lane & 1) | (lane >> 4) << 1) * 4;
  const uint32_t x_from = shared + my_row * 4, w_from = shared + W_START + my_column * 4;
  float sums[MINE][2 * MINE] = {};
  float4 a[2][2], b[2][4];  // of this k and of the next
  const auto read = [&](int at, auto which, uint32_t x_place, uint32_t w_place) {
    constexpr int i = which.value, w = i - 2;
    if constexpr (i < 2) a[at][i] = four_words(x_place + i * 32 * 4);
    else b[at][w] = four_words(w_place + w / 2 * FEATURES * 4 + w % 2 * 16 * 4);
  };
  wait_for_copies<STAGES - 3>();
  __syncthreads();
  each<6>([&](auto which) { read(0, which, x_from, w_from); });

  uint32_t now = 0, filled = (STAGES - 2) * STAGE;
#pragma unroll 1
  for (int done = 0; done < p.depth; done += DEEP) {
    const uint32_t next = now + STAGE == STAGES * STAGE ? 0 : now + STAGE;
    each<DEEP>([&](auto step) {
      constexpr int k = step.value;
      if constexpr (k == DEEP - 1) {  // the next stage has arrived, and nobody reads the one before this any more
        next_columns();
        wait_for_copies<STAGES - 3>();
        __syncthreads();
      }
      const uint32_t ahead = k == DEEP - 1 ? next : now;
      constexpr int from = (k + 1) % DEEP, at = k & 1;
      each<2 * MINE>([&](auto feature) {
        constexpr int f = feature.value;
        if constexpr (f < 6) read(at ^ 1, feature, x_from + ahead + from * X_STEP, w_from + ahead + from * W_STEP);
        // In four groups per stage: the compiler puts three useless reads before each, and many copies at once stall.
        if constexpr (k % (DEEP / GROUPS) == DEEP / GROUPS / 2 && f == 2)
          each<EACH / GROUPS>([&](auto which) {
            copy(filled, std::integral_constant<int, which.value + k / (DEEP / GROUPS) * (EACH / GROUPS)>{});
          });
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
          const int r = f % 2 ? MINE - 1 - i : i;  // there and back, so that an operand is reused from one product to the next
          sums[r][f] = fmaf(of(a[at][r / 4], r % 4), of(b[at][f / 4], f % 4), sums[r][f]);
        }
      });
    });
    filled = filled + STAGE == STAGES * STAGE ? 0 : filled + STAGE;
    now = next;
  }
  wait_for_copies<0>();

#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int to = column + my_column + part * 16;
    float bias[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (p.value_bias != nullptr && to + i < p.hidden)
        bias[0][i] = p.value_bias[(to + i) * p.value_bias_stride], bias[1][i] = p.gate_bias[(to + i) * p.gate_bias_stride];
#pragma unroll
    for (int r = 0; r < MINE; ++r) {
      const int of_row = row + my_row + r / 4 * 32 + r % 4;
      if (of_row >= p.rows) continue;
      float u[4], g[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u[i] = sums[r][part * 4 + i] + bias[0][i], g[i] = sums[r][MINE + part * 4 + i] + bias[1][i];
        y[i] = u[i] * activated<ACTIVATION>(g[i]);
      }
      store(p.y, p.y_stride, of_row, to, p.hidden, y);
      if (p.u == nullptr) continue;
      store(p.u, p.u_stride, of_row, to, p.hidden, u);
      store(p.g, p.g_stride, of_row, to, p.hidden, g);
    }
  }
}

using Kernel = void (*)(Unit);

// The kernel of an activation, null if this library lacks it: it may be compiled for a single one.
Kernel kernel_of(int64_t activation) {
#ifdef FUSEWISE_ACTIVATION
  return activation == FUSEWISE_ACTIVATION ? unit_kernel<FUSEWISE_ACTIVATION> : nullptr;
#else
  constexpr Kernel ALL[] = {unit_kernel<GELU_TANH>, unit_kernel<GELU>,    unit_kernel<SILU>,
                            unit_kernel<RELU>,      unit_kernel<SIGMOID>, unit_kernel<IDENTITY>};
  return ALL[activation];
#endif
}

}  // namespace

// Launches the unit on a stream of the current device: y, and u and g if the call has them. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusewise_gated_float32(const Plan* plan, const Call* call, void* stream) {
  const Plan& of = *plan;
  const Call& c = *call;
  const Kernel kernel = kernel_of(of.activation);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  const auto bytes = [](const void* matrix) { return static_cast<const char*>(matrix); };
  const auto floats = [](const void* matrix) { return static_cast<float*>(const_cast<void*>(matrix)); };
  Unit p{bytes(c.x), bytes(c.value), bytes(c.gate), of.x_stride * 4, of.value_stride * 4, of.gate_stride * 4};
  p.value_bias = floats(c.value_bias), p.gate_bias = floats(c.gate_bias);
  p.value_bias_stride = of.value_bias_stride, p.gate_bias_stride = of.gate_bias_stride;
  p.y = floats(c.y), p.u = floats(c.u), p.g = floats(c.g), p.y_stride = of.y_stride, p.u_stride = of.u_stride, p.g_stride = of.g_stride;
  p.rows = int(of.rows), p.hidden = int(of.hidden), p.depth = int(of.depth);
  constexpr int shared = STAGES * STAGE;
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)) return error;
  const int64_t tiles = ((of.rows + ROWS - 1) / ROWS) * ((of.hidden + FEATURES - 1) / FEATURES);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(tiles)), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, p);
}

// A cudaError_t that says why the kernels cannot run on the current device.
extern "C" __attribute__((visibility("default"))) int fusewise_gated_float32_probe() {
  cudaFuncAttributes attributes;
#ifdef FUSEWISE_ACTIVATION
  return cudaFuncGetAttributes(&attributes, unit_kernel<FUSEWISE_ACTIVATION>);
#else
  return cudaFuncGetAttributes(&attributes, unit_kernel<IDENTITY>);
#endif
}

extern "C" __attribute__((visibility("default"))) const char* fusewise_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
