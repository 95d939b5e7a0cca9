// The calls of most models, but for a few tokens: halves that pair, tensors and table read by vectors, a row of the table for each
// token. They have a kernel of their own, since it is the number of threads with an access under way that counts, and what the
// general kernel can be asked takes registers: here there are 32, so that a multiprocessor has all the threads it can.
//
// Shape legend: as in rope.cu. A thread has a chunk of one head, two accesses of 16 bytes: first the chunks that rotate, then
// those that are copied (not in place). Accesses are of 8 bytes where alignment wants it and nothing is copied: what a thread
// does to find its place is worth that much work, but not also that of copying a wide rest by halves. Neighbours have
// neighbouring chunks, then heads of q and k, then tokens. A block belongs to one stripe of tokens (z) of one batch entry (y):
// those stripes of all entries follow each other, so that the rows of the table are still in the cache. Pairs of neighbours
// have one access a chunk, too little work for what comes before it: they stay with the general kernel, whose threads have
// several heads.

#pragma once

#include "angles.cuh"
#include "launch.cuh"
#include "words.cuh"

namespace {

struct LightTensor {
  const char* x;
  char* y;
  int64_t x_strides[3], y_strides[3];  // bytes: batch, token, head
  Divisor of_head;                     // threads of a head
  uint32_t first;                      // bytes before the first accesses that rotate
  uint32_t start, copied, accesses;    // bytes before what rotates; chunks of a head that are copied, accesses that these take
};

struct Light {
  const char *positions, *cos, *sin;
  int64_t position_strides[2], row, offset;  // bytes; bytes from a row of the table to the next; the row of the first token
  uint32_t rows, rotated;                    // rotated: chunks of a head
  uint32_t tokens, stripe;                   // of a batch entry, of a stripe
  int32_t apart;                             // bytes from the first half of what rotates to the second
  uint32_t of_q;                             // threads of a token
  Divisor of_token;
  bool wide_positions;
  LightTensor tensors[2];
};

constexpr int LIGHT_THREADS = 2048;  // of a multiprocessor

// Accesses are of BYTES; a head has elements that are copied: COPIES.
template <class T, class TABLE, int BYTES, bool COPIES>
__global__ void __launch_bounds__(THREADS, LIGHT_THREADS / THREADS) light_rope_kernel(const __grid_constant__ Light p) {
  constexpr int NP = BYTES / sizeof(T), AT_ONCE = NP < 4 ? NP : 4;
  const uint32_t thread = blockIdx.x * THREADS + threadIdx.x, nth = p.of_token(thread), batch = blockIdx.y;
  const uint32_t token = blockIdx.z * p.stripe + nth;
  if (nth >= p.stripe) return;
  const uint32_t in_token = thread - nth * p.of_token.d;
  const bool is_k = in_token >= p.of_q;
  const LightTensor& t = p.tensors[is_k];
  const uint32_t in_tensor = in_token - (is_k ? p.of_q : 0), head = t.of_head(in_tensor), chunk = in_tensor - head * t.of_head.d;

  // Where the chunk lies in a head, and its second access from the first.
  const bool rotates = !COPIES || chunk < p.rotated;
  uint32_t at = t.first + chunk * BYTES;
  int32_t apart = p.apart;
  bool both = true;
  if (!rotates) {
    const uint32_t copy = chunk - p.rotated, other = copy + t.copied;  // all first accesses, then all second ones
    at = copy * BYTES, both = other < t.accesses;
    uint32_t other_at = other * BYTES;
    if (at >= t.start) at += p.rotated * 2 * BYTES;
    if (other_at >= t.start) other_at += p.rotated * 2 * BYTES;
    apart = int32_t(other_at - at);
  }
  const char* const x = t.x + batch * t.x_strides[0] + token * t.x_strides[1] + head * t.x_strides[2] + at;
  char* const y = t.y + batch * t.y_strides[0] + token * t.y_strides[1] + head * t.y_strides[2] + at;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");  // they wait for the end of this kernel in the same way
#endif
  Words<T, NP> one, other;
  one.read(x);
  if (both) other.read(x + apart);

  int64_t row = token + p.offset;
  if (p.positions) {
    const char* const position = p.positions + batch * p.position_strides[0] + token * p.position_strides[1];
    row = integer(position, p.wide_positions, 0);
  }
  const bool inside = row >= 0 && row < p.rows;
  const int64_t row_at = (inside ? row : 0) * p.row + (rotates ? chunk : 0) * uint32_t(NP * sizeof(TABLE));
  Words<TABLE, NP> cosines, sines;  // of chunks that are copied, too, so that no thread waits for another's branch
  cosines.read(p.cos + row_at), sines.read(p.sin + row_at);
  if (rotates) {
    constexpr uint32_t nan = sizeof(T) == 4 ? 0x7fffffff : 0x7fff7fff;
    if (!inside) one.fill(nan), other.fill(nan);
#pragma unroll
    for (int first = 0; first < NP; first += AT_ONCE) {
      float cos[AT_ONCE], sin[AT_ONCE], a[AT_ONCE], b[AT_ONCE];
      cosines.template get<AT_ONCE>(cos, first), sines.template get<AT_ONCE>(sin, first);
      one.template get<AT_ONCE>(a, first), other.template get<AT_ONCE>(b, first);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const float x_a = a[j], x_b = b[j];
        a[j] = fmaf(x_a, cos[j], -(x_b * sin[j]));
        b[j] = fmaf(x_b, cos[j], x_a * sin[j]);
      }
      one.template set<AT_ONCE>(a, first), other.template set<AT_ONCE>(b, first);
    }
  }
  one.write(y);
  if (both) other.write(y + apart);
}

