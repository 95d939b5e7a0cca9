// General CUDA kernel of rope_and_cache_: rotates q and k in place and writes k and v to the KV cache, in one launch.
//
//     q, k <- rope(q, k),   key_cache[s / S, s % S] <- k of a token,   value_cache[s / S, s % S] <- v,   s its slot
//
// Shape legend: T tokens of all batch entries, D features of a head, P rotated pairs, N blocks of the cache, S slots of a
// block. Rotated features are split into chunks of NP pairs, copied features (v, and the unrotated part of k) into chunks of
// 2 · NP elements. A thread block processes a tile of tokens of one tensor, and of those a part of the heads: consecutive
// threads cover consecutive chunks, then heads, then tokens. A thread processes its chunk of several heads and computes
// cos θ, sin θ and the place in the cache once for them. Everything is read once and written once (k twice if it is also
// rotated in place).
//
// Memory-bound for large calls, latency-bound for few tokens: independent loads (x, the slot, the position) are issued first,
// and only the load of the table row depends on one of them.
//
// Calls of serving engines, with a position and a slot for every token, have a specialized kernel in direct.cuh.

#include <algorithm>

#include "../../rope/_cuda/angles.cuh"
#include "../../rope/_cuda/chunk.cuh"
#include "../../rope/_cuda/launch.cuh"
#include "../plan.h"
#include "direct.cuh"

