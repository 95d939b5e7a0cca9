// The bias gradient: partial sums over rows, reduced in a fixed order (bit-reproducible).

#pragma once

#include "plan.h"

namespace {

// The sums over R rows of (R, width), 32 columns a block.
__global__ void __launch_bounds__(256) add_up_kernel(const float* sums, float* to, int64_t rows, int64_t width) {
  __shared__ float parts[8][32];
  const int64_t column = int64_t(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0.0f;
  if (column < width)
    for (int64_t row = threadIdx.y; row < rows; row += 8) sum += sums[row * width + column];
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < width) {
    for (int i = 1; i < 8; ++i) sum += parts[i][threadIdx.x];
    to[column] = sum;
  }
}

// Reduces `count` partial sums to the bias gradient, if it is wanted.
cudaError_t add_up(const Plan& of, const Call& c, int64_t count, cudaStream_t on) {
  if (c.sums == nullptr) return cudaSuccess;
  const int64_t width = 2 * of.hidden;
  add_up_kernel<<<unsigned((width + 31) / 32), dim3(32, 8), 0, on>>>(c.sums, c.dbias, count, width);
  return cudaGetLastError();
}

}  // namespace
