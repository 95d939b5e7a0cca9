// qk_norm_rope kernels for the calls of most models: heads that rotate completely or in their first features, one position per token,
// vectorized loads of tensors, table and weights. They are separate because with few tokens the time is the latency of one thread's
// instruction chain: nothing is waited for between the loads except the position, and threads past the end load what their
// neighbours do instead of branching.
//
// Shape legend and the order of sums: as in qk_norm_rope.cu. There are two kernels. A thread has the same chunk of HEADS heads, with one
// cos θ and sin θ for all of them:
//
// - `direct_heads_kernel`: a head is normalized alone, by a group of threads within a warp. The heads of a thread are adjacent.
// - `direct_row_kernel`: all heads of a token together, by a block: first the warps of q, then those of k. The heads of a thread are
//   as far apart as the warps of its tensor reach.

#pragma once

#include "../../rope/_cuda/angles.cuh"
#include "../../rope/_cuda/launch.cuh"
#include "../../rope/_cuda/words.cuh"
#include "sums.cuh"

namespace {

struct DirectTensor {
  const char *x, *weight;
  char* y;
  uint32_t x_strides[3], y_strides[3];  // bytes: batch, token, head
  uint32_t heads;
  uint32_t weight_head;                 // bytes from the weights of a head to the next
  uint32_t first_thread, warps, apart;  // `direct_row_kernel`: its threads in a block; heads from one of a thread to its next
  float share;                          // 1 / features of a row
};

struct Direct {
  const char *positions, *cos, *sin;
  uint32_t position_strides[2], row;  // bytes: batch, token; from a table row to the next
  uint32_t rows, tokens, first_of_k;  // table rows; tokens of all batch entries; the first group of k among those of a token
  uint32_t half;                      // bytes from the first half of the rotated features to the second
  uint32_t rotated;                   // chunks of a head that rotate; the others follow
  int64_t offset;
  Divisor of_token, of_batch, of_head;  // groups per token, tokens per batch entry, chunks per head
  bool wide_positions, weighted;
  float eps, weight_offset;
  DirectTensor tensors[2];
};

// The position of a token, in two words; loaded, not yet used.
struct Position {
  uint32_t batch, in_batch, low = 0, high = 0;
  __device__ __forceinline__ Position(const Direct& p, uint32_t token) {
    batch = p.of_batch(token), in_batch = token - batch * p.of_batch.d;
    load(p);
  }
  __device__ __forceinline__ Position(const Direct& p, uint32_t batch, uint32_t in_batch) : batch(batch), in_batch(in_batch) { load(p); }
  __device__ __forceinline__ void load(const Direct& p) {
    if (!p.positions) return;
    const char* const at = p.positions + uint64_t(batch) * p.position_strides[0] + uint64_t(in_batch) * p.position_strides[1];
    low = *reinterpret_cast<const uint32_t*>(at);
    if (p.wide_positions) high = *reinterpret_cast<const uint32_t*>(at + 4);
  }
  __device__ __forceinline__ uint64_t in(const uint32_t (&strides)[3]) const {
    return uint64_t(batch) * strides[0] + uint64_t(in_batch) * strides[1];
  }
};

// Where a chunk is in a head of T: the offset of its first access, and from this to its second. Of features that do not rotate, both are
// adjacent, or, HALVES, in two halves, so that those of adjacent threads are adjacent.
template <class T, bool INTERLEAVED, int NP, bool HALVES = false>
struct Spot {
  uint32_t at, apart;
  __device__ __forceinline__ Spot(const Direct& p, uint32_t chunk) {
    constexpr uint32_t PACK = NP * sizeof(T);
    const bool turns = INTERLEAVED || chunk < p.rotated;
    if constexpr (HALVES) at = chunk * PACK * (INTERLEAVED ? 2 : 1) + (turns ? 0 : p.half);
    else at = (turns ? chunk : chunk * 2) * PACK * (INTERLEAVED ? 2 : 1);
    apart = turns ? p.half : HALVES ? (p.of_head.d - p.rotated) * PACK : PACK;
  }
};

// cos θ and sin θ of NP pairs, loaded, not yet converted: NaN for a position outside the table.
template <class TABLE, int NP>
struct Turn {
  Words<TABLE, NP> cosines, sines;
  bool inside, turns;
  __device__ __forceinline__ Turn(const Direct& p, const Position& position, uint32_t chunk) {
    const int64_t row = p.positions ? int64_t(uint64_t(position.high) << 32 | position.low) : position.in_batch + p.offset;
    inside = row >= 0 && row < p.rows;
    turns = chunk < p.rotated;
    const uint32_t pairs_at = min(chunk, p.rotated - 1) * uint32_t(NP * sizeof(TABLE));
    const uint64_t at = uint64_t(inside ? static_cast<uint32_t>(row) : 0) * p.row + pairs_at;
    cosines.read(p.cos + at), sines.read(p.sin + at);
  }
  template <int N>
  __device__ __forceinline__ void get(float (&cos)[N], float (&sin)[N], int first) const {
    cosines.template get<N>(cos, first), sines.template get<N>(sin, first);
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (!inside) cos[i] = sin[i] = __int_as_float(0x7fffffff);
  }
};

// 2 · NP elements of a head, packed, in one or two accesses.
template <class T, bool INTERLEAVED, int NP>
struct Packed {
  static constexpr int PARTS = INTERLEAVED ? 1 : 2, N = 2 * NP / PARTS;
  Words<T, N> parts[PARTS];
  __device__ __forceinline__ void read(const char* from, uint32_t apart) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) parts[i].read(from + i * apart);
  }
  __device__ __forceinline__ void write(char* to, uint32_t apart) const {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) parts[i].write(to + i * apart);
  }
  // Elements of M pairs from `first` on: those of a[i] and b[i] are a pair.
  template <int M>
  __device__ __forceinline__ void get(float (&a)[M], float (&b)[M], int first) const {
    float x[2 * M];
#pragma unroll
    for (int i = 0; i < PARTS; ++i) parts[i].template get<2 * M / PARTS>(x + i * M, first * 2 / PARTS);
#pragma unroll
    for (int i = 0; i < M; ++i) a[i] = x[INTERLEAVED ? 2 * i : i], b[i] = x[INTERLEAVED ? 2 * i + 1 : M + i];
  }
  template <int M>
  __device__ __forceinline__ void set(const float (&a)[M], const float (&b)[M], int first) {
    float x[2 * M];
#pragma unroll
    for (int i = 0; i < M; ++i) x[INTERLEAVED ? 2 * i : i] = a[i], x[INTERLEAVED ? 2 * i + 1 : M + i] = b[i];
#pragma unroll
    for (int i = 0; i < PARTS; ++i) parts[i].template set<2 * M / PARTS>(x + i * M, first * 2 / PARTS);
  }

  __device__ __forceinline__ float squares() const {
    float a[NP], b[NP];
    get(a, b, 0);
#pragma unroll
    for (int i = 0; i < NP; ++i) a[i] = fmaf(a[i], a[i], b[i] * b[i]);
    return tree_sum<NP>(a);
  }

  // Normalize and rotate, AT_ONCE pairs at a time: all of them, or few enough that registers allow high occupancy.
  template <int AT_ONCE, class WEIGHT, class TABLE>
  __device__ __forceinline__ void norm_rotate(const Direct& p, const Packed<WEIGHT, INTERLEAVED, NP>& weights,
                                              const Turn<TABLE, NP>& turn, float r) {
#pragma unroll
    for (int first = 0; first < NP; first += AT_ONCE) {
      float a[AT_ONCE], b[AT_ONCE], scale_a[AT_ONCE], scale_b[AT_ONCE], cos[AT_ONCE], sin[AT_ONCE];
      get(a, b, first), weights.get(scale_a, scale_b, first), turn.get(cos, sin, first);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        a[i] *= r, b[i] *= r;
        if (p.weighted) a[i] *= scale_a[i] + p.weight_offset, b[i] *= scale_b[i] + p.weight_offset;
        const float y_a = fmaf(a[i], cos[i], -(b[i] * sin[i])), y_b = fmaf(b[i], cos[i], a[i] * sin[i]);
        a[i] = turn.turns ? y_a : a[i], b[i] = turn.turns ? y_b : b[i];
      }
      set(a, b, first);
    }
  }
};

