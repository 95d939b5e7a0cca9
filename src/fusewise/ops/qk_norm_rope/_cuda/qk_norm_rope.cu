// General kernel of qk_norm_rope: RMSNorm of q and k and RoPE in one launch, forward.
//
//     r = 1 / sqrt(mean(x²) + eps),   z = x r (w + offset),   (y_a, y_b) = (z_a cos θ − z_b sin θ, z_b cos θ + z_a sin θ)
//
// Shape legend: T tokens of all batch entries, H heads, D features of a head, P rotated pairs. A head is split into chunks of
// 2 · NP elements as in RoPE's kernel: first those of NP pairs that rotate, then those that only pass. A row is what is normalized
// together: a head, or all heads of a token. A group of threads, a power of two, processes a row: threadIdx.x selects the chunk,
// threadIdx.y the group. Groups cover the rows of q, then of k, then tokens.
//
// The squares of a row are summed as a binary tree over its chunks in order, whatever the number of tokens. So the result for a
// token does not depend on the other tokens of the call.
//
// Every x is read once (twice if a row has more than MOST chunks), every y written once.
//
// The calls of most models have specialized kernels in direct.cuh.

#include <algorithm>

#include "../../rope/_cuda/angles.cuh"
#include "../../rope/_cuda/operands.cuh"
#include "../plan.h"
#include "backward.cuh"
#include "direct.cuh"
#include "sums.cuh"

namespace {

struct Weight {
  const char* data;  // null: there are no weights
  Kind kind;
};

struct Params {
  Operand operands[2];
  Weight weights[2];
  Work work;
  Divisor groups, batch_tokens;         // groups of a token; tokens of a batch entry
  uint32_t all_tokens, first_of_k;      // tokens of all batch entries; index of the first group of k among those of a token
  uint32_t row_heads[2];                // heads of a row
  Divisor of_head[2];                   // and chunks of a head
  uint32_t features[2];                 // of a head
  float shares[2], eps, weight_offset;  // 1 / features of a row
};

// A thread's chunk in a head: its place, angles and weights, from which `write` computes y.
template <class T, bool IN, bool OUT, int NP>
struct Column {
  using From = Chunk<T, IN, NP>;
  Place at;
  float cos[NP], sin[NP], weights[2][NP];  // the weights of the first and second elements of pairs
  bool passes, passes_on;  // of a token past the last sequence; unrotated features that keep their place whatever the pairings

  __device__ __forceinline__ void locate(const Params& p, const Operand& t, uint32_t chunk) {
    at = place_of<T, IN, OUT, NP>(t, chunk, p.work.rotated, p.work.pairs);
    passes = false, passes_on = IN != OUT && NP > 1 && !at.rotates;
  }

  __device__ __forceinline__ void read(From& from, const char* head) const {
    if (passes_on) from.read_on(head + at.x);
    else from.read(head + at.x, at.x_apart, at.both);
  }

  __device__ __forceinline__ float squares(From& from) const {
    float of_pairs[NP];
#pragma unroll
    for (int i = 0; i < NP; ++i) {
      const float a = to_float(from.a(i)), b = Chunk<T, IN, NP>::WHOLE || at.both ? to_float(from.b(i)) : 0.0f;
      of_pairs[i] = fmaf(a, a, b * b);
    }
    return tree_sum<NP>(of_pairs);
  }

  template <class W>
  __device__ __forceinline__ void read_weights(const char* from, float offset) {
    constexpr uint32_t SIZE = sizeof(T);
    Chunk<W, IN, NP> w;
    from += at.x / SIZE * sizeof(W);
    if (passes_on) w.read_on(from);
    else w.read(from, at.x_apart / SIZE * sizeof(W), at.both);
#pragma unroll
    for (int i = 0; i < NP; ++i) weights[0][i] = to_float(w.a(i)) + offset, weights[1][i] = to_float(w.b(i)) + offset;
  }

  // Angles of a token and weights from feature `first` of a row on.
  __device__ __forceinline__ void prepare(const Params& p, const Weight& weight, int64_t first, uint32_t batch, uint32_t token,
                                          uint32_t chunk) {
    if (weight.data && weight.kind == FLOAT32) read_weights<float>(weight.data + first * 4, p.weight_offset);
    if (weight.data && weight.kind == BFLOAT16) read_weights<__nv_bfloat16>(weight.data + first * 2, p.weight_offset);
    if (weight.data && weight.kind == FLOAT16) read_weights<__half>(weight.data + first * 2, p.weight_offset);
    if (at.rotates) angles(p.work, batch, token, chunk * NP, cos, sin, passes);
  }