namespace {

// What a thread block processes: q, k, v, or the unrotated part of k.
enum Role : int { Q, K, V, REST, ROLES };

struct Tensor {
  char* x;
  char* cache;                           // null: not cached
  int64_t strides[3], cache_strides[3];  // bytes: batch, token, head; block, slot, head
  int64_t step, cache_step;              // bytes between consecutive heads of a thread
  uint32_t heads, start, skipped;        // start: bytes before the rotated features; skipped: bytes of these in a copied head
  uint32_t packs;                        // accesses of half a chunk in a copied head
  uint32_t first_block, block_tokens;
  Divisor chunks, side, parts;  // chunks per head; heads side by side in a thread block; parts that the heads are split into
};

// Cache slots of tokens.
struct Places {
  const void *slots, *table;
  int64_t slot_strides[2], table_strides[2];  // elements: batch, token; sequence, block
  int64_t count, reach;                       // slots in the cache; positions of a sequence that have a slot
  uint32_t mapped;                            // tokens with an entry in slots
  bool wide_slots, wide_table, sequence_is_token;
  Divisor size;  // slots per cache block
};

struct Params {
  Tensor tensors[ROLES];
  Places places;
  Work work;
  Divisor batch_tokens;
  uint32_t all_tokens;
  bool write_k;
};

// --- The slot of a token ---------------------------------------------------------------------------------------------

// Loads a token's entry in slots, if given. It is not used before `place_of`, not even for sign extension, so that the load
// overlaps with that of the position. A negative 32-bit slot becomes a large positive one, out of range like -1.
__device__ __forceinline__ int64_t entry_of(const Places& c, uint32_t batch, uint32_t token) {
  if (!c.slots || token >= c.mapped) return -1;
  const int64_t at = batch * c.slot_strides[0] + token * c.slot_strides[1];
  return c.wide_slots ? static_cast<const int64_t*>(c.slots)[at] : static_cast<const uint32_t*>(c.slots)[at];
}

// Byte offset of a token's place in a cache; -1 for a token without a slot.
__device__ int64_t place_of(const Params& params, const Tensor& t, uint32_t batch, uint32_t token, int64_t entry) {
  const Places& c = params.places;
  const Work& p = params.work;
  int64_t slot;
  if (c.slots) {
    if (p.bounds && token >= integer(p.bounds, p.wide_bounds, p.sequences)) return -1;
    slot = entry;
  } else {
    int64_t position, sequence = batch;
    bool passes = false;
    if (p.positions) {
      position = integer(p.positions, p.wide_positions, batch * p.position_strides[1] + token * p.position_strides[2]);
    } else {
      position = running_row(p, batch, token, passes, sequence);
    }
    if (passes || position < 0 || position >= c.reach) return -1;
    if (c.sequence_is_token) sequence = token;
    slot = sequence * c.size.d + position;
    if (c.table) {
      const uint32_t nth = c.size(static_cast<uint32_t>(position));
      const int64_t block = integer(c.table, c.wide_table, sequence * c.table_strides[0] + nth * c.table_strides[1]);
      if (block < 0 || block >= c.count) return -1;  // so that no product below exceeds 2⁶²
      slot = block * c.size.d + (position - nth * c.size.d);
    }
  }
  if (slot < 0 || slot >= c.count) return -1;
  const uint32_t block = c.size(static_cast<uint32_t>(slot)), nth = static_cast<uint32_t>(slot) - block * c.size.d;
  return block * t.cache_strides[0] + nth * t.cache_strides[1];
}

// --- The kernel ------------------------------------------------------------------------------------------------------

template <class T, bool IN, bool OUT, int NP, int HEADS, Role ROLE>
__device__ __forceinline__ void move(const Params& params, uint32_t block) {
  constexpr bool ROTATES = ROLE == Q || ROLE == K, CACHED = ROLE != Q;
  // Copied chunks use one wide access if alignment allows it.
  using From = Chunk<T, ROTATES ? IN : IN || OUT, NP>;
  using To = Chunk<T, ROTATES ? OUT : IN || OUT, NP>;
  constexpr uint32_t SIZE = sizeof(T), PACK = NP * SIZE;
  const Work& p = params.work;
  const Tensor& t = params.tensors[ROLE];

  const uint32_t tile = t.parts(block), part = block - tile * t.parts.d;
  const uint32_t pair = t.chunks(threadIdx.x), chunk = threadIdx.x - pair * t.chunks.d;
  const uint32_t row = t.side(pair), head = part * (HEADS * p.steps * t.side.d) + pair - row * t.side.d;
  const uint32_t n = tile * t.block_tokens + row;
  const bool active = row < t.block_tokens && n < params.all_tokens;
  const uint32_t batch = params.batch_tokens(n), token = n - batch * params.batch_tokens.d;
  int heads = active ? int(t.heads) - int(head) : 0;  // remaining, from this thread's first head on

  // Byte offset of the chunk in a head, and the distance from its first to its second access.
  uint32_t at, to_at, apart, to_apart;
  bool both = true;
  if (ROTATES) {
    at = t.start + chunk * (IN ? 2 : 1) * PACK, to_at = t.start + chunk * (OUT ? 2 : 1) * PACK;
    apart = IN ? SIZE : p.pairs * SIZE, to_apart = OUT ? SIZE : p.pairs * SIZE;
  } else {
    const uint32_t one = From::WHOLE ? 2 * chunk : chunk, other = From::WHOLE ? one + 1 : chunk + t.chunks.d;
    at = one * PACK, both = other < t.packs;
    uint32_t other_at = other * PACK;
    if (at >= t.start) at += t.skipped;
    if (other_at >= t.start) other_at += t.skipped;
    apart = to_apart = other_at - at, to_at = at;
  }
  char* x = t.x + batch * t.strides[0] + token * t.strides[1] + head * t.strides[2];

  wait_and_launch_dependents();
  From from[HEADS];
#pragma unroll
  for (int i = 0; i < HEADS; ++i)
    if (i * int(t.side.d) < heads) from[i].read(x + i * t.step + at, apart, both);
  const bool caches = CACHED && heads > 0;
  const int64_t entry = caches ? entry_of(params.places, batch, token) : -1;
  int64_t place = -1;
  // In large calls other threads hide the latency, and registers are short: resolve the place first.
  if (caches && HEADS > 1) place = place_of(params, t, batch, token, entry);
  float cos[NP], sin[NP];
  bool passes = false;
  if (ROTATES && heads > 0) angles(p, batch, token, chunk * NP, cos, sin, passes);
  if (caches && HEADS == 1) place = place_of(params, t, batch, token, entry);
  const bool rotates = ROTATES && !(IN == OUT && passes);
  char* cache = t.cache + place + head * t.cache_strides[2] + to_at;
  for (uint32_t again = 0; again < p.steps; ++again) {
    if (again > 0) {
      x += HEADS * t.step, cache += HEADS * t.cache_step, heads -= HEADS * t.side.d;
#pragma unroll
      for (int i = 0; i < HEADS; ++i)
        if (i * int(t.side.d) < heads) from[i].read(x + i * t.step + at, apart, both);
    }
    if (ROTATES && IN != OUT) __syncthreads();  // the whole head must be read before any thread writes to it
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
      if (i * int(t.side.d) >= heads) continue;
      To to;
      turn<T, ROTATES ? IN : IN || OUT, ROTATES ? OUT : IN || OUT, NP>(from[i], to, cos, sin, rotates, passes);
      if (ROLE == Q || (ROLE == K && params.write_k)) to.write(x + i * t.step + to_at, to_apart, both);
      if (CACHED && place >= 0) to.write(cache + i * t.cache_step, to_apart, both);
    }
  }
}

