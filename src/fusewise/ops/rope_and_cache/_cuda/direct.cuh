// rope_and_cache_ kernel for calls of serving engines: flat tokens with explicit positions and slots, heads that rotate fully
// or by half, vectorized loads of tensors and table. It is separate because with few tokens the time is the latency of one
// thread's instruction chain: the branches of the general kernel (bounds, block table, several axes) took a quarter of such a
// call on an H200.
//
// Shape legend: as in rope_and_cache.cu. A head here is as wide as the rotated features: an unrotated half of a k head counts as
// one head, and a head of v may count as several. A thread processes a chunk of NP pairs of HEADS adjacent heads. Threads cover
// chunks first, then the heads of q, k and v, then tokens: if q, k and v are one packed projection, a token's row is read
// contiguously.

#pragma once

#include "../../rope/_cuda/angles.cuh"
#include "../../rope/_cuda/launch.cuh"
#include "../../rope/_cuda/words.cuh"
#include "../plan.h"

namespace {

struct DirectTensor {
  char *x, *cache;                         // q has no cache
  uint32_t token, head, first_head;        // strides in bytes; index of the first head among those of all tensors
  uint32_t block, slot, cache_head;        // cache strides in bytes
};

enum Moved : int { MOVED_Q, MOVED_K, MOVED_REST, MOVED_V, MOVED };  // q, k, the unrotated features of k, v

struct Direct {
  const char *positions, *slots, *cos, *sin;
  uint32_t position, slot, row;            // strides in bytes
  uint32_t rows, count, tokens, heads;     // table rows; cache slots; tokens; heads of all tensors
  uint32_t apart;                          // bytes from the first half of a head to the second
  // Threads per token, threads per head, slots per cache block; at least 2 wherever more than 0 is divided.
  Divisor of_token, of_head, of_block;
  bool wide_positions, wide_slots, write_k;
  DirectTensor tensors[MOVED];
};

__device__ __forceinline__ uint32_t quotient(uint32_t n, const Divisor& by) { return __umulhi(n, by.magic) >> by.shift; }

// A 32- or 64-bit index in two words. A 32-bit one is not sign-extended: a negative index is out of range either way.
struct Index {
  uint32_t low, high = 0;
  __device__ __forceinline__ Index(const char* data, bool wide) {
    low = reinterpret_cast<const uint32_t*>(data)[0];
    if (wide) high = reinterpret_cast<const uint32_t*>(data)[1];
  }
  __device__ __forceinline__ bool below(uint32_t end) const { return high == 0 && low < end; }
};

// AT_ONCE pairs of a chunk are rotated at a time: all of them, or few enough that registers allow full occupancy.
template <class T, class TABLE, bool INTERLEAVED, int NP, int HEADS, int AT_ONCE>
__global__ void __launch_bounds__(THREADS, (HEADS > 1 || AT_ONCE < NP ? 2048 : 1024) / THREADS)
    direct_rope_and_cache_kernel(const __grid_constant__ Direct p) {
  constexpr int PARTS = INTERLEAVED ? 1 : 2, N = 2 * NP / PARTS;  // accesses per head; elements per access
  const uint32_t thread = blockIdx.x * THREADS + threadIdx.x, token = quotient(thread, p.of_token);
  if (token >= p.tokens) return;
  wait_and_launch_dependents();
  // The head of the dependency chain first, unconditionally, also for q and v: a branch would cost more than the loads.
  const Index position(p.positions + uint64_t(token) * p.position, p.wide_positions);
  const Index slot(p.slots + uint64_t(token) * p.slot, p.wide_slots);

  const uint32_t in_token = thread - token * p.of_token.d, group = quotient(in_token, p.of_head);
  const uint32_t chunk = in_token - group * p.of_head.d, at = chunk * uint32_t(N * sizeof(T));
  const uint32_t first = group * HEADS;
  const bool cached = first >= p.tensors[MOVED_K].first_head, rotates = first < p.tensors[MOVED_REST].first_head;
  const DirectTensor& t = p.tensors[cached + !rotates + (first >= p.tensors[MOVED_V].first_head)];
  const uint32_t head = first - t.first_head;
  char* const x = t.x + uint64_t(token) * t.token + uint64_t(head) * t.head + at;
  Words<T, N> chunks[HEADS][PARTS];
#pragma unroll
  for (int i = 0; i < HEADS; ++i)
#pragma unroll
    for (int part = 0; part < PARTS; ++part) chunks[i][part].read(x + i * uint64_t(t.head) + part * p.apart);

  const auto cache_at = [&](uint32_t slot) {
    const uint32_t block = quotient(slot, p.of_block), nth = slot - block * p.of_block.d;
    return t.cache + uint64_t(block) * t.block + uint64_t(nth) * t.slot + uint64_t(head) * t.cache_head + at;
  };
  const auto write = [&](char* to, uint32_t step) {
#pragma unroll
    for (int i = 0; i < HEADS; ++i)
#pragma unroll
      for (int part = 0; part < PARTS; ++part) chunks[i][part].write(to + i * uint64_t(step) + part * p.apart);
  };
  // No index is used before this branch. The compiler does not hoist uses across it, so the loads of the chunks are issued first.
  if (!rotates) {
    char* const cache = cache_at(slot.low);
    if (slot.below(p.count)) write(cache, t.cache_head);
    return;
  }

  // The slot has arrived with the position: compute the cache address while the table row is in flight, if registers allow it.
  const bool inside = position.below(p.rows), there = cached && slot.below(p.count);
  char* const cache = HEADS > 1 ? nullptr : cache_at(slot.low);
  const uint32_t row = inside ? position.low : 0, pairs_at = chunk * uint32_t(NP * sizeof(TABLE));
  const char* const cos_at = p.cos + pairs_at + uint64_t(row) * p.row;
  const char* const sin_at = p.sin + pairs_at + uint64_t(row) * p.row;
#pragma unroll
  for (int pair = 0; pair < NP; pair += AT_ONCE) {
    Words<TABLE, AT_ONCE> cosines, sines;
    cosines.read(cos_at + pair * sizeof(TABLE)), sines.read(sin_at + pair * sizeof(TABLE));
    float cos[AT_ONCE], sin[AT_ONCE];
    cosines.get(cos), sines.get(sin);
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      if (!inside) cos[j] = sin[j] = __int_as_float(0x7fffffff);
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
      constexpr int EACH = 2 * AT_ONCE / PARTS;  // elements per access
      float from[2 * AT_ONCE], to[2 * AT_ONCE];
#pragma unroll
      for (int part = 0; part < PARTS; ++part) chunks[i][part].template get<EACH>(from + part * EACH, pair * 2 / PARTS);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const int a = INTERLEAVED ? 2 * j : j, b = INTERLEAVED ? 2 * j + 1 : AT_ONCE + j;
        to[a] = fmaf(from[a], cos[j], -(from[b] * sin[j]));
        to[b] = fmaf(from[b], cos[j], from[a] * sin[j]);
      }
#pragma unroll
      for (int part = 0; part < PARTS; ++part) chunks[i][part].template set<EACH>(to + part * EACH, pair * 2 / PARTS);
    }
  }
  if (p.write_k || !cached) write(x, t.head);
  if (there) write(HEADS > 1 ? cache_at(slot.low) : cache, t.cache_head);
}

