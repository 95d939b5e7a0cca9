// Backward kernels of qk_norm_rope, for the calls that direct.cuh supports with the widest accesses:
//
//     dz = Rᵀ dy,   h = dz (w + offset),   dx = r h − x r³ mean(h x),   dw = Σ dz x r
//
// dy and x are read once (r is recomputed from x), dx is written once. A row is what is normalized together: a head, or all heads of a
// token. The kernel is persistent: a block has rows of q or of k only, and a thread the same features of all its rows, so the weights
// and their gradient stay in registers. In the end a block writes the sums of its rows, and `sum_kernel` adds those of all blocks,
// both in a fixed order.
//
// A thread copies what it will need of the next rows to its own place in shared memory: with what registers allow, too few bytes would
// be under way. If heads are normalized alone, it has HEADS adjacent ones of a token at a time, which share the table row and most of
// the index computation.

#pragma once

#include "../../rope/_cuda/async.cuh"
#include "direct.cuh"

namespace {

constexpr int BACKWARD_THREADS = 256;  // of a block, unless a row takes more
constexpr int BACKWARD_RESIDENT = 512;  // of an SM, at the registers that the kernel takes
constexpr int DECLARED = 1 << 10;  // bytes of shared memory: at least what kernels declare
constexpr int FREE_SHARED = (48 << 10) - DECLARED;  // that a launch may ask for without a permission

template <bool TOGETHER>
constexpr int HEADS_AT_ONCE = TOGETHER ? 1 : 2;
template <bool TOGETHER>
constexpr int STAGED = TOGETHER ? 4 : 2;  // parts of a thread in shared memory

// What threads have at a time: all heads of a token, or a part of them, HEADS_AT_ONCE. Also the distance of two.
struct Part {
  uint32_t batch, token, part;
};

struct BackwardTensor {
  const char* dy;
  float* partials;  // of each block, a sum per weight; null if they are not wanted
  char* dweight;
  uint32_t strides[3];                   // bytes of dy: batch, token, head
  uint32_t across, at_once;              // threads of a part, parts of a block at a time
  uint32_t blocks, steps, parts, width;  // steps of a block; parts of a token; weights
  Divisor of_part;
  Part step;  // from a part of a thread to its next
};

struct Backward {
  Direct direct;  // its y is dx
  BackwardTensor tensors[2];
  uint32_t batches;
  bool weights_are_floats;
};

// In a branch: keeps the compiler from computing it always, with a selection per value.
__device__ __forceinline__ void not_selected() {
#ifdef __CUDA_ARCH__
  asm volatile("");
#endif
}

// Sums over the threads of a part. `nth`: of a block's calls; all threads of the block make them.
template <bool TOGETHER, int N>
__device__ __forceinline__ void part_sums(float (&sums)[N], uint32_t across, uint32_t nth) {
  if constexpr (!TOGETHER) {
    if (across == 8) warp_sums<N, 8>(sums);
    else if (across == 16) warp_sums<N, 16>(sums);
    else warp_sums<N, WARP>(sums, across);
  } else {
    warp_sums<N, WARP>(sums);
    if (across == WARP) return;
    __shared__ float2 of_warps[2][2 * MOST / WARP];  // alternately: a warp may be a step ahead of another that still reads
    const uint32_t warps = across / WARP, first = threadIdx.x / across * warps, lane = threadIdx.x % (MOST / WARP);
    if (threadIdx.x % WARP == 0) of_warps[nth % 2][threadIdx.x / WARP] = float2{sums[0], sums[1]};
    __syncthreads();
    const float2 mine = lane < warps ? of_warps[nth % 2][first + lane] : float2{0.0f, 0.0f};
    sums[0] = mine.x, sums[1] = mine.y;
    warp_sums<2, MOST / WARP>(sums);
  }
}

// The parts of a block. OF: 0 for q, 1 for k; its parameters are then at fixed places.
template <class T, class TABLE, bool INTERLEAVED, bool TOGETHER, int OF>
__device__ __forceinline__ void backward_parts(const Backward& p, uint32_t block) {
  constexpr int NP = 16 / sizeof(T) / (INTERLEAVED ? 2 : 1), HEADS = HEADS_AT_ONCE<TOGETHER>, STAGES = STAGED<TOGETHER>;
  using Chunks = Packed<T, INTERLEAVED, NP>;
  constexpr int PARTS = Chunks::PARTS, PIECES = 2 * PARTS * HEADS;  // of 16 bytes, of a thread and stage
  const DirectTensor& t = p.direct.tensors[OF];
  const BackwardTensor& b = p.tensors[OF];
  const uint32_t thread = threadIdx.x, y = thread / b.across, x = thread - y * b.across;
  const uint32_t in_row = TOGETHER ? p.direct.of_head(x) : 0, in_head = x - in_row * p.direct.of_head.d;  // head and chunk
  const bool works = y < b.at_once && in_head < p.direct.of_head.d && in_row < t.heads;
  const uint32_t chunk = min(in_head, p.direct.of_head.d - 1), only = min(in_row, t.heads - 1);
  using Halves = Spot<T, INTERLEAVED, NP, /*HALVES=*/true>;  // the copies bypass L1, and would read a sector in two parts
  const Halves spot(p.direct, chunk);
  const uint32_t at = spot.at, apart = spot.apart;

  const auto first = [&] {
    const uint32_t nth = block * b.at_once + y, all = b.of_part(nth), batch = p.direct.of_batch(all);
    return Part{batch, all - batch * p.direct.of_batch.d, nth - all * b.parts};
  };
  const auto advance = [&](Part& place) {
    place.token += b.step.token, place.batch += b.step.batch;
    if (!TOGETHER) {
      place.part += b.step.part;
      if (place.part >= b.parts) place.part -= b.parts, ++place.token;
    }
    if (place.token >= p.direct.of_batch.d) place.token -= p.direct.of_batch.d, ++place.batch;
  };
  const auto head_at = [&](const Part& place) { return TOGETHER ? only : place.part * HEADS; };
  // Heads of this thread that there are.
  const auto count_at = [&](const Part& place) { return works && place.batch < p.batches ? int(t.heads - head_at(place)) : 0; };
  const auto offset = [&](const Part& place, const uint32_t (&strides)[3]) {
    return uint64_t(place.batch) * strides[0] + uint64_t(place.token) * strides[1] + uint64_t(head_at(place)) * strides[2] + at;
  };
  const auto turn_at = [&](const Part& place) {
    return Turn<TABLE, NP>(p.direct, Position(p.direct, min(place.batch, p.batches - 1), place.token), chunk);
  };

  char* const mine = dynamic_smem() + thread * 16;
  const uint32_t piece = blockDim.x * 16;
  uint32_t fetched = 0;  // the stage of the next copies
  const auto fetch = [&](const Part& place) {
    const int count = count_at(place);
    const char *const of_x = t.x + offset(place, t.x_strides), *const of_dy = b.dy + offset(place, b.strides);
    char* const to = mine + fetched * PIECES * piece;
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
      if (h < count)
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          copy_async(of_x + h * t.x_strides[2] + i * apart, to + (2 * h * PARTS + i) * piece);
          copy_async(of_dy + h * b.strides[2] + i * apart, to + ((2 * h + 1) * PARTS + i) * piece);
        }
    group_copies();
    fetched = fetched + 1 == STAGES ? 0 : fetched + 1;
  };