  __device__ __forceinline__ void write(From& from, char* head, float r, bool weighted) const {
    float z[2][NP];
#pragma unroll
    for (int i = 0; i < NP; ++i) {
      z[0][i] = to_float(from.a(i)) * r, z[1][i] = to_float(from.b(i)) * r;
      if (weighted) z[0][i] *= weights[0][i], z[1][i] *= weights[1][i];
    }
    Chunk<T, OUT, NP> to;
    if (at.rotates) {
#pragma unroll
      for (int i = 0; i < NP; ++i) {
        to.a(i) = from_float<T>(passes ? z[0][i] : fmaf(z[0][i], cos[i], -(z[1][i] * sin[i])));
        to.b(i) = from_float<T>(passes ? z[1][i] : fmaf(z[1][i], cos[i], z[0][i] * sin[i]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * NP; ++i) to.element(i) = from_float<T>(From::WHOLE ? z[i % 2][i / 2] : z[i / NP][i % NP]);
    }
    if (passes_on) to.write_on(head + at.y);
    else to.write(head + at.y, at.y_apart, at.both);
  }
};

// What a thread's group works on: a token and, of its groups, the nth of q or k.
struct Task {
  uint32_t batch, token, nth;
  int of;      // 0: q, 1: k
  bool there;  // not past the last token
  __device__ __forceinline__ explicit Task(const Params& p) {
    const uint32_t group = blockIdx.x * blockDim.y + threadIdx.y, of_all = p.groups(group);
    nth = group - of_all * p.groups.d;
    there = of_all < p.all_tokens;
    batch = p.batch_tokens(of_all), token = of_all - batch * p.batch_tokens.d;
    of = nth >= p.first_of_k;
    if (of) nth -= p.first_of_k;
  }
};

__device__ __forceinline__ const char* head_of(const Operand& t, const Task& task, uint32_t head) {
  return t.x + task.batch * t.x_strides[0] + task.token * t.x_strides[1] + head * t.x_strides[2];
}
__device__ __forceinline__ char* new_head_of(const Operand& t, const Task& task, uint32_t head) {
  return t.y + task.batch * t.y_strides[0] + task.token * t.y_strides[1] + head * t.y_strides[2];
}

// The sum over the threads of a group, a power of two up to MOST. All threads of the block call it.
__device__ __forceinline__ float group_sum(float mine) {
  __shared__ float of_warps[WARP];
  float sum[1] = {mine};
  warp_sums<1, WARP>(sum, blockDim.x);
  if (blockDim.x <= WARP) return sum[0];
  const uint32_t lane = threadIdx.x % WARP, warps = blockDim.x / WARP, first = threadIdx.y * warps;
  if (lane == 0) of_warps[first + threadIdx.x / WARP] = sum[0];
  __syncthreads();
  sum[0] = of_warps[first + lane % warps];
  warp_sums<1, MOST / WARP>(sum, warps);
  return sum[0];
}

template <class T, bool IN, bool OUT, int NP>
__global__ void __launch_bounds__(MOST, 1) norm_rope_kernel(const __grid_constant__ Params p) {
  const Task task(p);
  const Operand& t = p.operands[task.of];
  const Weight& weight = p.weights[task.of];
  const Divisor& of_head = p.of_head[task.of];
  const uint32_t first = task.nth * p.row_heads[task.of], chunks = task.there ? p.row_heads[task.of] * of_head.d : 0;
  const uint32_t steps = (p.row_heads[task.of] * of_head.d + blockDim.x - 1) / blockDim.x;

  wait_and_launch_dependents();
  Column<T, IN, OUT, NP> column;
  Chunk<T, IN, NP> from;
  uint32_t nth, head, chunk;  // of the row's chunks: its head in the row, and in this head
  const auto read = [&](uint32_t step) {
    nth = step * blockDim.x + threadIdx.x;
    if (nth >= chunks) return;
    head = of_head(nth), chunk = nth - head * of_head.d;
    column.locate(p, t, chunk);
    column.read(from, head_of(t, task, first + head));
  };
  const auto prepare = [&] {
    const int64_t features = head * int64_t(p.features[task.of]);
    if (nth < chunks) column.prepare(p, weight, features, task.batch, task.token, chunk);
  };
  float sum = 0.0f;
  for (uint32_t step = steps; step-- > 0;) {
    read(step);
    if (nth < chunks) sum += column.squares(from);
  }
  prepare();
  const float r = reciprocal_rms(group_sum(sum), p.shares[task.of], p.eps);
  for (uint32_t step = 0; step < steps; ++step) {
    if (step > 0) read(step), prepare();
    if (nth < chunks) column.write(from, new_head_of(t, task, first + head), r, weight.data != nullptr);
  }
}

// --- The launch ------------------------------------------------------------------------------------------------------

template <class T, bool IN, bool OUT, int NP, int>
struct NormRope {
  static constexpr int OF_NARROW = 1;
  static constexpr auto kernel = norm_rope_kernel<T, IN, OUT, NP>;
};

// Threads per SM below which chunks are of half the width.
constexpr int FEW = 512;

}  // namespace

#if defined(FUSEWISE_PARTS) && !defined(FUSEWISE_DTYPE)
// The entry point of a library that is compiled in parts, one per dtype.
extern "C" int fusewise_qk_norm_rope_float(const NormPlan*, const NormCall*, void*);
extern "C" int fusewise_qk_norm_rope_bfloat16(const NormPlan*, const NormCall*, void*);
extern "C" int fusewise_qk_norm_rope_half(const NormPlan*, const NormCall*, void*);

extern "C" __attribute__((visibility("default"))) int fusewise_qk_norm_rope(const NormPlan* norm, const NormCall* call, void* stream) {
  const int64_t kind = norm->rotation.kind;
  const auto part = kind == FLOAT32    ? fusewise_qk_norm_rope_float
                    : kind == BFLOAT16 ? fusewise_qk_norm_rope_bfloat16
                                       : fusewise_qk_norm_rope_half;
  return part(norm, call, stream);
}

extern "C" int fusewise_qk_norm_rope_float_backward(const NormGradPlan*, const NormGradCall*, void*);
extern "C" int fusewise_qk_norm_rope_bfloat16_backward(const NormGradPlan*, const NormGradCall*, void*);
extern "C" int fusewise_qk_norm_rope_half_backward(const NormGradPlan*, const NormGradCall*, void*);

extern "C" __attribute__((visibility("default"))) int fusewise_qk_norm_rope_backward(const NormGradPlan* plan, const NormGradCall* call,
                                                                                     void* stream) {
  const int64_t kind = plan->norm.rotation.kind;
  const auto part = kind == FLOAT32    ? fusewise_qk_norm_rope_float_backward
                    : kind == BFLOAT16 ? fusewise_qk_norm_rope_bfloat16_backward
                                       : fusewise_qk_norm_rope_half_backward;
  return part(plan, call, stream);
}
#else
#ifndef FUSEWISE_ENTRY
#define FUSEWISE_ENTRY fusewise_qk_norm_rope
#endif
#define FUSEWISE_JOINED(a, b) a##b
#define FUSEWISE_BACKWARD(entry) FUSEWISE_JOINED(entry, _backward)

// Normalize and rotate every x of the call into its y on a stream of the current device. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int FUSEWISE_ENTRY(const NormPlan* norm, const NormCall* norm_call, void* stream) {
  const Plan& plan = norm->rotation;
  const Call& call = norm_call->rotation;
  const int64_t size = plan.kind == FLOAT32 ? 4 : 2, all_tokens = plan.batch * plan.tokens;
  const int64_t each = plan.interleaved_in || plan.interleaved_out ? 2 : 1;  // elements of a pair in one access
  const Device device = current_device();
  Params p{};
  if (all_tokens == 0) return cudaSuccess;

