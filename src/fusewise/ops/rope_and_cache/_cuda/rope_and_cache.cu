// RoPE of q and k in place and the write of k and v into a cache, in one launch.
//
//     q, k <- rope(q, k),   key_cache[s / S, s % S] <- k of a token,   value_cache[s / S, s % S] <- v,   s its slot
//
// Shape legend: T tokens of all batch entries, D features of a head, P rotated pairs, N blocks of the cache, S slots of a
// block. The features that rotate are cut into chunks of NP pairs, those that are copied (v, and of k what does not rotate)
// into chunks of 2 · NP elements. A block has a tile of tokens of one tensor, and of those a part of the heads: threads have
// neighbouring chunks, then heads, then tokens, each its chunk of several heads, for which it finds cos θ and sin θ, and the
// place in the cache, once. Everything is read once and written once (k twice where it is to be rotated in place, too).
//
// Bound by memory where there is much to do, by latency at a few tokens: what depends on nothing is asked for first, x, the
// slot and the position, and only the row of the table has to wait for one of them.
//
// The call of a serving engine, with a position and a slot for every token, has a kernel of its own in direct.cuh.

#include <algorithm>

#include "../../rope/_cuda/angles.cuh"
#include "../../rope/_cuda/chunk.cuh"
#include "../../rope/_cuda/launch.cuh"
#include "../plan.h"
#include "direct.cuh"

namespace {

// What a block moves: q, k, v, or what does not rotate of k.
enum Role : int { Q, K, V, REST, ROLES };

struct Tensor {
  char* x;
  char* cache;                           // null: it is not cached
  int64_t strides[3], cache_strides[3];  // bytes: batch, token, head; block, slot, head
  int64_t step, cache_step;              // bytes from one head of a thread to its next
  uint32_t heads, start, skipped;        // bytes before the rotated features, and of those where the others are copied
  uint32_t packs;                        // accesses of half a chunk in a copied head
  uint32_t first_block, block_tokens;
  Divisor chunks, side, parts;  // of a head; heads side by side in a block; parts of the heads
};

// Where tokens go.
struct Places {
  const void *slots, *table;
  int64_t slot_strides[2], table_strides[2];  // elements: batch, token; sequence, block
  int64_t count, reach;                       // slots of the cache; positions that a sequence has a slot for
  uint32_t mapped;                            // tokens with an entry in slots
  bool wide_slots, wide_table, sequence_is_token;
  Divisor size;  // of a block
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

// A token's entry in the slots, if they are given: asked for here and not looked at before `place_of`, not even for a sign, so
// that it is under way together with the position. A negative one of 32 bits becomes one past every cache, as good as -1.
__device__ __forceinline__ int64_t entry_of(const Places& c, uint32_t batch, uint32_t token) {
  if (!c.slots || token >= c.mapped) return -1;
  const int64_t at = batch * c.slot_strides[0] + token * c.slot_strides[1];
  return c.wide_slots ? static_cast<const int64_t*>(c.slots)[at] : static_cast<const uint32_t*>(c.slots)[at];
}

// Where a token of a batch entry goes, in bytes from the start of a cache; -1 for one that has no slot there.
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
      if (block < 0 || block >= c.count) return -1;  // no product below exceeds 2⁶²
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
  // One access for a chunk that is copied, where it may be as wide.
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
  int heads = active ? int(t.heads) - int(head) : 0;  // from this thread's first on

  // Where the chunk lies in a head, and its second access from the first.
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

#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");  // they wait for the end of this kernel in the same way
#endif
  From from[HEADS];
#pragma unroll
  for (int i = 0; i < HEADS; ++i)
    if (i * int(t.side.d) < heads) from[i].read(x + i * t.step + at, apart, both);
  const bool caches = CACHED && heads > 0;
  const int64_t entry = caches ? entry_of(params.places, batch, token) : -1;
  int64_t place = -1;
  // Where there is much to do, others work while this thread waits, and registers are short.
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
    if (ROTATES && IN != OUT) __syncthreads();  // a head is read whole before another thread writes into it
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

constexpr int NARROW_HEADS = 1;  // of a thread, where accesses are narrow: more of them would take a minute to compile

template <class T, bool IN, bool OUT, int NP, int HEADS>
struct RotateAndCache {
  static constexpr int OF_NARROW = NARROW_HEADS;
  static constexpr auto kernel = rope_and_cache_kernel<T, IN, OUT, NP, HEADS>;
};

}  // namespace

// Rotate q and k of the call, which are its x and its y, and write k and v into the caches, on the stream of the current
// device. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusewise_rope_and_cache(const CachePlan* cache, const CacheCall* cache_call,
                                                                              void* stream) {
  const Plan* plan = &cache->rotation;
  const Call* call = &cache_call->rotation;
  const int64_t size = plan->kind == FLOAT32 ? 4 : 2, pairs = plan->pairs, all_tokens = plan->batch * plan->tokens;
  const bool halves = !plan->interleaved_in && !plan->interleaved_out;
  Params params{};
  if (all_tokens == 0) return cudaSuccess;

  // The tensors, and the widest accesses that every address allows.
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
  // The kernel tells by the pointers which there are. One without elements is never read from, but must not be null.
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

  // Blocks: threads with a chunk of one head each, or of several where there is enough to do for all of them.
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
  const bool costly = p.read == OF_ANGLES || p.read == OF_FREQUENCIES;  // angles that are computed serve more heads
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

// Why the kernels cannot run on the current device, as a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusewise_rope_and_cache_probe() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, rope_and_cache_kernel<float, false, false, 1, 1>);
}

extern "C" __attribute__((visibility("default"))) const char* fusewise_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
