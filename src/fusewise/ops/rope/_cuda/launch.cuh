// What the host decides before a launch: how wide accesses may be, how many heads a thread has, and which kernel that is.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../plan.h"

namespace {

constexpr int THREADS = 128;  // of a block, at most, where a head of 512 features has no more chunks
constexpr int READ = 128;     // bytes that a thread reads at once where there is enough to do

// A head is in one block: in chunks of a single pair it may have 256.
constexpr int most_threads(int np) { return np > 1 ? THREADS : 2 * THREADS; }

// Heads of which a thread then has a chunk of NP pairs. Its first instructions, as many as those for 30 bytes, serve all.
// `of_narrow`: where accesses are of less than 8 bytes.
constexpr bool narrow(int64_t np, int64_t size) { return np * size < 8; }
constexpr int heads_read(int64_t np, int64_t size, int of_narrow) { return narrow(np, size) ? of_narrow : int(READ / (2 * np * size)); }

// The heads of a thread in a call of so many chunks, of which there are to be `enough` threads at least. Narrow
// accesses are most of a thread's work, so that half as many heads are worth it, too.
inline int64_t heads_for(int64_t np, int64_t size, int of_narrow, int64_t chunks, int64_t enough) {
  const int64_t several = heads_read(np, size, of_narrow);
  if (chunks >= several * enough) return several;
  return narrow(np, size) && several > 1 && chunks >= several / 2 * enough ? several / 2 : 1;
}

// The kernel for a dtype, a pairing, chunks of `np` pairs, and one head or several a thread, out of a family of them:
// Family<T, INTERLEAVED_IN, INTERLEAVED_OUT, NP, HEADS>::kernel, and ::OF_NARROW, the heads of a thread where accesses are narrow.
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
#ifdef FUSEWISE_DTYPE
  return with_pairs<Family, T, FUSEWISE_IN, FUSEWISE_OUT>(np, heads);
#else
  if (plan.interleaved_in)
    return (plan.interleaved_out ? with_pairs<Family, T, true, true> : with_pairs<Family, T, true, false>)(np, heads);
  return (plan.interleaved_out ? with_pairs<Family, T, false, true> : with_pairs<Family, T, false, false>)(np, heads);
#endif
}

// `f` of an element of the dtype. All kernels take most of a minute to compile: who wants to see those of one dtype and pairing
// defines FUSEWISE_DTYPE, FUSEWISE_IN and FUSEWISE_OUT as their T, INTERLEAVED_IN and INTERLEAVED_OUT. The library has all.
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

constexpr int64_t SECTOR = 32;  // bytes that memory is written in

// Of `count` accesses of `bytes` that copy what does not rotate of a head, those that are the first of two of a thread: half of them,
// and as many more as it takes for the second ones to begin with a sector, which is written in two parts otherwise.
inline int64_t first_of_two(const Plan& plan, int operand, int64_t count, int64_t bytes) {
  const int64_t start = plan.start[operand] > 0 ? 0 : 2 * plan.pairs * (plan.kind == FLOAT32 ? 4 : 2);
  int64_t first = ceil_div(count, 2);
  while (first < count && (start + first * bytes) % SECTOR != 0) ++first;
  return first;
}

// The largest power of two, 16 at most, that divides all bits seen.
struct Alignment {
  uint64_t bits = 16;
  void see(int64_t value) { bits |= static_cast<uint64_t>(value); }
  void see(const void* pointer) { bits |= reinterpret_cast<uintptr_t>(pointer); }
  int64_t bytes() const { return static_cast<int64_t>(bits & -bits); }
};

// Of the current device.
struct Device {
  int processors = 132, generation = 0;
};

inline Device current_device() {
  static Device known[64];
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess || index >= 64) return Device{};
  Device& device = known[index];
  if (device.generation == 0) {
    Device asked;
    if (cudaDeviceGetAttribute(&asked.processors, cudaDevAttrMultiProcessorCount, index) != cudaSuccess ||
        cudaDeviceGetAttribute(&asked.generation, cudaDevAttrComputeCapabilityMajor, index) != cudaSuccess)
      return Device{};
    device = asked;
  }
  return device;
}

// Launch on a stream of the current device. The blocks may take their places while the last ones of the kernel before are
// still at work: the kernel waits for that one's end before it touches memory.
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
  config.numAttrs = device.generation >= 9 ? 1 : 0;  // older GPUs have no such launch
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace
