// RoPE kernel for Hopper, for large calls that would otherwise make accesses of less than 16 bytes to global memory, or write 32-byte
// sectors in parts. The heads of a token are one contiguous run of bytes: TMA bulk copies (cp.async.bulk) move it to shared memory and
// back, so that DRAM sees whole-sector copies. Threads only touch the rotated features, in shared memory.
//
// Shape legend: as in rope.cu. A block processes one unit: all heads of q or of k, or a part of them, of one token or, where these are
// few bytes, of 2, 4 or 8 adjacent tokens. A thread takes the same place in both halves (or one access to interleaved pairs) in several
// heads of one token. Many small blocks keep more memory traffic in flight than a few persistent blocks with a ring buffer of units.

#pragma once

#include <numeric>

#include "launch.cuh"
#include "rows.cuh"
#include "runs.cuh"
#include "words.cuh"

namespace {

constexpr int64_t BULK_LARGE = 4 << 20;  // minimum bytes moved by a call
constexpr int64_t BULK_THREADS = 64, MOST_BULK_THREADS = 256;  // per block: as a rule, and if so many are needed for all its tokens
// Bytes of a token in a unit at most. A unit has as many tokens as it takes to have 2560 bytes on average, since an SM launches only
// 6 million blocks per second; if 8 tokens have less than 2048, another kernel is faster.
constexpr int64_t MOST_OF_UNIT = 4 << 10, WANTED_OF_UNIT = 2560, FEWEST_OF_UNIT = 2 << 10, MOST_TOKENS = 8;
constexpr int64_t RUN = 16;  // a bulk copy's size and addresses are multiples of so many bytes
constexpr uint32_t BARRIER = 128;  // bytes of shared memory reserved for the mbarrier, before the unit

struct BulkTensor {
  const char* x;
  char* y;
  int64_t x_strides[2], y_strides[2];  // bytes: batch, token
  uint32_t heads, width, of_unit;      // heads; bytes per head; heads per unit
  uint32_t first;                      // byte offset in a head of the rotated features; for the inverse of halves, of the second one
};

struct Bulk {
  Rows rows;
  uint32_t at_once;              // heads of a token that the block rotates at once
  int32_t halves;                // bytes from that half to the other, negative for the inverse
  float turn;                    // sign of sin: -1 for the inverse; not used by the half pairing
  uint32_t tokens, log2_tokens;  // per batch entry; of tokens per unit
  uint32_t of_q;                 // units per unit's tokens for q
  Divisor of_tokens, of_entry;   // units per unit's tokens for q and k; runs of such tokens per batch entry
  Divisor chunk;                 // threads per head
  uint32_t threads;              // per block
  BulkTensor tensors[2];
};

// BYTES: width of an access to shared memory; NEIGHBOURS: interleaved pairs.
template <class T, class TABLE, int BYTES, bool NEIGHBOURS>
__global__ void __launch_bounds__(MOST_BULK_THREADS) bulk_rope_kernel(const __grid_constant__ Bulk p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int N = BYTES / sizeof(T), PAIRS = NEIGHBOURS ? N / 2 : N;
  const uint32_t nth = p.of_tokens(blockIdx.x), in_tokens = blockIdx.x - nth * p.of_tokens.d;
  const uint32_t batch = p.of_entry(nth), token = (nth - batch * p.of_entry.d) << p.log2_tokens;  // the unit's first
  const uint32_t tokens = min(1u << p.log2_tokens, p.tokens - token);
  const bool is_k = in_tokens >= p.of_q;
  const BulkTensor& t = p.tensors[is_k];
  const uint32_t first = (in_tokens - (is_k ? p.of_q : 0)) * t.of_unit, heads = min(t.of_unit, t.heads - first);

  char* const memory = dynamic_smem();
  const uint32_t barrier = smem_address(memory), unit = barrier + BARRIER, bytes = heads * t.width;  // of a token
  const bool leads = threadIdx.x == 0;
  wait_and_launch_dependents();
  if (leads) {
    mbarrier_init(barrier, 1);  // the arrival of this thread
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, tokens * bytes);
    const char* const x = t.x + batch * t.x_strides[0] + token * t.x_strides[1] + int64_t(first) * t.width;
    for (uint32_t i = 0; i < tokens; ++i) bulk_load(x + i * t.x_strides[1], unit + i * bytes, bytes, barrier);
  }
  // This thread's chunk, token and first head.
  const uint32_t place = p.chunk(threadIdx.x), chunk = threadIdx.x - place * p.chunk.d;
  const uint32_t mine = place >> p.log2_tokens, of_mine = place - (mine << p.log2_tokens);
  const bool works = mine < p.at_once && of_mine < tokens;
  bool inside;
  const int64_t row_at = p.rows.of(batch, token + (works ? of_mine : 0), inside) + chunk * (PAIRS * sizeof(TABLE));
  Words<TABLE, PAIRS> cosines, sines;
  cosines.read(p.rows.cos + row_at), sines.read(p.rows.sin + row_at);
  __syncthreads();  // the mbarrier is initialized
  mbarrier_wait(barrier, 0);

