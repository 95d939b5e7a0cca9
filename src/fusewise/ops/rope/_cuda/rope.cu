// General RoPE kernel in CUDA: q and k in one launch, forward and backward (the transposed rotation).
//
//     (y_a, y_b) = (x_a cos θ − x_b sin θ, x_b cos θ + x_a sin θ)
//
// Shape legend: B batch, T tokens, H heads, D features of a head, P rotated pairs. A head is split into chunks of 2 · NP
// elements, one or two accesses of up to 16 bytes: first the chunks of NP pairs that rotate, then those that are only
// copied (out of place). threadIdx.x selects the chunk, y the head, z the token; a thread processes its chunk of several
// heads and computes or loads cos θ and sin θ once for them, float32 in registers. Consecutive threads cover consecutive
// chunks, then heads, then tokens: accesses coalesce to whole cache lines and no thread idles, whatever the widths. x is
// read once, y written once; float32 arithmetic with one final rounding.
//
// The kernel is memory-bound: a thread issues all its loads before it uses the first, and block-uniform values are
// computed once per block. With few tokens it is latency-bound: x is loaded before the position and the table row, which
// are dependent loads. The most common calls have specialized kernels in light.cuh and bulk.cuh.

#include <algorithm>

#include "../plan.h"
#include "angles.cuh"
#include "bulk.cuh"
#include "launch.cuh"
#include "light.cuh"
#include "operands.cuh"

namespace {

struct Params {
  Operand tensors[2];
  Work work;
};

// One thread's work on tensor `t`. Each call site passes a fixed tensor, so that block-uniform values stay in uniform registers.
template <class T, bool IN, bool OUT, int NP, int HEADS>
__device__ __forceinline__ void rotate(const Work& p, const Operand& t, uint32_t part, uint32_t batch, uint32_t tile) {
  const uint32_t first_head = part * (HEADS * p.steps * blockDim.y), first_token = tile * blockDim.z;
  const char* block_x = t.x + batch * t.x_strides[0] + first_token * t.x_strides[1] + first_head * t.x_strides[2];
  char* block_y = t.y + batch * t.y_strides[0] + first_token * t.y_strides[1] + first_head * t.y_strides[2];
  const int64_t x_step = blockDim.y * t.x_strides[2], y_step = blockDim.y * t.y_strides[2];

  const uint32_t token = first_token + threadIdx.z, chunk = threadIdx.x;
  const bool active = token < p.tokens && chunk < p.rotated + t.copied;
  const Place at = place_of<T, IN, OUT, NP>(t, chunk, p.rotated, p.pairs);
  bool rotates = at.rotates;
  const char* x = block_x + threadIdx.z * t.x_strides[1] + threadIdx.y * t.x_strides[2] + at.x;
  char* y = block_y + threadIdx.z * t.y_strides[1] + threadIdx.y * t.y_strides[2] + at.y;
  int heads = active ? int(t.heads - first_head - threadIdx.y) : 0;  // remaining, from this thread's first head on

  wait_and_launch_dependents();
  Chunk<T, IN, NP> from[HEADS];
  const bool passes_on = IN != OUT && NP > 1 && !rotates;  // copied features keep their place whatever the pairings
  const auto read = [&](int i) {
    if (passes_on)
      from[i].read_on(x + i * x_step);
    else
      from[i].read(x + i * x_step, at.x_apart, at.both);
  };
#pragma unroll
  for (int i = 0; i < HEADS; ++i)
    if (i * int(blockDim.y) < heads) read(i);
  float cos[NP], sin[NP];
  bool passes = false;
  if (active && rotates) angles(p, batch, token, chunk * NP, cos, sin, passes);
  if (IN == OUT && passes) rotates = false;
  for (uint32_t step = 0; step < p.steps; ++step) {
    if (step > 0) {
      x += HEADS * x_step, y += HEADS * y_step, heads -= HEADS * blockDim.y;
#pragma unroll
      for (int i = 0; i < HEADS; ++i)
        if (i * int(blockDim.y) < heads) read(i);
    }
    if (IN != OUT && p.in_place) __syncthreads();  // the whole head must be read before any thread writes to it
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
      if (i * int(blockDim.y) >= heads) continue;
      if (passes_on) {
        from[i].write_on(y + i * y_step);
        continue;
      }
      Chunk<T, OUT, NP> to;
      turn<T, IN, OUT, NP>(from[i], to, cos, sin, rotates, passes);
      to.write(y + i * y_step, at.y_apart, at.both);
    }
  }
}