// --- The launch ------------------------------------------------------------------------------------------------------

// Whether this kernel supports a call with the angles of `p`, in chunks of `np` pairs. If so, sets its parameters.
inline bool direct(const CachePlan& cache, const CacheCall& call, const Work& p, int64_t np, Direct& d) {
  const Plan& plan = cache.rotation;
  const Call& rotation = call.rotation;
  const int64_t size = plan.kind == FLOAT32 ? 4 : 2, table_size = plan.table_kind == FLOAT32 ? 4 : 2, chunks = plan.pairs / np;
  const int64_t tokens = plan.batch * plan.tokens, width = 2 * plan.pairs, rest = plan.head_dim[1] - width;
  const int64_t of_v = cache.v_dim / width, heads = plan.heads[0] + plan.heads[1] * (1 + (rest > 0) + of_v);
  const bool widest = np > 1 && np * size * (plan.interleaved_in ? 2 : 1) == 16 && plan.interleaved_in == plan.interleaved_out;
  const bool half = rest == width && (plan.start[1] == 0 || plan.start[1] == width);
  const bool neighbours = plan.heads[1] == 1 || (cache.v_strides[2] == cache.v_dim && cache.cache_strides[1][2] == cache.v_dim);
  const bool even = (rest == 0 || half) && of_v > 0 && cache.v_dim == of_v * width && (of_v == 1 || neighbours) && chunks > 1;
  const bool given = rotation.positions && call.slots && !rotation.bounds && cache.mapped >= plan.tokens && p.axes == ONE;
  const bool of_table = p.read == FLOATS || (p.read <= HALVES && plan.table_kind == plan.kind);
  if (!widest || !even || !given || !of_table || plan.inverse || plan.rows == 0) return false;

  bool fits = chunks * heads * tokens <= INT32_MAX - THREADS && plan.rows <= INT32_MAX;
  const auto narrow = [&](int64_t bytes) {
    fits = fits && bytes >= 0 && bytes <= UINT32_MAX;
    return static_cast<uint32_t>(bytes);
  };
  // Byte stride from a token to the next, which must be the same across batch entries.
  const auto next = [&](const int64_t* strides, int64_t bytes) {
    const bool in_a_row = plan.batch == 1 || plan.tokens == 1 || strides[0] == plan.tokens * strides[1];
    fits = fits && in_a_row;
    return narrow(bytes * strides[plan.batch > 1 && plan.tokens == 1 ? 0 : 1]);
  };
  if (plan.batch > 1) fits = fits && plan.table_strides[0] == 0;
  d.positions = static_cast<const char*>(rotation.positions), d.wide_positions = plan.wide_positions;
  d.position = next(plan.position_strides + 1, d.wide_positions ? 8 : 4);
  d.slots = static_cast<const char*>(call.slots), d.wide_slots = cache.wide_slots;
  d.slot = next(cache.slot_strides, d.wide_slots ? 8 : 4);
  d.cos = p.cos, d.sin = p.sin, d.row = narrow(plan.table_strides[1] * table_size);
  d.rows = static_cast<uint32_t>(plan.rows), d.count = narrow(cache.blocks * cache.block_size);
  d.tokens = static_cast<uint32_t>(tokens), d.heads = static_cast<uint32_t>(heads);
  d.apart = narrow(plan.pairs * size), d.write_k = cache.write_k;
  const bool alone = cache.block_size == 1;  // treat blocks of one slot as the slots of one block
  d.of_block = Divisor(std::max<int64_t>(1, alone ? cache.blocks : cache.block_size));
  uint32_t first = 0;
  for (int i = 0; i < MOVED; ++i) {
    DirectTensor& t = d.tensors[i];
    const bool v = i == MOVED_V;
    const int of = i == MOVED_Q ? 0 : 1;
    const int64_t start = v ? 0 : i == MOVED_REST ? width - plan.start[1] : plan.start[of];
    const int64_t* const strides = v ? cache.v_strides : plan.x_strides[of];
    t.x = (v ? static_cast<char*>(const_cast<void*>(call.v)) : static_cast<char*>(rotation.y[of])) + start * size;
    t.token = next(strides, size), t.head = narrow((v && of_v > 1 ? width : strides[2]) * size), t.first_head = first;
    first += static_cast<uint32_t>(plan.heads[of] * (v ? of_v : i == MOVED_REST ? rest > 0 : 1));
    if (i == MOVED_Q) continue;
    const int64_t* const places = cache.cache_strides[v];
    t.cache = static_cast<char*>(call.caches[v]) + start * size;
    t.block = narrow(places[0] * size), t.slot = alone ? t.block : narrow(places[1] * size);
    t.cache_head = narrow((v && of_v > 1 ? width : places[2]) * size);
  }
  return fits;
}

