// A machine for CUDA kernels on a CPU: every thread of a block is a thread of the host, blocks come one after the other.
// Addresses, masks and arithmetic are those of the GPU; its speed and its races between blocks are not.
//
//     nvcc -x c++ -std=c++20 -DKERNELS='"file.cu"' cuda_machine.cpp      (nvcc knows where its headers are)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <barrier>
#include <cmath>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

constexpr unsigned MOST_THREADS = 256;

thread_local dim3 machine_thread, machine_block;
std::optional<std::barrier<>> machine_barrier;

inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t(a) * b >> 32); }
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline void __syncthreads() { machine_barrier->arrive_and_wait(); }

template <class Params>
cudaError_t machine_launch(const cudaLaunchConfig_t* config, void (*kernel)(Params), const Params& params) {
  const unsigned count = config->blockDim.x;
  if (count == 0 || count > MOST_THREADS || config->blockDim.y * config->blockDim.z != 1) return cudaErrorInvalidValue;
  for (unsigned block = 0; block < config->gridDim.x; ++block) {
    machine_barrier.emplace(count);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < count; ++i)
      threads.emplace_back([=, &params] {
        machine_block = dim3(block), machine_thread = dim3(i);
        kernel(params);
        machine_barrier->arrive_and_drop();
      });
    for (std::thread& thread : threads) thread.join();
  }
  return cudaSuccess;
}

#define blockIdx machine_block
#define threadIdx machine_thread
// A single multiprocessor, so that little work is enough for several heads a thread.
#define cudaDeviceGetAttribute(value, name, device) (*(value) = (name) == cudaDevAttrMultiProcessorCount ? 1 : 9, cudaSuccess)
#define cudaFuncGetAttributes(...) cudaSuccess
#define cudaGetDevice(index) (*(index) = 0, cudaSuccess)
#define cudaGetErrorString(code) "an error of the machine"
#define cudaLaunchKernelEx machine_launch
#include KERNELS