// Threads of an SM that registers must allow. A 16-bit table is unpacked once for all heads of a thread, into more registers.
template <class TABLE>
constexpr int resident(int heads) { return heads == 1 ? 1024 : sizeof(TABLE) == 4 ? 640 : 512; }

template <class T, class WEIGHT, class TABLE, bool INTERLEAVED, int NP, int HEADS>
__global__ void __launch_bounds__(THREADS, resident<TABLE>(HEADS) / THREADS) direct_heads_kernel(const __grid_constant__ Direct p) {
  using Chunks = Packed<T, INTERLEAVED, NP>;
  const uint32_t group = blockIdx.x * blockDim.y + threadIdx.y, token = p.of_token(group), nth = group - token * p.of_token.d;
  const bool of_k = nth >= p.first_of_k;
  const DirectTensor& t = p.tensors[of_k];
  const uint32_t first = (nth - (of_k ? p.first_of_k : 0)) * HEADS, chunk = min(threadIdx.x, p.of_head.d - 1);
  const auto [at, apart] = Spot<T, INTERLEAVED, NP>(p, chunk);
  constexpr uint32_t WIDER = sizeof(WEIGHT) / sizeof(T);
  const int there = int(t.heads - first), heads = token < p.tokens && threadIdx.x < p.of_head.d ? there : 0;  // to read, to write
  wait_and_launch_dependents();

  const Position position(p, min(token, p.tokens - 1));  // the head of the dependency chain
  const char* const x = t.x + position.in(t.x_strides) + uint64_t(first) * t.x_strides[2] + at;
  Chunks chunks[HEADS];
  Packed<WEIGHT, INTERLEAVED, NP> weights;
#pragma unroll
  for (int i = 0; i < HEADS; ++i) chunks[i].read(x + uint64_t(min(i, there - 1)) * t.x_strides[2], apart);
  weights.read(t.weight + at * WIDER, apart * WIDER);
  const Turn<TABLE, NP> turn(p, position, chunk);

  float sums[HEADS];
#pragma unroll
  for (int i = 0; i < HEADS; ++i) sums[i] = heads > 0 ? chunks[i].squares() : 0.0f;
  warp_sums<HEADS, WARP>(sums, blockDim.x);
  char* const y = t.y + position.in(t.y_strides) + uint64_t(first) * t.y_strides[2] + at;
#pragma unroll
  for (int i = 0; i < HEADS; ++i) {
    chunks[i].template norm_rotate<(HEADS > 1 ? 2 : NP)>(p, weights, turn, reciprocal_rms(sums[i], t.share, p.eps));
    if (i < heads) chunks[i].write(y + i * uint64_t(t.y_strides[2]), apart);
  }
}

