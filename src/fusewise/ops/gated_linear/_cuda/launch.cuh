// The host's side of products.cuh: TMA descriptors, tiles and the launch.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "matrices.cuh"
#include "plan.h"
#include "products.cuh"
#include "sums.cuh"

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

// Launches a kernel of a plan on a stream, and adds up the partial sums that it makes.
cudaError_t launch_product(const Product& found, const Plan& of, const Call& c, int processors, cudaStream_t on) {
  Params p{};
  p.value_bias = c.value_bias, p.gate_bias = c.gate_bias, p.sums = c.sums;
  p.value_bias_stride = of.value_bias_stride, p.gate_bias_stride = of.gate_bias_stride;
  p.rows = int(of.rows), p.hidden = int(of.hidden), p.steps = int((of.depth + found.step - 1) / found.step);
  // Before the descriptors are encoded: it binds the device's primary context to this thread, without which the driver encodes none.
  const int bytes = int(found.shared);
  if (const auto error = cudaFuncSetAttribute(found.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;

  // TMA rounds operands to tf32 on the way, as cuBLAS does; wgmma would cut them off, with four times the error.
  const auto operand = found.tf32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : half_type(of);
  const auto other = found.tf32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : half_type(of);
  const auto weight = [&](CUtensorMap* map, const void* matrix, int64_t stride) {
    if (of.epilogue == DOWN) return describe(map, operand, matrix, stride, of.depth, of.hidden, found.weight_box, BOX);
    return describe(map, operand, matrix, stride, of.hidden, of.depth, found.weight_box, found.step);
  };
  const auto outer = [&](CUtensorMap* map, const void* matrix, int64_t stride) {
    return describe(map, other, matrix, stride, of.rows, of.hidden, found.height, found.piece);
  };
  p.edge = std::max(1, ceil_div(p.rows % found.high, 8 * found.sharing)) * 8;
  if (!describe(&p.x, operand, c.x, of.x_stride, of.rows, of.depth, found.high / found.sharing, found.step) ||
      !describe(&p.x_edge, operand, c.x, of.x_stride, of.rows, of.depth, p.edge, found.step) ||
      !describe(&p.y_edge, other, found.sharing > 1 ? c.y : nullptr, of.y_stride, of.rows, of.hidden, p.edge, found.piece) ||
      !weight(&p.value, c.value, of.value_stride) || !weight(&p.gate, c.gate, of.gate_stride) || !outer(&p.y, c.y, of.y_stride) ||
      !outer(&p.u, c.u, of.u_stride) || !outer(&p.g, c.g, of.g_stride) || !outer(&p.first, c.first, of.first_stride) ||
      !outer(&p.second, c.second, of.second_stride))
    return cudaErrorInvalidValue;

  const int tiles = ceil_div(p.rows, found.down_step) * ceil_div(p.hidden, found.across_step), most = std::max(1, processors / CLUSTER);
  const int left = tiles % most;  // in the last wave
  p.whole = found.sharing > 1 && 2 * left <= most ? tiles - left : tiles, p.turns = 2 * tiles - p.whole;
  if (found.sharing == 1 && p.steps >= SYNC_STEPS && tiles > (SYNC_WAVES - 1) * most)
    if (const auto error = next_wave_counter(p.wave_counter, on)) return error;
  found.kernel<<<unsigned(std::min(p.turns, most) * CLUSTER), 3 * GROUP, bytes, on>>>(p);
  if (const auto error = cudaGetLastError()) return error;
  return add_up(of, c, (of.rows + ROWS - 1) / ROWS, on);
}

}  // namespace
