// The library of the gated linear unit for Hopper: chooses the kernel of a plan, encodes its TMA descriptors and launches it. The kernels:
// products.cuh, gate_gradient.cuh and few_rows.cuh.

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "gate_gradient.cuh"
#include "matrices.cuh"
#include "plan.h"
#include "products.cuh"
#include "sums.cuh"

#ifdef FUSEWISE_PARTS
Product fusewise_sideways(int64_t epilogue);                                             // sideways.cu
cudaError_t fusewise_few_rows(const Plan&, const Call&, int processors, cudaStream_t);  // few_rows.cu
#else
#include "few_rows.cuh"
#endif

namespace {

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

// All kernels for a dtype and an activation.
struct Kernels {
  Product upright[4];  // by epilogue
  Product (*sideways)(int64_t epilogue);
  void (*gate_gradient)(GateGradient);
  cudaError_t (*launch_few_rows)(const Plan&, const Call&, int processors, cudaStream_t);
};

template <bool BFLOAT16, int ACTIVATION>
Kernels kernels() {
#ifdef FUSEWISE_PARTS
  const auto others = fusewise_sideways;
  const auto few_rows = fusewise_few_rows;
#else
  const auto others = sideways<BFLOAT16, ACTIVATION>;
  const auto few_rows = launch_few_rows<BFLOAT16, ACTIVATION>;
#endif
  return {{product<BFLOAT16, Y, ACTIVATION>(), product<BFLOAT16, PREACT, ACTIVATION>(), product<BFLOAT16, GRADIENT, ACTIVATION>(),
           product<BFLOAT16, DOWN, ACTIVATION>()},
          others, gate_gradient_kernel<BFLOAT16, ACTIVATION>, few_rows};
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
  const Product found = of.epilogue <= DOWN ? kernels.upright[of.epilogue] : kernels.sideways(of.epilogue);
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
  p.edge = std::max(1, ceil_div(p.rows % found.high, 8 * found.sharing)) * 8;
  if (!describe(&p.x, of, c.x, of.x_stride, of.rows, of.depth, found.high / found.sharing, DEPTH) ||
      !describe(&p.x_edge, of, c.x, of.x_stride, of.rows, of.depth, p.edge, DEPTH) ||
      !describe(&p.y_edge, of, found.sharing > 1 ? c.y : nullptr, of.y_stride, of.rows, of.hidden, p.edge, found.piece) ||
      !weight(&p.value, c.value, of.value_stride) || !weight(&p.gate, c.gate, of.gate_stride) || !outer(&p.y, c.y, of.y_stride) ||
      !outer(&p.u, c.u, of.u_stride) || !outer(&p.g, c.g, of.g_stride) || !outer(&p.first, c.first, of.first_stride) ||
      !outer(&p.second, c.second, of.second_stride))
    return cudaErrorInvalidValue;

  const int tiles = ceil_div(p.rows, found.down_step) * ceil_div(p.hidden, found.across_step), most = std::max(1, processors / CLUSTER);
  const int left = tiles % most;  // in the last wave
  p.whole = found.sharing > 1 && 2 * left <= most ? tiles - left : tiles, p.turns = 2 * tiles - p.whole;
  if (of.epilogue <= DOWN && p.steps >= SYNC_STEPS && tiles > (SYNC_WAVES - 1) * most)
    if (const auto error = next_wave_counter(p.wave_counter, on)) return error;
  found.kernel<<<unsigned(std::min(p.turns, most) * CLUSTER), 3 * GROUP, bytes, on>>>(p);
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