  if (works)
    for (uint32_t head = mine; head < heads; head += p.at_once) {
      char* const at = memory + BARRIER + of_mine * bytes + head * t.width + t.first + chunk * BYTES;
      Words<T, N> one, other;
      one.read(at);
      if (!NEIGHBOURS) other.read(at + p.halves);
      constexpr uint32_t nan = sizeof(T) == 4 ? 0x7fffffff : 0x7fff7fff;
      if (!inside) one.fill(nan), other.fill(nan);
      float cos[PAIRS], sin[PAIRS], a[N], b[N];  // neighbours are all in a
      cosines.get(cos), sines.get(sin), one.get(a);
      if (!NEIGHBOURS) other.get(b);
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        float &first_of = NEIGHBOURS ? a[2 * j] : a[j], &second_of = NEIGHBOURS ? a[2 * j + 1] : b[j];
        const float x_a = first_of, x_b = second_of, s = NEIGHBOURS ? p.turn * sin[j] : sin[j];
        first_of = fmaf(x_a, cos[j], -(x_b * s));
        second_of = fmaf(x_b, cos[j], x_a * s);
      }
      one.set(a), one.write(at);
      if (!NEIGHBOURS) other.set(b), other.write(at + p.halves);
    }
  fence_proxy_async();
  __syncthreads();
  if (leads) {
    char* const y = t.y + batch * t.y_strides[0] + token * t.y_strides[1] + int64_t(first) * t.width;
    for (uint32_t i = 0; i < tokens; ++i) bulk_store(y + i * t.y_strides[1], unit + i * bytes, bytes);
    bulk_store_wait_read();
  }
#endif
}

// --- The launch ------------------------------------------------------------------------------------------------------