template <class T, bool IN, bool OUT, int NP, int HEADS>
__global__ void __launch_bounds__(most_threads(NP), (HEADS > 1 ? 768 : 1024) / most_threads(NP))
    rope_and_cache_kernel(const __grid_constant__ Params params) {
  const uint32_t block = blockIdx.x;
  const Tensor* const t = params.tensors;
  if (block < t[K].first_block) {
    move<T, IN, OUT, NP, HEADS, Q>(params, block);
  } else if (block < t[V].first_block) {
    move<T, IN, OUT, NP, HEADS, K>(params, block - t[K].first_block);
  } else if (block < t[REST].first_block) {
    move<T, IN, OUT, NP, HEADS, V>(params, block - t[V].first_block);
  } else {
    move<T, IN, OUT, NP, HEADS, REST>(params, block - t[REST].first_block);
  }
}

// --- The launch ------------------------------------------------------------------------------------------------------

constexpr int NARROW_HEADS = 1;  // heads per thread if accesses are narrow: more would take a minute to compile

template <class T, bool IN, bool OUT, int NP, int HEADS>
struct RotateAndCache {
  static constexpr int OF_NARROW = NARROW_HEADS;
  static constexpr auto kernel = rope_and_cache_kernel<T, IN, OUT, NP, HEADS>;
};

}  // namespace

#if defined(FUSEWISE_PARTS) && !defined(FUSEWISE_DTYPE)
// The entry point of a library that is compiled in parts, one per dtype.
extern "C" int fusewise_rope_and_cache_float(const CachePlan*, const CacheCall*, void*);
extern "C" int fusewise_rope_and_cache_bfloat16(const CachePlan*, const CacheCall*, void*);
extern "C" int fusewise_rope_and_cache_half(const CachePlan*, const CacheCall*, void*);

extern "C" __attribute__((visibility("default"))) int fusewise_rope_and_cache(const CachePlan* cache, const CacheCall* call, void* stream) {
  const int64_t kind = cache->rotation.kind;
  const auto part = kind == FLOAT32    ? fusewise_rope_and_cache_float
                    : kind == BFLOAT16 ? fusewise_rope_and_cache_bfloat16
                                       : fusewise_rope_and_cache_half;
  return part(cache, call, stream);
}
#else
#ifndef FUSEWISE_ENTRY
#define FUSEWISE_ENTRY fusewise_rope_and_cache
#endif