  // The widest access that the alignment of all addresses allows.
  Alignment data;
  set_operands(p.operands, plan, call, false, data);
  int64_t np = std::max<int64_t>(1, data.bytes() / size / each), features = 0, copied = 0, widest = 0;
  for (int o = 0; o < plan.operands; ++o) {
    p.weights[o] = {static_cast<const char*>(norm_call->weights[o]), static_cast<Kind>(norm->weight_kinds[o])};
    const int64_t weight_size = p.weights[o].kind == FLOAT32 ? 4 : 2;
    Alignment weight;
    weight.see(p.weights[o].data);
    while (np > 1 && weight.bytes() < std::min<int64_t>(16, np * each * weight_size)) np /= 2;
    features += plan.heads[o] * plan.head_dim[o] * all_tokens;
    copied += plan.head_dim[o] - 2 * plan.pairs;
    widest = std::max(widest, (norm->together ? plan.heads[o] : 1) * plan.head_dim[o]);  // row
  }
  if (features == 0) return cudaSuccess;
  // With few tokens most of the GPU idles, and half-width chunks halve the arithmetic in a thread's instruction chain.
  const bool few = features / (2 * np) < int64_t(device.processors) * FEW;
  if (few && copied == 0 && np > 2 && widest / np <= MOST) np /= 2;
  set_angles(p.work, plan, call, np, false);
  set_copies(p.operands, plan, np);
  p.eps = static_cast<float>(norm->eps), p.weight_offset = static_cast<float>(norm->weight_offset);
  p.all_tokens = static_cast<uint32_t>(all_tokens), p.batch_tokens = Divisor(plan.tokens);