  wait_and_launch_dependents();
  Part here = first(), ahead = here;
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) fetch(ahead), advance(ahead);

  float scale_a[NP], scale_b[NP], dw_a[NP], dw_b[NP];  // of the first and second elements of pairs
#pragma unroll
  for (int i = 0; i < NP; ++i) scale_a[i] = scale_b[i] = 1.0f, dw_a[i] = dw_b[i] = 0.0f;
  if (p.direct.weighted) {
    const auto read = [&](auto weights) {
      const uint32_t wider = sizeof(weights) / sizeof(Chunks);
      weights.read(t.weight + only * t.weight_head + at * wider, apart * wider);
      weights.get(scale_a, scale_b, 0);
    };
    if (p.weights_are_floats) read(Packed<float, INTERLEAVED, NP>());
    else read(Chunks());
#pragma unroll
    for (int i = 0; i < NP; ++i) scale_a[i] += p.direct.weight_offset, scale_b[i] += p.direct.weight_offset;
  }

  Turn<TABLE, NP> next = turn_at(here);
  uint32_t stage = 0;
#pragma unroll 1
  for (uint32_t step = 0; step < b.steps; ++step) {
    const int count = count_at(here);
    char* const to = t.y + offset(here, t.y_strides);
    const Turn<TABLE, NP> turn = TOGETHER ? next : turn_at(here);
    wait_for_copies<STAGES - 2>();
    advance(here);
    if (TOGETHER) next = turn_at(here);  // the warps of a block wait for each other, so the latency would show
    fetch(ahead), advance(ahead);
    const char* const from = mine + stage * PIECES * piece;
    stage = stage + 1 == STAGES ? 0 : stage + 1;

    float dz_a[HEADS][NP], dz_b[HEADS][NP], sums[2 * HEADS];  // per head: of squares, and of h x
    float cos[NP], sin[NP];
    turn.cosines.get(cos), turn.sines.get(sin);
    if (!turn.inside) {
      not_selected();
#pragma unroll
      for (int i = 0; i < NP; ++i) cos[i] = sin[i] = __int_as_float(0x7fffffff);
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      Chunks of_x, of_dy;
      of_x.read(from + 2 * h * PARTS * piece, piece), of_dy.read(from + (2 * h + 1) * PARTS * piece, piece);
      float a[NP], c[NP];
      of_x.get(a, c, 0), of_dy.get(dz_a[h], dz_b[h], 0);
      if (turn.turns)
#pragma unroll
        for (int i = 0; i < NP; ++i) {
          const float dy_a = dz_a[h][i];
          dz_a[h][i] = fmaf(dy_a, cos[i], dz_b[h][i] * sin[i]);
          dz_b[h][i] = fmaf(dz_b[h][i], cos[i], -(dy_a * sin[i]));
        }
      float squares = 0.0f, products = 0.0f;
#pragma unroll
      for (int i = 0; i < NP; ++i) {
        squares = fmaf(a[i], a[i], squares), products = fmaf(dz_a[h][i] * scale_a[i], a[i], products);
        squares = fmaf(c[i], c[i], squares), products = fmaf(dz_b[h][i] * scale_b[i], c[i], products);
      }
      sums[2 * h] = h < count ? squares : 0.0f, sums[2 * h + 1] = h < count ? products : 0.0f;
    }
    part_sums<TOGETHER>(sums, b.across, step);
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      if (h >= count) break;
      const float r = reciprocal_rms(sums[2 * h], t.share, p.direct.eps), slope = sums[2 * h + 1] * t.share * r * r * r;
      Chunks of_x;
      of_x.read(from + 2 * h * PARTS * piece, piece);
      float a[NP], c[NP];
      of_x.get(a, c, 0);
#pragma unroll
      for (int i = 0; i < NP; ++i) {
        const float g_a = dz_a[h][i] * r, g_b = dz_b[h][i] * r;
        dw_a[i] = fmaf(g_a, a[i], dw_a[i]), dw_b[i] = fmaf(g_b, c[i], dw_b[i]);
        a[i] = fmaf(g_a, scale_a[i], -(a[i] * slope)), c[i] = fmaf(g_b, scale_b[i], -(c[i] * slope));
      }
      of_x.set(a, c, 0);
      of_x.write(to + h * t.y_strides[2], apart);
    }
  }
  if (b.partials == nullptr) return;

  // The sums of the block's rows: by thread, then over those that have the same features.
  float* const sums = reinterpret_cast<float*>(dynamic_smem());
  float* const partials = b.partials + uint64_t(block) * b.width;
  if (!TOGETHER || b.at_once > 1) {
    __syncthreads();  // all copies have arrived and have been read
#pragma unroll
    for (int i = 0; i < NP; ++i) sums[i * blockDim.x + thread] = dw_a[i], sums[(NP + i) * blockDim.x + thread] = dw_b[i];
    __syncthreads();
  }
  if (TOGETHER) {
    if (y != 0 || !works) return;
    for (uint32_t row = 1; row < b.at_once; ++row)
#pragma unroll
      for (int i = 0; i < NP; ++i) {
        dw_a[i] += sums[i * blockDim.x + row * b.across + x];
        dw_b[i] += sums[(NP + i) * blockDim.x + row * b.across + x];
      }
    Packed<float, INTERLEAVED, NP> all;
    all.set(dw_a, dw_b, 0);
    constexpr uint32_t WIDER = sizeof(float) / sizeof(T);
    all.write(reinterpret_cast<char*>(partials + only * (b.width / t.heads)) + at * WIDER, apart * WIDER);
  } else {
    for (uint32_t nth = thread; nth < 2 * NP * b.across; nth += blockDim.x) {
      const uint32_t i = nth / b.across, of = nth - i * b.across;  // whose sum it is: the ith of thread `of` of a part
      if (of >= p.direct.of_head.d) continue;
      float sum = 0.0f;
      for (uint32_t row = 0; row < b.at_once; ++row) sum += sums[i * blockDim.x + row * b.across + of];
      const Halves place(p.direct, of);
      const uint32_t part = i / NP, inside = i % NP;
      partials[INTERLEAVED ? place.at / sizeof(T) + 2 * inside + part : (place.at + part * place.apart) / sizeof(T) + inside] = sum;
    }
  }
}