// A block processes a tile of blockDim.z tokens of one batch entry, and of those a part of the heads of one tensor. Block order,
// fastest first: the parts of a tile, the tiles of a stripe, the batch entries, the stripes; so table rows are reused from L2.
template <class T, bool IN, bool OUT, int NP, int HEADS>
__global__ void __launch_bounds__(most_threads(NP), (HEADS > 1 ? 768 : 1024) / most_threads(NP))
    rope_kernel(const __grid_constant__ Params params) {
  const Work& p = params.work;
  const uint32_t nth = p.parts(blockIdx.x), part = blockIdx.x - nth * p.parts.d;
  const uint32_t run = p.stripe(nth), stripe = p.batches(run), batch = run - stripe * p.batches.d;
  const uint32_t tile = stripe * p.stripe.d + (nth - run * p.stripe.d);
  if (part < p.q_parts) {
    rotate<T, IN, OUT, NP, HEADS>(p, params.tensors[0], part, batch, tile);
  } else {
    rotate<T, IN, OUT, NP, HEADS>(p, params.tensors[1], part - p.q_parts, batch, tile);
  }
}

// --- The launch ------------------------------------------------------------------------------------------------------

constexpr int NARROW_HEADS = 8;  // heads per thread if accesses are narrow
// Threads per SM, an eighth of full occupancy, beyond which more work per thread pays off more than more threads.
constexpr int ENOUGH = 256;

template <class T, bool IN, bool OUT, int NP, int HEADS>
struct Rotate {
  static constexpr int OF_NARROW = NARROW_HEADS;
  static constexpr auto kernel = rope_kernel<T, IN, OUT, NP, HEADS>;
};

}  // namespace

#if defined(FUSEWISE_PARTS) && !defined(FUSEWISE_DTYPE)
// The entry point of a library that is compiled in parts, one per dtype.
extern "C" int fusewise_rope_float(const Plan*, const Call*, void*);
extern "C" int fusewise_rope_bfloat16(const Plan*, const Call*, void*);
extern "C" int fusewise_rope_half(const Plan*, const Call*, void*);

extern "C" __attribute__((visibility("default"))) int fusewise_rope(const Plan* plan, const Call* call, void* stream) {
  const int64_t kind = plan->kind;
  const auto part = kind == FLOAT32 ? fusewise_rope_float : kind == BFLOAT16 ? fusewise_rope_bfloat16 : fusewise_rope_half;
  return part(plan, call, stream);
}
#else
#ifndef FUSEWISE_ENTRY
#define FUSEWISE_ENTRY fusewise_rope
#endif