// With few tokens most of the GPU idles, and half-width chunks halve the arithmetic in the dependency chain. With many tokens the
// GPU is full, and throughput depends on the number of 16-byte accesses in flight: a thread has two, of one head for the half
// pairing or of two heads for the interleaved one, and occupancy is higher the fewer pairs it unpacks at once.
template <class T, class TABLE, bool INTERLEAVED>
cudaError_t launch_direct(Direct& d, const Plan& plan, void* stream) {
  constexpr int NP = 16 / sizeof(T) / (INTERLEAVED ? 2 : 1), HALF = NP > 2 ? NP / 2 : NP, TOGETHER = INTERLEAVED ? 2 : 1;
  const Device device = current_device();
  const int64_t all = plan.pairs / NP * int64_t(d.heads) * d.tokens;
  const bool many = all >= int64_t(device.processors) * 2048, few = all < int64_t(device.processors) * THREADS;
  int64_t np = NP, together = 1;
  auto kernel = direct_rope_and_cache_kernel<T, TABLE, INTERLEAVED, NP, 1, NP>;
  if (few) np = HALF, kernel = direct_rope_and_cache_kernel<T, TABLE, INTERLEAVED, HALF, 1, HALF>;
  else if (many && plan.heads[0] % TOGETHER == 0 && plan.heads[1] % TOGETHER == 0)
    together = TOGETHER, kernel = direct_rope_and_cache_kernel<T, TABLE, INTERLEAVED, NP, TOGETHER, 2>;
  const int64_t in_token = plan.pairs / np * (d.heads / together);
  d.of_head = Divisor(plan.pairs / np), d.of_token = Divisor(in_token);
  const dim3 grid(static_cast<unsigned>(ceil_div(in_token * d.tokens, THREADS)));
  return launched(kernel, grid, dim3(THREADS), stream, device, d);
}

template <class T>
cudaError_t launch_direct(Direct& d, const Plan& plan, void* stream) {
  if (plan.table_kind == FLOAT32)
    return (plan.interleaved_in ? launch_direct<T, float, true> : launch_direct<T, float, false>)(d, plan, stream);
  return (plan.interleaved_in ? launch_direct<T, T, true> : launch_direct<T, T, false>)(d, plan, stream);
}

}  // namespace