template <class T, class TABLE, bool INTERLEAVED, bool TOGETHER>
__global__ void __launch_bounds__(TOGETHER ? MOST : BACKWARD_THREADS, BACKWARD_RESIDENT / (TOGETHER ? MOST : BACKWARD_THREADS))
    backward_kernel(const __grid_constant__ Backward p) {
  const uint32_t of_q = p.tensors[0].blocks;
  if (blockIdx.x < of_q) backward_parts<T, TABLE, INTERLEAVED, TOGETHER, 0>(p, blockIdx.x);
  else backward_parts<T, TABLE, INTERLEAVED, TOGETHER, 1>(p, blockIdx.x - of_q);
}

// --- The sums of all blocks --------------------------------------------------------------------------------------------

constexpr int SUM_ROWS = 32;

template <class T>
__global__ void __launch_bounds__(WARP * SUM_ROWS) sum_kernel(const __grid_constant__ Backward p) {
  const uint32_t of_q = (p.tensors[0].width + WARP - 1) / WARP;
  const bool of_k = blockIdx.x >= of_q;
  const BackwardTensor& b = p.tensors[of_k];
  const uint32_t lane = threadIdx.x % WARP, first = threadIdx.x / WARP, column = (blockIdx.x - (of_k ? of_q : 0)) * WARP + lane;
  wait_and_launch_dependents();
  float sum = 0.0f;
  if (column < b.width)
#pragma unroll 8
    for (uint32_t row = first; row < b.blocks; row += SUM_ROWS) sum += b.partials[uint64_t(row) * b.width + column];
  __shared__ float sums[SUM_ROWS][WARP];
  sums[first][lane] = sum;
  __syncthreads();
  if (first != 0 || column >= b.width) return;
#pragma unroll
  for (int i = 1; i < SUM_ROWS; ++i) sum += sums[i][lane];
  if (p.weights_are_floats) reinterpret_cast<float*>(b.dweight)[column] = sum;
  else reinterpret_cast<T*>(b.dweight)[column] = from_float<T>(sum);
}