  int64_t of_row = 0;  // chunks
  for (int o = 0; o < plan.operands; ++o) {
    const int64_t chunks = p.work.rotated + p.operands[o].copied;
    p.row_heads[o] = norm->together ? p.operands[o].heads : 1;
    p.of_head[o] = Divisor(chunks), p.features[o] = static_cast<uint32_t>(plan.head_dim[o]);
    p.shares[o] = share_of(p.row_heads[o] * plan.head_dim[o]);
    of_row = std::max(of_row, chunks * p.row_heads[o]);
  }
  if (Direct d{}; direct(*norm, *norm_call, p.work, np, d))
    return with_dtype(plan.kind, [&](auto element) { return launch_direct<decltype(element)>(d, *norm, np, stream, device); });

  int64_t groups = 0;
  for (int o = 0; o < plan.operands; ++o) {
    groups += norm->together ? plan.heads[o] > 0 : plan.heads[o];
    if (o == 0) p.first_of_k = static_cast<uint32_t>(groups);
  }
  p.groups = Divisor(groups);
  const int64_t across = std::min<int64_t>(power_of_two(of_row), MOST), side = side_of(across, groups * all_tokens, device);
  const int64_t blocks = ceil_div(groups * all_tokens, side);
  if (blocks * side > INT32_MAX) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks)), block(static_cast<unsigned>(across), static_cast<unsigned>(side));
  return launched(kernel_for<NormRope>(plan, np, 1), grid, block, stream, device, p);
}

// Write the gradients of a call for which `fusewise_qk_norm_rope_partials` is at least 0. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int FUSEWISE_BACKWARD(FUSEWISE_ENTRY)(const NormGradPlan* plan, const NormGradCall* call,
                                                                                        void* stream) {
  const Device device = current_device();
  Backward p{};
  if (!backward(*plan, *call, device, p)) return cudaErrorInvalidValue;
  if (call->dweights[0] != nullptr) {
    p.tensors[0].partials = static_cast<float*>(call->partials);
    p.tensors[1].partials = p.tensors[0].partials + int64_t(p.tensors[0].blocks) * p.tensors[0].width;
  }
  return with_dtype(plan->norm.rotation.kind, [&](auto element) { return launch_backward<decltype(element)>(p, *plan, stream, device); });
}
#endif

#if !defined(FUSEWISE_PARTS) || !defined(FUSEWISE_DTYPE)
// How many float32 partial sums the backward of a call on a device needs, or -1 if there is no kernel for it.
extern "C" __attribute__((visibility("default"))) int64_t fusewise_qk_norm_rope_partials(const NormGradPlan* plan, const NormGradCall* call,
                                                                                         int device) {
  Backward p{};
  if (!backward(*plan, *call, device_at(device), p)) return -1;
  if (call->dweights[0] == nullptr) return 0;
  return int64_t(p.tensors[0].blocks) * p.tensors[0].width + int64_t(p.tensors[1].blocks) * p.tensors[1].width;
}

// A cudaError_t that tells whether the kernels can run on the current device, and if not, why.
extern "C" __attribute__((visibility("default"))) int fusewise_qk_norm_rope_probe() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, norm_rope_kernel<float, false, false, 1>);
}

extern "C" __attribute__((visibility("default"))) const char* fusewise_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
#endif
