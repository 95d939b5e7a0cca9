// CUDA's kernels as plain C++, for a CPU: what our sources use of CUDA's language and runtime, and no more.
//
// Threads are fibers that run one after the other, each until it waits for something that has not happened. Blocks run one after
// the other, those of a cluster together. Correct kernels do not depend on the order, so it is a choice: as threads and blocks are
// numbered or backwards (`fusewise_on_cpu`). What one thread writes before another, that should have read it first, has run, is
// then found in one of the two. What is asynchronous (`hopper.cuh`) is done at once, or as late as it may be.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ thread_local  // of all fibers, that is; blocks of a cluster have theirs by `on_cpu::Block`

enum cudaError_t {
  cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9, cudaErrorLaunchFailure = 719, cudaErrorNotSupported = 801
};
using cudaStream_t = void*;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
namespace on_cpu { inline void check(bool right, const char* what); }
// Words that a thread reads and writes at once, which have to be aligned.
template <class Words>
struct Aligned : Words {
  Aligned() = default;
  Aligned(const Aligned&) = default;
  Aligned& operator=(const Aligned& from) {
    const bool right = (reinterpret_cast<uintptr_t>(this) | reinterpret_cast<uintptr_t>(&from)) % sizeof(Words) == 0;
    on_cpu::check(right, "a misaligned address");
    if (right) std::memmove(static_cast<Words*>(this), &from, sizeof(Words));
    return *this;
  }
};
struct alignas(8) TwoWords { uint32_t x, y; };
struct alignas(16) FourWords { uint32_t x, y, z, w; };
using uint2 = Aligned<TwoWords>;
using uint4 = Aligned<FourWords>;
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using std::fmaf;
using std::max;
using std::min;
using std::rint;
inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((uint64_t(a) * b) >> 32); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= static_cast<uint32_t>(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  return bytes;
}
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// --- Blocks and threads ----------------------------------------------------------------------------------------------

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

constexpr size_t STACK = 64 << 10, SHARED = 256 << 10, WARP = 32;
constexpr unsigned CLUSTER = 2;  // blocks of a cluster, as which kernels run that ask for shared memory in a launch of three brackets

inline bool backwards = false, late = false;
inline int processors = 132, shared = 227 << 10;
inline int mistake = -1;  // which one a kernel makes, of those that a test has put in its source
inline bool context = false;  // whether this thread has called what makes the device's context its own
inline bool early = false;    // whether the kernel may have started before the one ahead has ended
inline std::string failure;  // of the kernel that ran last

using Operation = std::function<void()>;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool ended, waited;  // waited: for the kernel ahead
  unsigned block;
  dim3 thread;
  bool (*over)(const void*);  // whether what it waits for has happened
  const void* wait;           // null: it waits for nothing
  std::vector<Operation> stores, products;  // that it began, and that are not in a group yet
  std::deque<std::vector<Operation>> store_groups, groups;
};

// So many threads that wait for each other.
struct Meeting {
  size_t arrived = 0, times = 0;
  void arrive(size_t count) {
    if (++arrived == count) arrived = 0, ++times;
  }
};

struct Warp {
  size_t left;  // threads that have not ended
  Meeting meeting;
  uint32_t given[WARP];
};

struct Block {
  dim3 index;
  unsigned rank;  // in its cluster
  size_t left;    // threads that have not ended
  char* memory = static_cast<char*>(std::aligned_alloc(1024, SHARED));
  Meeting all, names[16];
  std::vector<Warp> warps;
};

inline std::vector<Fiber> fibers;
inline std::vector<Block> blocks(CLUSTER);
inline Meeting cluster;
inline unsigned together;  // blocks that run now
inline ucontext_t scheduler;
inline size_t running;
inline std::function<void()> kernel;
inline std::vector<Operation> flying;  // what nobody waits for by name