// Whether this kernel supports a call whose halves allow accesses of `bytes`. If so, sets its parameters. `alone`: as for
// `set_angles`.
inline bool bulk(const Plan& plan, const Call& call, int64_t batch, int64_t tokens, int64_t bytes, bool alone, const Device& device,
                 Bulk& p) {
  const bool adjacent = plan.interleaved_in;
  const int64_t size = plan.kind == FLOAT32 ? 4 : 2, access = bytes / size, pairs = adjacent ? access / 2 : access;  // of an access
  if (device.generation != 9 || plan.interleaved_in != plan.interleaved_out || pairs == 0) return false;
  if (!rows_of(plan, call, pairs, alone, p.rows)) return false;

  Alignment runs;
  int64_t units = 0, run = 0, copied = 0;
  bool in_parts = bytes < 16;
  for (int o = 0; o < plan.operands; ++o) {
    BulkTensor& t = p.tensors[o];
    t.x = static_cast<const char*>(call.x[o]), t.y = static_cast<char*>(call.y[o]);
    runs.see(t.x), runs.see(t.y);
    for (int i = 0; i < 2; ++i) {
      const int from = alone ? 0 : i;
      t.x_strides[i] = plan.x_strides[o][from] * size, t.y_strides[i] = plan.y_strides[o][from] * size;
      if ((i == 0 ? batch : tokens) > 1) runs.see(t.x_strides[i]), runs.see(t.y_strides[i]);
    }
    const int64_t width = plan.head_dim[o] * size, heads = plan.heads[o];
    if (heads == 0 || width > MOST_OF_UNIT) return false;
    if (heads > 1 && (plan.x_strides[o][2] * size != width || plan.y_strides[o][2] * size != width)) return false;
    runs.see(heads * width);
    const int64_t whole = RUN / std::gcd(RUN, width);  // so many heads are a multiple of RUN bytes
    if (whole * width > MOST_OF_UNIT) return false;
    const int64_t parts = ceil_div(heads, MOST_OF_UNIT / width / whole * whole);
    t.heads = static_cast<uint32_t>(heads), t.width = static_cast<uint32_t>(width);
    t.of_unit = static_cast<uint32_t>(ceil_div(ceil_div(heads, parts), whole) * whole);
    t.first = static_cast<uint32_t>((plan.start[o] + (plan.inverse && !adjacent ? plan.pairs : 0)) * size);
    units += ceil_div(heads, t.of_unit), run += heads * width, copied += plan.head_dim[o] - 2 * plan.pairs;
    const int64_t accesses = (plan.head_dim[o] - 2 * plan.pairs) / access;  // copying accesses of the light kernel, two per thread
    in_parts |= 2 * first_of_two(plan, o, accesses, bytes) != accesses;
    if (o == 0) p.of_q = static_cast<uint32_t>(units);
  }
  const int64_t chunks = plan.pairs / pairs;
  int64_t of_unit = 1;  // tokens
  while (run * of_unit < WANTED_OF_UNIT * units && of_unit < MOST_TOKENS) of_unit *= 2, ++p.log2_tokens;
  const int64_t threads = std::max(BULK_THREADS, ceil_div(chunks * of_unit, WARP) * WARP);
  const int64_t of_entry = ceil_div(tokens, of_unit);
  if (runs.bytes() < RUN || !in_parts || (plan.in_place && copied > 0)) return false;
  if (run * of_unit < FEWEST_OF_UNIT * units || 2 * run * tokens * batch < BULK_LARGE) return false;
  if (threads > MOST_BULK_THREADS || units * of_entry * batch > INT32_MAX) return false;
  p.tokens = static_cast<uint32_t>(tokens), p.of_tokens = Divisor(units), p.of_entry = Divisor(of_entry);
  p.chunk = Divisor(chunks), p.at_once = static_cast<uint32_t>(threads / chunks / of_unit), p.threads = static_cast<uint32_t>(threads);
  p.halves = static_cast<int32_t>(plan.inverse ? -plan.pairs * size : plan.pairs * size), p.turn = plan.inverse ? -1.0f : 1.0f;
  return true;
}

template <class T, class TABLE, bool NEIGHBOURS>
auto bulk_kernel(int64_t bytes) {
  if constexpr (sizeof(T) == 2 && !NEIGHBOURS)
    if (bytes == 2) return bulk_rope_kernel<T, TABLE, 2, NEIGHBOURS>;
  if constexpr (sizeof(T) == 2 || !NEIGHBOURS)
    if (bytes == 4) return bulk_rope_kernel<T, TABLE, 4, NEIGHBOURS>;
  return bytes == 8 ? bulk_rope_kernel<T, TABLE, 8, NEIGHBOURS> : bulk_rope_kernel<T, TABLE, 16, NEIGHBOURS>;
}

template <class T, class TABLE>
auto bulk_kernel(const Plan& plan, int64_t bytes) {
  return plan.interleaved_in ? bulk_kernel<T, TABLE, true>(bytes) : bulk_kernel<T, TABLE, false>(bytes);
}

inline cudaError_t launch_bulk(const Bulk& p, const Plan& plan, int64_t batch, int64_t bytes, const Device& device, void* stream) {
  const auto kernel = with_dtype(plan.kind, [&](auto element) {
    using T = decltype(element);
    return plan.table_kind == FLOAT32 ? bulk_kernel<T, float>(plan, bytes) : bulk_kernel<T, T>(plan, bytes);
  });
  const uint32_t of_token = std::max(p.tensors[0].of_unit * p.tensors[0].width, p.tensors[1].of_unit * p.tensors[1].width);
  const dim3 grid(static_cast<unsigned>(batch * p.of_entry.d * p.of_tokens.d));
  return launched(kernel, grid, dim3(p.threads), stream, device, p, BARRIER + (of_token << p.log2_tokens));
}

}  // namespace
