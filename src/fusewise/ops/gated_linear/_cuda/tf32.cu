// The gated linear unit of float32 matrices for Hopper, where products may round their operands to tf32: y, with pre-activations or without.
// The kernel: products.cuh.

#include <cuda_runtime.h>

#include "launch.cuh"
#include "plan.h"
#include "products.cuh"

namespace {

template <int ACTIVATION>
Product kernel(int64_t epilogue) {
  return epilogue == TF32_Y ? product<false, TF32_Y, ACTIVATION>() : product<false, TF32_PREACT, ACTIVATION>();
}

// The kernel of a plan, null if this library lacks it: it may be compiled for a single activation.
Product kernel_of(const Plan& plan) {
#ifdef FUSEWISE_ACTIVATION
  return plan.activation == FUSEWISE_ACTIVATION ? kernel<FUSEWISE_ACTIVATION>(plan.epilogue) : Product{};
#else
  constexpr Product (*ALL[])(int64_t) = {kernel<GELU_TANH>, kernel<GELU>,    kernel<SILU>,
                                         kernel<RELU>,      kernel<SIGMOID>, kernel<IDENTITY>};
  return ALL[plan.activation](plan.epilogue);
#endif
}

}  // namespace

// Launches the unit on a stream of the current device: y, and u and g if the plan says so. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusewise_gated_tf32(const Plan* plan, const Call* call, void* stream) {
  const Product found = kernel_of(*plan);
  if (found.kernel == nullptr) return cudaErrorInvalidValue;
  int device, processors;
  if (const auto error = cudaGetDevice(&device)) return error;
  if (const auto error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
  return launch_product(found, *plan, *call, processors, static_cast<cudaStream_t>(stream));
}

// A cudaError_t that says why the kernels cannot run on the current device.
extern "C" __attribute__((visibility("default"))) int fusewise_gated_tf32_probe() {
  cudaFuncAttributes attributes;
  if (const auto error = find_encode()) return error;
  return cudaFuncGetAttributes(&attributes, add_up_kernel);
}

extern "C" __attribute__((visibility("default"))) const char* fusewise_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