// Rotate every x of the call into its y on a stream of the current device. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int FUSEWISE_ENTRY(const Plan* plan, const Call* call, void* stream) {
  const int64_t size = plan->kind == FLOAT32 ? 4 : 2;
  const bool halves = !plan->interleaved_in && !plan->interleaved_out;
  Params params{};
  Work& p = params.work;

  // Batch entries of one token each are treated as the tokens of one entry, so that a block can take several.
  const bool alone = plan->tokens == 1 && plan->batch > 1 && plan->table_strides[0] == 0;
  const int64_t batch = alone ? 1 : plan->batch, tokens = alone ? plan->batch : plan->tokens;
  if (tokens == 0 || batch == 0) return cudaSuccess;

  // The widest access that the alignment of all addresses allows.
  Alignment data;
  set_operands(params.tensors, *plan, *call, alone, data);
  const int64_t np = std::max<int64_t>(1, data.bytes() / size / (halves ? 1 : 2));

  set_angles(p, *plan, *call, np, alone);
  set_copies(params.tensors, *plan, np);
  p.in_place = plan->in_place;

  // Heads per thread: as many as leave enough threads to fill the GPU.
  uint32_t chunks = 0;
  int64_t most_heads = 0, all = 0;
  for (int o = 0; o < plan->operands; ++o) {
    const Operand& t = params.tensors[o];
    chunks = std::max(chunks, p.rotated + t.copied);
    most_heads = std::max<int64_t>(most_heads, t.heads);
    all += int64_t(t.heads) * (p.rotated + t.copied) * tokens * batch;
  }
  if (all == 0) return cudaSuccess;
  const Device device = current_device();
  const int64_t enough = int64_t(device.processors) * ENOUGH;
  if (Bulk b{}; bulk(*plan, *call, batch, tokens, data.bytes(), alone, device, b))
    return launch_bulk(b, *plan, batch, data.bytes(), device, stream);
  if (Light l{}; all >= enough && light(*plan, *call, batch, tokens, data.bytes(), alone, l)) {
    for (int o = 0; o < plan->operands; ++o) {
      const Operand& t = params.tensors[o];
      l.tensors[o].x = t.x, l.tensors[o].y = t.y;
      std::copy_n(t.x_strides, 3, l.tensors[o].x_strides), std::copy_n(t.y_strides, 3, l.tensors[o].y_strides);
    }
    return launch_light(l, *plan, batch, data.bytes(), device, stream);
  }
  const int64_t unrolled = heads_for(np, size, NARROW_HEADS, all, enough);
  const bool costly = p.read == OF_ANGLES || p.read == OF_FREQUENCIES;  // computed angles are amortized over more heads
  p.steps = static_cast<uint32_t>(costly ? std::clamp<int64_t>(all / (16 * enough * unrolled), 1, 8) : 1);
  const int64_t head_threads = std::max<int64_t>(1, THREADS / chunks);
  int64_t fewest = most_heads;
  for (int o = 0; o < plan->operands; ++o)
    if (params.tensors[o].heads) fewest = std::min(fewest, ceil_div(params.tensors[o].heads, unrolled * p.steps));
  const int64_t most = std::clamp<int64_t>(fewest, 1, head_threads);  // threads for heads in a block
  int64_t block_tokens = std::clamp<int64_t>(head_threads / most, 1, std::min<int64_t>(tokens, 64));
  while (block_tokens > 1 && all / (chunks * most * block_tokens * unrolled * p.steps) < 4 * device.processors) block_tokens /= 2;
  int64_t parts = 0;
  for (int o = 0; o < plan->operands; ++o) {
    parts += ceil_div(params.tensors[o].heads, most * unrolled * p.steps);
    if (o == 0) p.q_parts = static_cast<uint32_t>(parts);
  }
  const int64_t tiles = ceil_div(tokens, block_tokens);
  p.parts = Divisor(parts);
  p.stripe = Divisor(stripe_of(*plan, batch, tiles, all / (batch * tokens) * 4 * np * size, block_tokens));
  p.batches = Divisor(batch);

  const dim3 grid(static_cast<unsigned>(tiles * batch * parts));
  const dim3 block(chunks, static_cast<unsigned>(most), static_cast<unsigned>(block_tokens));
  return launched(kernel_for<Rotate>(*plan, np, unrolled), grid, block, stream, device, params);
}
#endif

#if !defined(FUSEWISE_PARTS) || !defined(FUSEWISE_DTYPE)
// A cudaError_t that tells whether the kernels can run on the current device, and if not, why.
extern "C" __attribute__((visibility("default"))) int fusewise_rope_probe() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, rope_kernel<float, false, false, 1, 1>);
}

extern "C" __attribute__((visibility("default"))) const char* fusewise_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
#endif