inline Block& block() { return blocks[fibers[running].block]; }
inline size_t thread_index() { return threadIdx.x + size_t(blockDim.x) * (threadIdx.y + size_t(blockDim.y) * threadIdx.z); }
inline size_t nth(size_t i, size_t count) { return backwards ? count - 1 - i : i; }
inline void check(bool right, const char* what) {
  if (!right && failure.empty()) failure = what;
}

template <class Test>
void wait_until(const Test& test) {
  if (test()) return;
  Fiber& fiber = fibers[running];
  fiber.over = [](const void* wait) { return (*static_cast<const Test*>(wait))(); };
  fiber.wait = &test;
  swapcontext(&fiber.context, &scheduler);
}
inline void meet(Meeting& meeting, size_t count) {
  const size_t before = meeting.times;
  meeting.arrive(count);
  wait_until([&] { return meeting.times != before; });
}
inline Warp& warp() { return block().warps[thread_index() / WARP]; }
inline void meet_warp() { meet(warp().meeting, WARP); }  // a whole one

// A barrier is for those that are left.
inline void leave(Meeting& meeting, size_t& left) {
  if (--left && left == meeting.arrived) meeting.arrived = 0, ++meeting.times;
}

inline void enter() {
  kernel();
  fibers[running].ended = true;
  leave(block().all, block().left), leave(warp().meeting, warp().left);
}

// All threads of the blocks in `blocks`, to their end.
inline void run(unsigned count) {
  const size_t threads = size_t(blockDim.x) * blockDim.y * blockDim.z;
  together = count;
  cluster = {};
  if (fibers.size() < count * threads) fibers = std::vector<Fiber>(count * threads);
  for (unsigned b = 0; b < count; ++b) {
    blocks[b].all = {}, blocks[b].left = threads, blocks[b].warps.assign((threads + WARP - 1) / WARP, {});
    for (size_t w = 0; w < blocks[b].warps.size(); ++w) blocks[b].warps[w].left = std::min<size_t>(WARP, threads - w * WARP);
    std::fill(std::begin(blocks[b].names), std::end(blocks[b].names), Meeting());
    if (blocks[b].memory) std::memset(blocks[b].memory, 0xff, SHARED);  // NaN
    for (size_t i = 0; i < threads; ++i) {
      Fiber& fiber = fibers[b * threads + i];
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK;
      fiber.context.uc_link = &scheduler;
      fiber.ended = fiber.waited = false, fiber.wait = nullptr, fiber.block = b;
      fiber.thread = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / (size_t(blockDim.x) * blockDim.y));
      fiber.stores.clear(), fiber.products.clear(), fiber.store_groups.clear(), fiber.groups.clear();
      makecontext(&fiber.context, enter, 0);
    }
  }
  flying.clear();
  for (bool any = true, left = true; left && failure.empty();) {
    any = left = false;
    for (size_t i = 0; i < count * threads && failure.empty(); ++i) {
      running = nth(i, count * threads);
      Fiber& fiber = fibers[running];
      if (fiber.ended) continue;
      left = true;
      if (fiber.wait != nullptr && !fiber.over(fiber.wait)) continue;
      fiber.wait = nullptr;
      threadIdx = fiber.thread, blockIdx = blocks[fiber.block].index;
      swapcontext(&scheduler, &fiber.context);
      any = true;
    }
    if (any || !left) continue;
    check(!flying.empty(), "all threads wait for each other");
    if (flying.empty()) continue;
    const size_t next = nth(0, flying.size());
    const Operation operation = std::move(flying[next]);
    flying.erase(flying.begin() + next);
    operation();
  }
}

template <class... P, class... A>
cudaError_t launch(void (*function)(P...), dim3 grid, dim3 block, size_t bytes, cudaStream_t, const A&... arguments);
template <class... P, class... A>
cudaError_t launch_in(unsigned width, void (*function)(P...), dim3 grid, dim3 block, const A&... arguments);  // clusters of `width`

}  // namespace on_cpu

