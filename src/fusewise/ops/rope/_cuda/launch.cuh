// Launch decisions on the host: access width, heads per thread, selection of the kernel instance; and the launch itself.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../plan.h"

namespace {

constexpr int WARP = 32;      // threads
constexpr int THREADS = 128;  // maximum per block unless a head has more chunks (see most_threads)
constexpr int READ = 128;     // bytes that a thread has in flight if the call is large enough

// A head must fit in one block: 512 features are up to 128 chunks, but 256 chunks of a single pair.
constexpr int most_threads(int np) { return np > 1 ? THREADS : 2 * THREADS; }

// Heads per thread for READ bytes in chunks of NP pairs. They amortize a thread's prologue, which costs as many instructions as 30
// bytes. `of_narrow`: heads per thread if accesses are narrower than 8 bytes.
constexpr bool narrow(int64_t np, int64_t size) { return np * size < 8; }
constexpr int heads_read(int64_t np, int64_t size, int of_narrow) { return narrow(np, size) ? of_narrow : int(READ / (2 * np * size)); }

// Heads per thread in a call of so many chunks that leave at least `enough` threads. With narrow accesses half as many
// heads are worthwhile, too, as the accesses dominate a thread's work.
inline int64_t heads_for(int64_t np, int64_t size, int of_narrow, int64_t chunks, int64_t enough) {
  const int64_t several = heads_read(np, size, of_narrow);
  if (chunks >= several * enough) return several;
  return narrow(np, size) && several > 1 && chunks >= several / 2 * enough ? several / 2 : 1;
}

// Select the kernel instance for a dtype, a pairing, chunks of `np` pairs, and one or several heads per thread from a family:
// Family<T, INTERLEAVED_IN, INTERLEAVED_OUT, NP, HEADS>::kernel, and ::OF_NARROW, the heads per thread if accesses are narrow.
template <template <class, bool, bool, int, int> class Family, class T, bool IN, bool OUT, int NP>
auto with_heads(int64_t heads) {
  constexpr int SEVERAL = heads_read(NP, sizeof(T), Family<T, IN, OUT, NP, 1>::OF_NARROW);
  if constexpr (narrow(NP, sizeof(T)) && SEVERAL > 1)
    if (heads == SEVERAL / 2) return Family<T, IN, OUT, NP, SEVERAL / 2>::kernel;
  return heads > 1 ? Family<T, IN, OUT, NP, SEVERAL>::kernel : Family<T, IN, OUT, NP, 1>::kernel;
}

template <template <class, bool, bool, int, int> class Family, class T, bool IN, bool OUT>
auto with_pairs(int64_t np, int64_t heads) {
  constexpr int MOST = 16 / sizeof(T) / (IN || OUT ? 2 : 1);
  if constexpr (MOST >= 8) if (np == 8) return with_heads<Family, T, IN, OUT, 8>(heads);
  if constexpr (MOST >= 4) if (np == 4) return with_heads<Family, T, IN, OUT, 4>(heads);
  if (np == 2) return with_heads<Family, T, IN, OUT, 2>(heads);
  return with_heads<Family, T, IN, OUT, 1>(heads);
}

template <template <class, bool, bool, int, int> class Family, class T>
auto with_pairing(const Plan& plan, int64_t np, int64_t heads) {
#ifdef FUSEWISE_IN
  return with_pairs<Family, T, FUSEWISE_IN, FUSEWISE_OUT>(np, heads);
#else
  if (plan.interleaved_in)
    return (plan.interleaved_out ? with_pairs<Family, T, true, true> : with_pairs<Family, T, true, false>)(np, heads);
  return (plan.interleaved_out ? with_pairs<Family, T, false, true> : with_pairs<Family, T, false, false>)(np, heads);
#endif
}

// Call `f` with a value of the dtype. Compiling all kernels takes most of a minute, so a library is built from one translation unit per
// dtype, which defines FUSEWISE_DTYPE as T; nvcc compiles them in parallel. To inspect the kernels of a single pairing, define
// FUSEWISE_IN and FUSEWISE_OUT as INTERLEAVED_IN and INTERLEAVED_OUT, too.
template <class F>
auto with_dtype(int64_t kind, F f) {
#ifdef FUSEWISE_DTYPE
  return f(FUSEWISE_DTYPE{});
#else
  if (kind == FLOAT32) return f(float{});
  return kind == BFLOAT16 ? f(__nv_bfloat16{}) : f(__half{});
#endif
}

template <template <class, bool, bool, int, int> class Family>
auto kernel_for(const Plan& plan, int64_t np, int64_t heads) {
  return with_dtype(plan.kind, [&](auto element) { return with_pairing<Family, decltype(element)>(plan, np, heads); });
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t SECTOR = 32;  // bytes of a DRAM write sector

// Copying the unrotated features of a head takes `count` accesses of `bytes`, up to two per thread. Returns how many are a thread's
// first: half of them, rounded up until the second ones start at a sector boundary; a sector would otherwise be written in two parts.
inline int64_t first_of_two(const Plan& plan, int operand, int64_t count, int64_t bytes) {
  const int64_t start = plan.start[operand] > 0 ? 0 : 2 * plan.pairs * (plan.kind == FLOAT32 ? 4 : 2);
  int64_t first = ceil_div(count, 2);
  while (first < count && (start + first * bytes) % SECTOR != 0) ++first;
  return first;
}

// The largest power of two, at most 16, that divides all values seen.
struct Alignment {
  uint64_t bits = 16;
  void see(int64_t value) { bits |= static_cast<uint64_t>(value); }
  void see(const void* pointer) { bits |= reinterpret_cast<uintptr_t>(pointer); }
  int64_t bytes() const { return static_cast<int64_t>(bits & -bits); }
};

// Properties of a device: SM count, major compute capability, and bytes of shared memory that a block may have.
struct Device {
  int processors = 132, generation = 0, shared = 227 << 10;
};

inline Device device_at(int index) {
  static Device known[64];
  if (index >= 64) return Device{};
  Device& device = known[index];
  if (device.generation == 0) {
    Device asked;
    if (cudaDeviceGetAttribute(&asked.processors, cudaDevAttrMultiProcessorCount, index) != cudaSuccess ||
        cudaDeviceGetAttribute(&asked.generation, cudaDevAttrComputeCapabilityMajor, index) != cudaSuccess ||
        cudaDeviceGetAttribute(&asked.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, index) != cudaSuccess)
      return Device{};
    device = asked;
  }
  return device;
}

inline Device current_device() {
  int index = 0;
  return cudaGetDevice(&index) == cudaSuccess ? device_at(index) : Device{};
}

// A kernel's side of programmatic dependent launch, before it touches memory: waits until the previous kernel on the stream has completed
// and its writes are visible, and lets the next one launch, which is safe this early since it waits, too.
__device__ __forceinline__ void wait_and_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Launch on a stream of the current device, with programmatic dependent launch: blocks may become resident while the previous
// kernel drains.
template <class Params>
cudaError_t launched(void (*kernel)(Params), dim3 grid, dim3 block, void* stream, const Device& device, const Params& params,
                     size_t shared_memory = 0) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_memory;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = device.generation >= 9 ? 1 : 0;  // older GPUs do not support it
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace
