// CUDA's kernels as plain C++, for a CPU: what the sources of RoPE use of CUDA's language and runtime, and no more.
//
// Threads of a block are fibers that run one after the other, each to its end or to the next barrier, blocks one after the other.
// Correct kernels do not depend on the order, so it is a choice: as they are numbered or backwards (`fusewise_backwards`). What
// one thread writes before another, that should have read it first, has run, is then found in one of the two.

#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using std::fmaf;
using std::rint;
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((uint64_t(a) * b) >> 32); }
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// --- Blocks and threads ----------------------------------------------------------------------------------------------

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

constexpr size_t STACK = 64 << 10;

inline bool backwards = false;
inline int processors = 132;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool ended;
};
inline std::vector<Fiber> fibers(1024);
inline ucontext_t scheduler;
inline size_t running;
inline std::function<void()> kernel;

inline void enter() {
  kernel();
  fibers[running].ended = true;
}

inline size_t nth(size_t i, size_t count) { return backwards ? count - 1 - i : i; }

// All threads of a block, from barrier to barrier.
inline void run_block(dim3 block) {
  const size_t count = size_t(block.x) * block.y * block.z;
  for (size_t i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = &scheduler;
    fiber.ended = false;
    makecontext(&fiber.context, enter, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (size_t i = 0; i < count; ++i) {
      running = nth(i, count);
      if (fibers[running].ended) continue;
      threadIdx = dim3(running % block.x, running / block.x % block.y, running / (size_t(block.x) * block.y));
      swapcontext(&scheduler, &fibers[running].context);
      any = true;
    }
  }
}

}  // namespace on_cpu

inline void __syncthreads() {
  const dim3 thread = threadIdx;
  const size_t index = on_cpu::running;
  swapcontext(&on_cpu::fibers[index].context, &on_cpu::scheduler);
  threadIdx = thread;
}

// --- The runtime -----------------------------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = void*;
struct cudaFuncAttributes {};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct { int programmaticStreamSerializationAllowed; } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid configuration"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? on_cpu::processors : 9;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) { return cudaSuccess; }

template <class Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params), const Params& params) {
  gridDim = config->gridDim, blockDim = config->blockDim;
  const size_t threads = size_t(blockDim.x) * blockDim.y * blockDim.z, blocks = size_t(gridDim.x) * gridDim.y * gridDim.z;
  if (!blocks || !threads || threads > 1024 || blockDim.z > 64 || gridDim.x > INT32_MAX || gridDim.y > 65535 || gridDim.z > 65535)
    return cudaErrorInvalidConfiguration;
  on_cpu::kernel = [&] { kernel(params); };
  for (size_t i = 0; i < blocks; ++i) {
    const size_t block = on_cpu::nth(i, blocks);
    blockIdx = dim3(block % gridDim.x, block / gridDim.x % gridDim.y, block / (size_t(gridDim.x) * gridDim.y));
    on_cpu::run_block(blockDim);
  }
  return cudaSuccess;
}

// What the tests choose: the order of threads and blocks, and how many multiprocessors the device says it has.
extern "C" __attribute__((visibility("default"))) void fusewise_on_cpu(bool backwards, int processors) {
  on_cpu::backwards = backwards, on_cpu::processors = processors;
}
