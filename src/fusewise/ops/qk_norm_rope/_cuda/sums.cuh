// The sum of squares of a row, as a binary tree over its pairs in order, the reciprocal root mean square, and blocks of groups that sum.

#pragma once

#include <algorithm>

#include "../../rope/_cuda/launch.cuh"

namespace {

constexpr int MOST = 512;  // threads of a row

template <int N>
__device__ __forceinline__ float tree_sum(const float* x) {
  if constexpr (N == 1) return x[0];
  else return tree_sum<N / 2>(x) + tree_sum<N / 2>(x + N / 2);
}

// Sums over each `lanes` adjacent lanes of a warp, a power of two, at most LANES. All threads of the warp call it.
template <int N, int LANES>
__device__ __forceinline__ void warp_sums(float (&sums)[N], uint32_t lanes = LANES) {
#pragma unroll
  for (uint32_t step = 1; step < LANES; step *= 2)
    if (step < lanes)
#pragma unroll
      for (int i = 0; i < N; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], step);
}

inline int64_t power_of_two(int64_t least) {
  int64_t power = 1;
  while (power < least) power *= 2;
  return power;
}

// Groups of `across` threads in a block: THREADS in all, or as few as whole warps allow where blocks are fewer than the GPU can hold.
inline int64_t side_of(int64_t across, int64_t groups, const Device& device) {
  int64_t threads = THREADS;
  while (threads > WARP && groups * across / threads < 4 * device.processors) threads /= 2;
  return std::max<int64_t>(1, threads / across);
}

inline float share_of(int64_t features) { return features > 0 ? 1.0f / static_cast<float>(features) : 0.0f; }

__device__ __forceinline__ float reciprocal_rms(float squares, float share, float eps) { return rsqrtf(fmaf(squares, share, eps)); }

}  // namespace