// --- The launch ------------------------------------------------------------------------------------------------------

constexpr int64_t STRIPE = 16 << 20;  // bytes that a stripe of tokens moves: well within the cache that holds its table rows
constexpr int64_t MOST_BLOCKS = 65535;  // along y and z

// The tokens of a stripe: all, where there is one batch entry or they fit; else the largest even share that moves STRIPE bytes at
// most. All again, where that makes more than twice as many as uneven shares would be: short stripes are slower than none.
inline int64_t stripe_of(int64_t batch, int64_t tokens, int64_t bytes_per_token) {
  const int64_t stripes = ceil_div(tokens * bytes_per_token, STRIPE);
  if (batch <= 1) return tokens;
  for (int64_t n = std::max<int64_t>(1, stripes); n <= std::min(2 * stripes, MOST_BLOCKS); ++n)
    if (tokens % n == 0) return tokens / n;
  return tokens;
}

inline bool copies(const Light& p) { return p.tensors[0].copied + p.tensors[1].copied > 0; }

// Whether the kernel serves a call of so many batch entries and tokens, whose tensors may be read in accesses of `bytes`; and its
// parameters if it does, but for where the tensors lie. `alone`: as for `set_angles`.
inline bool light(const Plan& plan, const Call& call, int64_t batch, int64_t tokens, int64_t bytes, bool alone, Light& p) {
  const int64_t size = plan.kind == FLOAT32 ? 4 : 2, access = bytes / size;  // elements
  if (bytes < 8 || plan.interleaved_in || plan.interleaved_out || batch > MOST_BLOCKS) return false;
  if (plan.rows == 0 || plan.rows > UINT32_MAX) return false;  // a table without rows has none to read for those that are not there
  Work work{};
  set_angles(work, plan, call, access, alone);
  const bool one_row = work.axes == ONE && !call.offsets && !call.bounds && plan.cp_size == 1 && (call.positions || !work.alone) && plan.table_strides[0] == 0;
  const bool of_table = work.read == FLOATS || (work.read <= HALVES && plan.table_kind == plan.kind);
  if (!one_row || !of_table) return false;

  int64_t threads = 0;  // of a token
  p.rotated = static_cast<uint32_t>(plan.pairs / access);
  for (int o = 0; o < plan.operands; ++o) {
    LightTensor& t = p.tensors[o];
    t.start = static_cast<uint32_t>(plan.start[o] * size);
    t.first = t.start + (plan.inverse ? plan.pairs * size : 0);
    t.accesses = static_cast<uint32_t>(plan.in_place ? 0 : (plan.head_dim[o] - 2 * plan.pairs) / access);
    t.copied = (t.accesses + 1) / 2;
    t.of_head = Divisor(p.rotated + t.copied);
    threads += plan.heads[o] * t.of_head.d;
    if (o == 0) p.of_q = static_cast<uint32_t>(threads);
  }
  if (bytes < 16 && copies(p)) return false;
  p.stripe = static_cast<uint32_t>(stripe_of(batch, tokens, threads * 4 * bytes));
  threads *= p.stripe;
  if (threads > INT32_MAX - THREADS || threads < 8 * THREADS || tokens / p.stripe > MOST_BLOCKS) return false;
  p.of_token = Divisor(threads / p.stripe), p.tokens = static_cast<uint32_t>(tokens);
  // The inverse of (a, b) is what (b, a) is turned to, which needs no other sign: the halves change places.
  p.apart = static_cast<int32_t>(plan.inverse ? -plan.pairs * size : plan.pairs * size);
  p.rows = static_cast<uint32_t>(plan.rows);
  const int64_t table_size = plan.table_kind == FLOAT32 ? 4 : 2, position_size = plan.wide_positions ? 8 : 4;
  p.cos = work.cos, p.sin = work.sin, p.row = plan.table_strides[1] * table_size;
  p.positions = static_cast<const char*>(call.positions), p.wide_positions = plan.wide_positions, p.offset = call.offset;
  p.position_strides[0] = work.position_strides[1] * position_size, p.position_strides[1] = work.position_strides[2] * position_size;
  return true;
}

template <class T, class TABLE>
auto light_kernel(int64_t bytes, bool copies) {
  if (bytes < 16) return light_rope_kernel<T, TABLE, 8, false>;
  return copies ? light_rope_kernel<T, TABLE, 16, true> : light_rope_kernel<T, TABLE, 16, false>;
}

inline cudaError_t launch_light(const Light& p, const Plan& plan, int64_t batch, int64_t bytes, const Device& device, void* stream) {
  const int64_t threads = int64_t(p.stripe) * p.of_token.d;
  const dim3 grid(static_cast<unsigned>(ceil_div(threads, THREADS)), static_cast<unsigned>(batch), p.tokens / p.stripe);
  const auto kernel = with_dtype(plan.kind, [&](auto element) {
    using T = decltype(element);
    return plan.table_kind == FLOAT32 ? light_kernel<T, float>(bytes, copies(p)) : light_kernel<T, T>(bytes, copies(p));
  });
  return launched(kernel, grid, dim3(THREADS), stream, device, p);
}

}  // namespace