constexpr int MOST_OF_ROW = MOST / WARP;  // sums of warps per row

template <class T, class WEIGHT, class TABLE, bool INTERLEAVED, int NP, int HEADS>
__global__ void __launch_bounds__(HEADS > 1 ? MOST / 2 : 2 * MOST, HEADS > 1 ? 2 : 1) direct_row_kernel(const __grid_constant__ Direct p) {
  using Chunks = Packed<T, INTERLEAVED, NP>;
  const bool of_k = threadIdx.x >= p.tensors[1].first_thread;
  const DirectTensor& t = p.tensors[of_k];
  const uint32_t thread = threadIdx.x - t.first_thread, first = p.of_head(thread), chunk = thread - first * p.of_head.d;
  const auto [at, apart] = Spot<T, INTERLEAVED, NP>(p, chunk);
  constexpr uint32_t WIDER = sizeof(WEIGHT) / sizeof(T);
  const auto head = [&](int i) { return first + i * t.apart; };
  const auto readable = [&](int i) { return min(head(i), t.heads - 1); };
  wait_and_launch_dependents();

  const Position position(p, blockIdx.x);
  const char* const x = t.x + position.in(t.x_strides) + at;
  Chunks chunks[HEADS];
  Packed<WEIGHT, INTERLEAVED, NP> weights;
#pragma unroll
  for (int i = 0; i < HEADS; ++i) chunks[i].read(x + uint64_t(readable(i)) * t.x_strides[2], apart);
  weights.read(t.weight + readable(0) * t.weight_head + at * WIDER, apart * WIDER);
  const Turn<TABLE, NP> turn(p, position, chunk);

  float sums[HEADS];
#pragma unroll
  for (int i = 0; i < HEADS; ++i) sums[i] = head(i) < t.heads ? chunks[i].squares() : 0.0f;
  warp_sums<HEADS, WARP>(sums);

  // The sums of warps in the order of their chunks, which is that of a kernel with one head per thread.
  __shared__ float of_warps[2][MOST_OF_ROW];
  const uint32_t lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < HEADS; ++i)
    if (lane == 0) of_warps[of_k][i * t.warps + thread / WARP] = sums[i];
  __syncthreads();
  float sum[1] = {lane < HEADS * t.warps ? of_warps[of_k][lane] : 0.0f};
  warp_sums<1, MOST_OF_ROW>(sum);
  const float r = reciprocal_rms(__shfl_sync(~0u, sum[0], 0), t.share, p.eps);

  char* const y = t.y + position.in(t.y_strides) + at;