// Rotate q and k of the call in place (x and y are the same), and write k and v to the caches, on a stream of the current
// device. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int FUSEWISE_ENTRY(const CachePlan* cache, const CacheCall* cache_call,
                                                                     void* stream) {
  const Plan* plan = &cache->rotation;
  const Call* call = &cache_call->rotation;
  const int64_t size = plan->kind == FLOAT32 ? 4 : 2, pairs = plan->pairs, all_tokens = plan->batch * plan->tokens;
  const bool halves = !plan->interleaved_in && !plan->interleaved_out;
  Params params{};
  if (all_tokens == 0) return cudaSuccess;

  // The tensors, and the widest access that the alignment of all addresses allows.
  Alignment data;
  for (int role = Q; role < ROLES; ++role) {
    Tensor& t = params.tensors[role];
    const int of = role == Q ? 0 : 1, in_cache = role == V ? 1 : 0;
    t.x = static_cast<char*>(role == V ? const_cast<void*>(cache_call->v) : call->y[of]);
    t.heads = static_cast<uint32_t>(plan->heads[of]);
    const int64_t extents[3] = {plan->batch, plan->tokens, plan->heads[of]};
    data.see(t.x);
    for (int i = 0; i < 3; ++i) {
      t.strides[i] = size * (role == V ? cache->v_strides[i] : plan->x_strides[of][i]);
      if (extents[i] > 1) data.see(t.strides[i]);
    }
    if (role == V) {
      data.see(cache->v_dim * size);
      t.start = 0;
    } else {
      t.start = static_cast<uint32_t>(plan->start[of] * size);
      data.see(t.start);
      if (role == REST) data.see((plan->head_dim[1] - plan->start[1] - 2 * pairs) * size);
    }
    if (role == REST) t.skipped = static_cast<uint32_t>(2 * pairs * size);
    if (role == Q) continue;
    t.cache = static_cast<char*>(cache_call->caches[in_cache]);
    data.see(t.cache);
    const int64_t cache_extents[3] = {cache->blocks, cache->block_size, plan->heads[1]};
    for (int i = 0; i < 3; ++i) {
      t.cache_strides[i] = size * cache->cache_strides[in_cache][i];
      if (cache_extents[i] > 1) data.see(t.cache_strides[i]);
    }
  }
  data.see(pairs * size * (halves ? 1 : 2));
  const int64_t np = std::max<int64_t>(1, data.bytes() / size / (halves ? 1 : 2));
  Work& p = params.work;
  set_angles(p, *plan, *call, np, false);
  if (Direct d{}; direct(*cache, *cache_call, p, np, d))
    return with_dtype(plan->kind, [&](auto element) { return launch_direct<decltype(element)>(d, *plan, stream); });

  Places& c = params.places;
  // The kernel detects absent tensors by null pointers. One without elements is never read, but must not be null.
  c.slots = cache->has_slots && !cache_call->slots ? cache_call : cache_call->slots;
  c.table = cache->has_table && !cache_call->table ? cache_call : cache_call->table;
  for (int i = 0; i < 2; ++i) c.slot_strides[i] = cache->slot_strides[i], c.table_strides[i] = cache->table_strides[i];
  c.count = cache->blocks * cache->block_size;
  c.reach = std::min<int64_t>(cache->block_size * (c.table ? cache->table_blocks : 1), INT32_MAX);
  c.mapped = static_cast<uint32_t>(cache->mapped);
  c.wide_slots = cache->wide_slots, c.wide_table = cache->wide_table, c.sequence_is_token = cache->sequence_is_token;
  c.size = Divisor(std::max<int64_t>(1, cache->block_size));
  params.write_k = cache->write_k;
  params.all_tokens = static_cast<uint32_t>(all_tokens);
  params.batch_tokens = Divisor(plan->tokens);

  // Thread blocks: a thread has a chunk of one head, or of several if that leaves enough threads to fill the GPU.
  int64_t chunks[ROLES], all = 0;
  for (int role = Q; role < ROLES; ++role) {
    Tensor& t = params.tensors[role];
    const int64_t copied = role == V ? cache->v_dim : plan->head_dim[1] - 2 * pairs;
    t.packs = static_cast<uint32_t>(copied / np);
    chunks[role] = role == Q || role == K ? pairs / np : (t.packs + 1) / 2;
    all += chunks[role] * t.heads * all_tokens;
  }
  if (all == 0) return cudaSuccess;
  const Device device = current_device();
  const int64_t enough = int64_t(device.processors) * 2048;
  const int64_t unrolled = heads_for(np, size, NARROW_HEADS, all, enough);
  const bool costly = p.read == OF_ANGLES || p.read == OF_FREQUENCIES;  // computed angles are amortized over more heads
  p.steps = static_cast<uint32_t>(costly ? std::clamp<int64_t>(all / (2 * enough * unrolled), 1, 8) : 1);
  int64_t threads = THREADS;
  while (threads > 32 && all / (unrolled * p.steps * threads) < 4 * device.processors) threads /= 2;
  for (const int64_t count : chunks) threads = std::max(threads, count);
  int64_t blocks = 0;
  for (int role = Q; role < ROLES; ++role) {
    Tensor& t = params.tensors[role];
    t.first_block = static_cast<uint32_t>(blocks);
    if (chunks[role] * t.heads == 0) continue;
    const int64_t side = std::min(threads / chunks[role], ceil_div(t.heads, unrolled * p.steps));
    const int64_t parts = ceil_div(t.heads, side * unrolled * p.steps), tokens = threads / (chunks[role] * side);
    t.chunks = Divisor(chunks[role]), t.side = Divisor(side), t.parts = Divisor(parts);
    t.block_tokens = static_cast<uint32_t>(tokens);
    t.step = side * t.strides[2], t.cache_step = side * t.cache_strides[2];
    blocks += ceil_div(all_tokens, tokens) * parts;
  }
  const dim3 grid(static_cast<unsigned>(blocks)), block(static_cast<unsigned>(threads));
  return launched(kernel_for<RotateAndCache>(*plan, np, unrolled), grid, block, stream, device, params);
}
#endif

#if !defined(FUSEWISE_PARTS) || !defined(FUSEWISE_DTYPE)
// A cudaError_t that tells whether the kernels can run on the current device, and if not, why.
extern "C" __attribute__((visibility("default"))) int fusewise_rope_and_cache_probe() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, rope_and_cache_kernel<float, false, false, 1, 1>);
}

extern "C" __attribute__((visibility("default"))) const char* fusewise_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
#endif
