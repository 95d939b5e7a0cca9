// RoPE kernel for Hopper, for large calls with partial rotation that would otherwise write 32-byte sectors in parts. The heads of a
// token are one contiguous run of bytes: TMA bulk copies (cp.async.bulk) move it to shared memory and back, so that DRAM sees
// whole-sector copies. Threads only touch the rotated features, in shared memory.
//
// Shape legend: as in rope.cu. A block processes one unit: all heads of q or of k of one token, or a part of them. A thread
// takes the same place in both halves of several heads. Many small blocks keep more memory traffic in flight than a few
// persistent blocks with a ring buffer of units.

#pragma once

#include "launch.cuh"
#include "rows.cuh"
#include "runs.cuh"
#include "words.cuh"

namespace {

constexpr uint32_t BULK_THREADS = 64;
constexpr int64_t BULK_LARGE = 16 << 20;  // minimum bytes moved by a call
// Bytes of a unit: the maximum, and the minimum average, since an SM launches only 6 million blocks per second.
constexpr int64_t MOST_OF_UNIT = 4 << 10, FEWEST_OF_UNIT = 2560;
constexpr uint32_t BARRIER = 128;  // bytes of shared memory reserved for the mbarrier, before the unit

struct BulkTensor {
  const char* x;
  char* y;
  int64_t x_strides[2], y_strides[2];  // bytes: batch, token
  uint32_t heads, width, of_unit;      // heads; bytes per head; heads per unit
  uint32_t first;                      // byte offset in a head of the first rotated half, for the inverse the second
};

struct Bulk {
  Rows rows;
  uint32_t at_once;                 // heads that the block rotates at once
  int32_t halves;                   // bytes from that half to the other, negative for the inverse
  uint32_t of_q;                    // units per token for q
  Divisor of_token, tokens, chunk;  // units per token, tokens per batch entry, threads per head
  BulkTensor tensors[2];
};

// BYTES: width of an access to shared memory.
template <class T, class TABLE, int BYTES>
__global__ void __launch_bounds__(BULK_THREADS) bulk_rope_kernel(const __grid_constant__ Bulk p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int N = BYTES / sizeof(T);
  const uint32_t nth = p.of_token(blockIdx.x), in_token = blockIdx.x - nth * p.of_token.d;
  const uint32_t batch = p.tokens(nth), token = nth - batch * p.tokens.d;
  const bool is_k = in_token >= p.of_q;
  const BulkTensor& t = p.tensors[is_k];
  const uint32_t first = (in_token - (is_k ? p.of_q : 0)) * t.of_unit, heads = min(t.of_unit, t.heads - first);

  char* const memory = dynamic_smem();
  const uint32_t barrier = smem_address(memory), unit = barrier + BARRIER, bytes = heads * t.width;
  const bool leads = threadIdx.x == 0;
  wait_and_launch_dependents();
  if (leads) {
    mbarrier_init(barrier, 1);  // the arrival of this thread
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, bytes);
    bulk_load(t.x + batch * t.x_strides[0] + token * t.x_strides[1] + int64_t(first) * t.width, unit, bytes, barrier);
  }
  const uint32_t mine = p.chunk(threadIdx.x), chunk = threadIdx.x - mine * p.chunk.d;  // this thread's first head and its chunk
  bool inside;
  const int64_t row_at = p.rows.of(batch, token, inside) + chunk * (N * sizeof(TABLE));
  Words<TABLE, N> cosines, sines;
  cosines.read(p.rows.cos + row_at), sines.read(p.rows.sin + row_at);
  __syncthreads();  // the mbarrier is initialized
  mbarrier_wait(barrier, 0);