// --- The launch ------------------------------------------------------------------------------------------------------

inline int64_t threads_of(const Backward& p) {
  int64_t threads = BACKWARD_THREADS;
  for (const BackwardTensor& b : p.tensors) threads = std::max<int64_t>(threads, b.across);
  return threads;
}

// Bytes of shared memory that a launch asks for: of dy and x.
inline int64_t staged_bytes(const NormPlan& plan, int64_t threads) {
  const int64_t accesses = 2 * (plan.rotation.interleaved_in ? 1 : 2);
  return 16 * threads * accesses * (plan.together ? HEADS_AT_ONCE<true> * STAGED<true> : HEADS_AT_ONCE<false> * STAGED<false>);
}

// Whether these kernels support a call. If so, sets their parameters, except for the partial sums.
inline bool backward(const NormGradPlan& plan, const NormGradCall& call, const Device& device, Backward& p) {
  const Plan& rotation = plan.norm.rotation;
  const int64_t size = rotation.kind == FLOAT32 ? 4 : 2, np = 16 / size / (rotation.interleaved_in ? 2 : 1);
  Operand operands[2];
  Alignment data;
  set_operands(operands, rotation, call.norm.rotation, false, data);
  bool fits = true;
  for (int o = 0; o < rotation.operands; ++o) {
    data.see(call.dy[o]);
    for (int i = rotation.batch > 1 ? 0 : 1; i < 3; ++i) {
      const int64_t bytes = plan.dy_strides[o][i] * size;
      if (i == 0 || (i == 1 ? rotation.tokens : rotation.heads[o]) > 1) data.see(bytes);
      fits = fits && bytes >= 0 && bytes <= UINT32_MAX;
      p.tensors[o].strides[i] = static_cast<uint32_t>(bytes);
    }
    Alignment weight;
    weight.see(call.norm.weights[o]);
    fits = fits && weight.bytes() == 16;
  }
  Work work{};
  if (!fits || data.bytes() < 16 || rotation.batch * rotation.tokens == 0) return false;
  set_angles(work, rotation, call.norm.rotation, np, false);
  if (!direct(plan.norm, call.norm, work, np, p.direct)) return false;

  const bool together = plan.norm.together;
  const int64_t chunks = p.direct.of_head.d;
  int64_t all = 0, steps[2] = {};
  for (int o = 0; o < rotation.operands; ++o) {
    const int64_t across = together ? ceil_div(chunks * rotation.heads[o], WARP) * WARP : power_of_two(chunks);
    p.tensors[o].across = static_cast<uint32_t>(across);
  }
  const int64_t threads = threads_of(p);
  if (staged_bytes(plan.norm, threads) + DECLARED > device.shared) return false;
  const int64_t tokens = rotation.batch * rotation.tokens;
  for (int o = 0; o < rotation.operands; ++o) {
    BackwardTensor& b = p.tensors[o];
    const int64_t parts = together ? 1 : ceil_div(rotation.heads[o], HEADS_AT_ONCE<false>);
    if (tokens * parts > INT32_MAX / 2) return false;
    b.dy = static_cast<const char*>(call.dy[o]), b.dweight = static_cast<char*>(call.dweights[o]);
    b.at_once = static_cast<uint32_t>(threads / b.across), b.parts = static_cast<uint32_t>(parts), b.of_part = Divisor(parts);
    b.width = static_cast<uint32_t>(rotation.head_dim[o] * (together ? rotation.heads[o] : 1));
    all += steps[o] = ceil_div(tokens * parts, b.at_once);
  }
  // As many blocks as are resident together, with the same number of steps except the last of q and of k.
  const int64_t most = std::max<int64_t>(device.processors * std::max<int64_t>(BACKWARD_RESIDENT / threads, 1), rotation.operands);
  int64_t each = ceil_div(all, most);
  while (ceil_div(steps[0], each) + ceil_div(steps[1], each) > most) ++each;
  for (int o = 0; o < rotation.operands; ++o) {
    BackwardTensor& b = p.tensors[o];
    b.blocks = static_cast<uint32_t>(ceil_div(steps[o], each)), b.steps = static_cast<uint32_t>(ceil_div(steps[o], b.blocks));
    const int64_t rows = int64_t(b.blocks) * b.at_once, of_tokens = rows / b.parts;
    b.step = {static_cast<uint32_t>(of_tokens / rotation.tokens), static_cast<uint32_t>(of_tokens % rotation.tokens),
              static_cast<uint32_t>(rows % b.parts)};
  }
  p.batches = static_cast<uint32_t>(rotation.batch);
  p.weights_are_floats = plan.norm.weight_kinds[0] == FLOAT32;
  return true;
}

