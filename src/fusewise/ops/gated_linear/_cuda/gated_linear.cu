// The library of the gated linear unit for Hopper in 16 bits: chooses the kernel of a plan and launches it. The kernels: products.cuh,
// gate_gradient.cuh and few_rows.cuh.

#include <cuda_runtime.h>

#include "gate_gradient.cuh"
#include "launch.cuh"
#include "plan.h"
#include "products.cuh"

#ifdef FUSEWISE_PARTS
Product fusewise_sideways(int64_t epilogue);                                             // sideways.cu
cudaError_t fusewise_few_rows(const Plan&, const Call&, int processors, cudaStream_t);  // few_rows.cu
#else
#include "few_rows.cuh"
#endif

namespace {

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

  return launch_product(of.epilogue <= DOWN ? kernels.upright[of.epilogue] : kernels.sideways(of.epilogue), of, c, processors, on);
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