#pragma unroll
  for (int i = 0; i < HEADS; ++i) {
    if (i > 0) weights.read(t.weight + readable(i) * t.weight_head + at * WIDER, apart * WIDER);
    chunks[i].template norm_rotate<(HEADS > 1 ? 2 : NP)>(p, weights, turn, r);
    if (head(i) < t.heads) chunks[i].write(y + uint64_t(head(i)) * t.y_strides[2], apart);
  }
}

// --- The launch ------------------------------------------------------------------------------------------------------

// Whether this kernel supports a call with the angles of `p`, in chunks of `np` pairs. If so, sets its parameters.
inline bool direct(const NormPlan& norm, const NormCall& call, const Work& p, int64_t np, Direct& d) {
  const Plan& plan = norm.rotation;
  const Call& rotation = call.rotation;
  const int64_t size = plan.kind == FLOAT32 ? 4 : 2, table_size = plan.table_kind == FLOAT32 ? 4 : 2;
  const int64_t chunks = plan.head_dim[0] / (2 * np);
  const bool widest = np > 1 && np * size * (plan.interleaved_in ? 2 : 1) >= 8 && plan.interleaved_in == plan.interleaved_out;
  const bool of_table = p.read == FLOATS || (p.read <= HALVES && plan.table_kind == plan.kind);
  const bool simple = p.axes == ONE && !p.bounds && !rotation.offsets && p.cp_size <= 1 && !plan.inverse && plan.rows > 0;
  if (!widest || !of_table || !simple || (plan.batch > 1 && plan.table_strides[0] != 0)) return false;

  bool fits = plan.rows <= INT32_MAX;
  const auto narrow = [&](int64_t bytes) {
    fits = fits && bytes >= 0 && bytes <= UINT32_MAX;
    return static_cast<uint32_t>(bytes);
  };
  d.positions = static_cast<const char*>(rotation.positions), d.wide_positions = plan.wide_positions, d.offset = rotation.offset;
  for (int i = 0; i < 2 && d.positions; ++i) d.position_strides[i] = narrow(plan.position_strides[i + 1] * (d.wide_positions ? 8 : 4));
  d.cos = p.cos, d.sin = p.sin, d.row = narrow(plan.table_strides[1] * table_size), d.rows = static_cast<uint32_t>(plan.rows);
  d.tokens = static_cast<uint32_t>(plan.batch * plan.tokens), d.of_batch = Divisor(plan.tokens), d.of_head = Divisor(chunks);
  d.half = narrow(plan.pairs * size), d.rotated = static_cast<uint32_t>(plan.pairs / np);
  d.weighted = call.weights[0] != nullptr;
  d.eps = static_cast<float>(norm.eps), d.weight_offset = static_cast<float>(norm.weight_offset);
  for (int o = 0; o < plan.operands; ++o) {
    DirectTensor& t = d.tensors[o];
    t.x = static_cast<const char*>(rotation.x[o]), t.y = static_cast<char*>(rotation.y[o]);
    t.weight = d.weighted ? static_cast<const char*>(call.weights[o]) : t.x;  // any readable memory as long as a head
    for (int i = plan.batch > 1 ? 0 : 1; i < 3; ++i)
      t.x_strides[i] = narrow(plan.x_strides[o][i] * size), t.y_strides[i] = narrow(plan.y_strides[o][i] * size);
    t.heads = static_cast<uint32_t>(plan.heads[o]);
    const int64_t weight_size = norm.weight_kinds[o] == FLOAT32 ? 4 : 2;
    t.weight_head = d.weighted && norm.together ? narrow(plan.head_dim[o] * weight_size) : 0;
    t.share = share_of(plan.head_dim[o] * (norm.together ? plan.heads[o] : 1));
    const bool even = plan.head_dim[o] == 2 * np * chunks && plan.start[o] == 0 && plan.pairs > 0 && plan.heads[o] > 0;
    const int64_t weight_kind = norm.weight_kinds[o];
    const bool alike = weight_kind == norm.weight_kinds[0] && (weight_kind == plan.kind || weight_kind == FLOAT32);
    fits = fits && even && (!d.weighted || alike) && (norm.together ? chunks * plan.heads[o] <= MOST : chunks <= WARP);
  }
  return fits;
}