  if (mine < p.at_once)
    for (uint32_t head = mine; head < heads; head += p.at_once) {
      char* const place = memory + BARRIER + head * t.width + t.first + chunk * BYTES;
      Words<T, N> one, other;
      one.read(place), other.read(place + p.halves);
      constexpr uint32_t nan = sizeof(T) == 4 ? 0x7fffffff : 0x7fff7fff;
      if (!inside) one.fill(nan), other.fill(nan);
      float cos[N], sin[N], a[N], b[N];
      cosines.get(cos), sines.get(sin), one.get(a), other.get(b);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float x_a = a[j], x_b = b[j];
        a[j] = fmaf(x_a, cos[j], -(x_b * sin[j]));
        b[j] = fmaf(x_b, cos[j], x_a * sin[j]);
      }
      one.set(a), other.set(b);
      one.write(place), other.write(place + p.halves);
    }
  fence_proxy_async();
  __syncthreads();
  if (leads) {
    bulk_store(t.y + batch * t.y_strides[0] + token * t.y_strides[1] + int64_t(first) * t.width, unit, bytes);
    bulk_store_wait_read();
  }
#endif
}

// --- The launch ------------------------------------------------------------------------------------------------------

// Whether this kernel supports a call whose halves allow accesses of `bytes`. If so, sets its parameters. `alone`: as for
// `set_angles`.
inline bool bulk(const Plan& plan, const Call& call, int64_t batch, int64_t tokens, int64_t bytes, bool alone, const Device& device,
                 Bulk& p) {
  const int64_t size = plan.kind == FLOAT32 ? 4 : 2, access = bytes / size;
  if (device.generation != 9 || plan.in_place || plan.interleaved_in || plan.interleaved_out || bytes < 4) return false;
  if (!rows_of(plan, call, access, alone, p.rows)) return false;

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
    runs.see(width);
    const int64_t parts = ceil_div(heads, MOST_OF_UNIT / width);
    t.heads = static_cast<uint32_t>(heads), t.width = static_cast<uint32_t>(width);
    t.of_unit = static_cast<uint32_t>(ceil_div(heads, parts));
    t.first = static_cast<uint32_t>((plan.start[o] + (plan.inverse ? plan.pairs : 0)) * size);
    units += ceil_div(heads, t.of_unit), run += heads * width, copied += plan.head_dim[o] - 2 * plan.pairs;
    const int64_t accesses = (plan.head_dim[o] - 2 * plan.pairs) / access;  // copying accesses of the light kernel, two per thread
    in_parts |= 2 * first_of_two(plan, o, accesses, bytes) != accesses;
    if (o == 0) p.of_q = static_cast<uint32_t>(units);
  }
  const int64_t chunks = plan.pairs / access;
  if (runs.bytes() < 16 || copied == 0 || !in_parts || chunks > BULK_THREADS || units * tokens * batch > INT32_MAX) return false;
  if (run < FEWEST_OF_UNIT * units || 2 * run * tokens * batch < BULK_LARGE) return false;
  p.of_token = Divisor(units), p.tokens = Divisor(tokens);
  p.chunk = Divisor(chunks), p.at_once = static_cast<uint32_t>(BULK_THREADS / chunks);
  p.halves = static_cast<int32_t>(plan.inverse ? -plan.pairs * size : plan.pairs * size);
  return true;
}

template <class T, class TABLE>
auto bulk_kernel(int64_t bytes) {
  if (bytes == 16) return bulk_rope_kernel<T, TABLE, 16>;
  return bytes == 8 ? bulk_rope_kernel<T, TABLE, 8> : bulk_rope_kernel<T, TABLE, 4>;
}

inline cudaError_t launch_bulk(const Bulk& p, const Plan& plan, int64_t batch, int64_t bytes, const Device& device, void* stream) {
  const auto kernel = with_dtype(plan.kind, [&](auto element) {
    using T = decltype(element);
    return plan.table_kind == FLOAT32 ? bulk_kernel<T, float>(bytes) : bulk_kernel<T, T>(bytes);
  });
  const uint32_t memory = BARRIER + std::max(p.tensors[0].of_unit * p.tensors[0].width, p.tensors[1].of_unit * p.tensors[1].width);
  return launched(kernel, dim3(static_cast<unsigned>(batch * p.tokens.d * p.of_token.d)), dim3(BULK_THREADS), stream, device, p, memory);
}

}  // namespace