inline void __syncthreads() { on_cpu::meet(on_cpu::block().all, on_cpu::block().left); }
inline void __syncwarp() { on_cpu::meet(on_cpu::warp().meeting, on_cpu::warp().left); }
inline float __shfl_xor_sync(uint32_t, float mine, int mask) {
  on_cpu::Warp& warp = on_cpu::warp();
  const size_t lane = on_cpu::thread_index() % on_cpu::WARP;
  std::memcpy(&warp.given[lane], &mine, sizeof mine);
  on_cpu::meet_warp();
  float other;
  std::memcpy(&other, &warp.given[lane ^ mask], sizeof other);
  on_cpu::meet_warp();
  return other;
}

inline float __shfl_sync(uint32_t, float mine, int lane) {
  on_cpu::Warp& warp = on_cpu::warp();
  std::memcpy(&warp.given[on_cpu::thread_index() % on_cpu::WARP], &mine, sizeof mine);
  on_cpu::meet_warp();
  float other;
  std::memcpy(&other, &warp.given[lane], sizeof other);
  on_cpu::meet_warp();
  return other;
}

// --- The runtime -----------------------------------------------------------------------------------------------------

struct cudaFuncAttributes {};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor, cudaDevAttrMaxSharedMemoryPerBlockOptin };
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

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : error == cudaErrorLaunchFailure ? on_cpu::failure.c_str()
         : error == cudaErrorInvalidConfiguration ? "invalid configuration" : "invalid value";
}
inline cudaError_t last_error = cudaSuccess;
inline cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? on_cpu::processors : attribute == cudaDevAttrComputeCapabilityMajor ? 9 : on_cpu::shared;
  return cudaSuccess;
}
template <class T>
cudaError_t cudaGetSymbolAddress(void** address, T& symbol) { return *address = &symbol, cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) { return std::memset(to, value, bytes), cudaSuccess; }
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) { return cudaSuccess; }

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
  on_cpu::context = true;
  return bytes <= on_cpu::shared ? cudaSuccess : cudaErrorInvalidValue;
}

template <class... P, class... A>
cudaError_t on_cpu::launch_in(unsigned width, void (*function)(P...), dim3 grid, dim3 block, const A&... arguments) {
  gridDim = grid, blockDim = block;
  const size_t threads = size_t(block.x) * block.y * block.z, count = size_t(grid.x) * grid.y * grid.z;
  if (!count || !threads || threads > 1024 || block.z > 64 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535 || grid.x % width)
    return last_error = cudaErrorInvalidConfiguration;
  kernel = [&] { function(arguments...); };
  failure.clear();
  for (size_t i = 0; i < count / width && failure.empty(); ++i) {
    for (unsigned rank = 0; rank < width; ++rank) {
      const size_t number = nth(i, count / width) * width + rank;
      blocks[rank].index = dim3(number % grid.x, number / grid.x % grid.y, number / (size_t(grid.x) * grid.y));
      blocks[rank].rank = rank;
    }
    run(width);
  }
  return last_error = failure.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

template <class... P, class... A>
cudaError_t on_cpu::launch(void (*function)(P...), dim3 grid, dim3 block, size_t bytes, cudaStream_t, const A&... arguments) {
  early = false;
  return launch_in(bytes ? CLUSTER : 1, function, grid, block, arguments...);
}

template <class Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params), const Params& params) {
  on_cpu::early = config->numAttrs > 0 && config->attrs->val.programmaticStreamSerializationAllowed;
  return on_cpu::launch_in(1, kernel, config->gridDim, config->blockDim, params);  // no attribute of ours makes clusters
}

// What the tests choose: the order of threads and blocks, how many multiprocessors the device says it has and how much shared memory a
// block, whether what is asynchronous is done as late as it may be, and the mistake that is made. The next call to CUDA is the first of
// its thread.
// Weak: one definition for all sources of a library.
extern "C" __attribute__((visibility("default"), weak)) void fusewise_on_cpu(bool backwards, int processors, int shared, bool late, int mistake) {
  on_cpu::backwards = backwards, on_cpu::processors = processors, on_cpu::shared = shared, on_cpu::late = late;
  on_cpu::context = false, on_cpu::mistake = mistake;
}