template <class T>
cudaError_t launch_backward(const Backward& p, const NormGradPlan& plan, void* stream, const Device& device) {
  const Plan& rotation = plan.norm.rotation;
  const bool together = plan.norm.together;
  const auto of_table = [&](auto table) {
    using TABLE = decltype(table);
    if (rotation.interleaved_in) return together ? backward_kernel<T, TABLE, true, true> : backward_kernel<T, TABLE, true, false>;
    return together ? backward_kernel<T, TABLE, false, true> : backward_kernel<T, TABLE, false, false>;
  };
  const auto kernel = rotation.table_kind == FLOAT32 ? of_table(float{}) : of_table(T{});
  const int64_t threads = threads_of(p), bytes = staged_bytes(plan.norm, threads);
  if (bytes > FREE_SHARED)
    if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes))) return error;
  const dim3 grid(p.tensors[0].blocks + p.tensors[1].blocks), block(static_cast<unsigned>(threads));
  if (const auto error = launched(kernel, grid, block, stream, device, p, bytes)) return error;
  if (p.tensors[0].partials == nullptr) return cudaSuccess;
  const int64_t columns = ceil_div(p.tensors[0].width, WARP) + ceil_div(p.tensors[1].width, WARP);
  return launched(sum_kernel<T>, dim3(static_cast<unsigned>(columns)), dim3(WARP * SUM_ROWS), stream, device, p);
}

}  // namespace
