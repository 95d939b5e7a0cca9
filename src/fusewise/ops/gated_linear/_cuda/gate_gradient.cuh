// GATE: the gradient of the gate from saved pre-activations, an elementwise kernel without a product,
//
//     du = dy · act(g),   dg = dy · u · act'(g)
//
// of dy, u and g (M, F), and the bias gradient as partial sums over rows. du and dg may alias u and g. A thread has eight columns
// (16-byte accesses), a warp 256; the warps of a block take the rows of its share in turn. With sums, shares are few and equal, one
// round of resident blocks, so that few partials are left to add up; without, they are short, and the hardware scheduler balances them.

#pragma once

#include <algorithm>

#include "gate.cuh"
#include "plan.h"
#include "sums.cuh"

namespace {

constexpr int WARPS = 8, BLOCKS = 4;       // of a block; blocks of an SM
constexpr int WIDE = 8, ACROSS = 32 * WIDE;  // columns of a thread, of a warp

struct GateGradient {
  const char *dy, *u, *g;
  char *du, *dg;
  int64_t dy_stride, u_stride, g_stride, du_stride, dg_stride;  // of rows, in bytes
  float* sums;                                                  // (shares, 2, F), or null
  int64_t rows, hidden, share;                                  // of rows, a block
};

// Eight columns of the inputs.
struct Given {
  uint4 dy, u, g;
  __device__ Given(const GateGradient& p, int64_t row, int64_t byte)
      : dy(*reinterpret_cast<const uint4*>(p.dy + row * p.dy_stride + byte)),
        u(*reinterpret_cast<const uint4*>(p.u + row * p.u_stride + byte)),
        g(*reinterpret_cast<const uint4*>(p.g + row * p.g_stride + byte)) {}
};

template <bool BFLOAT16, int ACTIVATION>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS) gate_gradient_kernel(const __grid_constant__ GateGradient p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t across = (p.hidden + ACROSS - 1) / ACROSS, below = blockIdx.x / across, first = blockIdx.x % across * ACROSS;
  const int64_t column = first + lane * WIDE, byte = column * 2, end = min(p.rows, (below + 1) * p.share);
  float sums[2][WIDE] = {};
  int64_t row = below * p.share + warp;
  if (column < p.hidden && row < end) {
    Given now(p, row, byte);
    for (; row < end; row += WARPS) {
      Given next = now;  // prefetched before this row is stored: the compiler must assume aliasing
      if (row + WARPS < end) next = Given(p, row + WARPS, byte);
      uint4 du, dg;
#pragma unroll
      for (int i = 0; i < WIDE / 2; ++i) {
        const float2 dy = unpacked<BFLOAT16>((&now.dy.x)[i]), u = unpacked<BFLOAT16>((&now.u.x)[i]), g = unpacked<BFLOAT16>((&now.g.x)[i]);
        const Gradient left = gate_gradient<ACTIVATION>(dy.x, u.x, g.x), right = gate_gradient<ACTIVATION>(dy.y, u.y, g.y);
        (&du.x)[i] = packed<BFLOAT16>(left.u, right.u), (&dg.x)[i] = packed<BFLOAT16>(left.g, right.g);
        if (p.sums != nullptr)
          sums[0][2 * i] += left.u, sums[0][2 * i + 1] += right.u, sums[1][2 * i] += left.g, sums[1][2 * i + 1] += right.g;
      }
      *reinterpret_cast<uint4*>(p.du + row * p.du_stride + byte) = du;
      *reinterpret_cast<uint4*>(p.dg + row * p.dg_stride + byte) = dg;
      now = next;
    }
  }
  if (p.sums == nullptr) return;
  __shared__ float parts[WARPS][2][ACROSS];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < WIDE; ++i) parts[warp][half][lane * WIDE + i] = sums[half][i];
  __syncthreads();
  const int64_t mine = first + threadIdx.x;
  for (int half = 0; half < 2 && mine < p.hidden; ++half) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += parts[i][half][threadIdx.x];
    p.sums[(below * 2 + half) * p.hidden + mine] = sum;
  }
}
static_assert(ACROSS == 32 * WARPS, "a thread adds up a column");

// Launches the kernel on the stream, in shares for so many SMs.
cudaError_t launch_gate_gradient(void (*kernel)(GateGradient), const Plan& of, const Call& c, int processors, cudaStream_t on) {
  const auto bytes = [](const void* matrix) { return static_cast<char*>(const_cast<void*>(matrix)); };
  GateGradient p{bytes(c.x), bytes(c.first), bytes(c.second), bytes(c.u), bytes(c.g)};
  p.dy_stride = of.x_stride * 2, p.u_stride = of.first_stride * 2, p.g_stride = of.second_stride * 2;
  p.du_stride = of.u_stride * 2, p.dg_stride = of.g_stride * 2;
  p.sums = c.sums, p.rows = of.rows, p.hidden = of.hidden;
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t across = up(p.hidden, ACROSS), shares = std::max<int64_t>(1, processors * BLOCKS / across);
  p.share = c.sums != nullptr ? std::max<int64_t>(GATE_ROWS, up(p.rows, shares)) : std::min<int64_t>(128, up(p.rows, 2 * shares));
  p.share = up(p.share, WARPS) * WARPS;
  const int64_t down = up(p.rows, p.share);
  kernel<<<unsigned(across * down), 32 * WARPS, 0, on>>>(p);
  if (const auto error = cudaGetLastError()) return error;
  return add_up(of, c, down, on);
}

}  // namespace