using DirectKernel = void (*)(Direct);

template <class T, class WEIGHT, class TABLE, bool INTERLEAVED>
DirectKernel direct_kernel(int64_t np, bool together, bool several) {
  constexpr int NP = 16 / sizeof(T) / (INTERLEAVED ? 2 : 1), HALF = NP > 2 ? NP / 2 : NP, HEADS = heads_read(NP, sizeof(T), 1);
  if (together) {
    if (several) return direct_row_kernel<T, WEIGHT, TABLE, INTERLEAVED, NP, HEADS>;
    return np == NP ? direct_row_kernel<T, WEIGHT, TABLE, INTERLEAVED, NP, 1> : direct_row_kernel<T, WEIGHT, TABLE, INTERLEAVED, HALF, 1>;
  }
  if (several) return direct_heads_kernel<T, WEIGHT, TABLE, INTERLEAVED, NP, HEADS>;
  return np == NP ? direct_heads_kernel<T, WEIGHT, TABLE, INTERLEAVED, NP, 1> : direct_heads_kernel<T, WEIGHT, TABLE, INTERLEAVED, HALF, 1>;
}

template <class T, class WEIGHT>
DirectKernel direct_kernel(const Plan& plan, int64_t np, bool together, bool several) {
  if (plan.table_kind == FLOAT32)
    return (plan.interleaved_in ? direct_kernel<T, WEIGHT, float, true> : direct_kernel<T, WEIGHT, float, false>)(np, together, several);
  return (plan.interleaved_in ? direct_kernel<T, WEIGHT, T, true> : direct_kernel<T, WEIGHT, T, false>)(np, together, several);
}

// Threads per SM beyond which a thread has several heads.
constexpr int ENOUGH = 256;

template <class T>
cudaError_t launch_direct(Direct& d, const NormPlan& norm, int64_t np, void* stream, const Device& device) {
  const Plan& plan = norm.rotation;
  const int64_t size = plan.kind == FLOAT32 ? 4 : 2, chunks = d.of_head.d;
  int64_t all = 0;
  for (int o = 0; o < plan.operands; ++o) all += chunks * d.tensors[o].heads * d.tokens;
  // Several heads per thread only with the widest accesses; and in rows where every warp begins with the first chunk of a head.
  const bool widest = np * size * (plan.interleaved_in ? 2 : 1) == 16, aligned = !norm.together || WARP % chunks == 0;
  const int64_t heads = widest && aligned ? heads_for(np, size, 1, all, int64_t(device.processors) * ENOUGH) : 1;

  dim3 grid, block;
  if (norm.together) {
    int64_t threads = 0;
    for (int o = 0; o < plan.operands; ++o) {
      DirectTensor& t = d.tensors[o];
      const int64_t own = ceil_div(ceil_div(chunks * t.heads, heads), WARP) * WARP;
      t.first_thread = static_cast<uint32_t>(threads);
      t.warps = static_cast<uint32_t>(own / WARP), t.apart = static_cast<uint32_t>(own / chunks);
      threads += own;
    }
    if (plan.operands == 1) d.tensors[1].first_thread = static_cast<uint32_t>(threads);  // no thread has k
    grid = dim3(d.tokens), block = dim3(static_cast<unsigned>(threads));
  } else {
    int64_t groups = 0;
    for (int o = 0; o < plan.operands; ++o) {
      groups += ceil_div(d.tensors[o].heads, heads);
      if (o == 0) d.first_of_k = static_cast<uint32_t>(groups);
    }
    d.of_token = Divisor(groups);
    const int64_t across = power_of_two(chunks), side = side_of(across, groups * d.tokens, device);
    const int64_t blocks = ceil_div(groups * d.tokens, side);
    if (blocks * side > INT32_MAX) return cudaErrorInvalidValue;
    grid = dim3(static_cast<unsigned>(blocks)), block = dim3(static_cast<unsigned>(across), static_cast<unsigned>(side));
  }
  const auto kernel = (norm.weight_kinds[0] == plan.kind ? direct_kernel<T, T> : direct_kernel<T, float>)(plan, np, norm.together, heads > 1);
  return launched(kernel, grid, block, stream, device, d);
}

}  // namespace
