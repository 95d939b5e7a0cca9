// The calls that train models and prefill: tensors and table read by vectors, a row of the table for each token. They have a
// kernel of their own, since at large sizes it is the number of threads with an access under way that counts, and what the
// general kernel can be asked takes registers: here there are 32, so that a multiprocessor has all the threads it can.
//
// Shape legend: as in rope.cu. A thread has a chunk of one head, two accesses or one (both pairings interleaved): first the chunks
// that rotate, NP pairs each, then those that are copied (not in place). Neighbours have neighbouring chunks, then heads of q and
// k, then tokens. A block belongs to one stripe of tokens (z) of one batch entry (y): those stripes of all entries follow each
// other, so that the rows of the table are still in the cache.

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
  uint32_t start, copied, accesses;    // bytes before what rotates; chunks of a head that are copied, accesses that these take
};

struct Light {
  const char *positions, *cos, *sin;
  int64_t position_strides[2], row, offset;  // bytes; bytes from a row of the table to the next; the row of the first token
  uint32_t rows, rotated;                    // rotated: chunks of a head
  uint32_t tokens, stripe;                   // of a batch entry, of a stripe
  uint32_t apart;                            // bytes from the first half of what rotates to the second
  uint32_t of_q;                             // threads of a token
  Divisor of_token;
  bool wide_positions, inverse;
  LightTensor tensors[2];
};

// With 16-bit elements, halves with a table of such, and chunks that come in one pairing and go in the other, take 34 to 40.
template <class T, class TABLE, bool IN, bool OUT>
constexpr int light_threads() { return sizeof(T) == 2 && (IN != OUT || (sizeof(TABLE) == 2 && !IN)) ? 1536 : 2048; }

// A head has elements that are copied: COPIES.
template <class T, class TABLE, bool IN, bool OUT, bool COPIES, int NP>
__global__ void __launch_bounds__(THREADS, light_threads<T, TABLE, IN, OUT>() / THREADS) light_rope_kernel(const __grid_constant__ Light p) {
  constexpr int PARTS = IN && OUT ? 1 : 2, N = 2 * NP / PARTS, AT_ONCE = 4;  // accesses of a chunk; elements of one
  constexpr uint32_t ACCESS = N * sizeof(T);
  const uint32_t thread = blockIdx.x * THREADS + threadIdx.x, nth = p.of_token(thread), batch = blockIdx.y;
  const uint32_t token = blockIdx.z * p.stripe + nth;
  if (nth >= p.stripe) return;
  const uint32_t in_token = thread - nth * p.of_token.d;
  const bool is_k = in_token >= p.of_q;
  const LightTensor& t = p.tensors[is_k];
  const uint32_t in_tensor = in_token - (is_k ? p.of_q : 0), head = t.of_head(in_tensor), chunk = in_tensor - head * t.of_head.d;

  // Where the chunk lies in a head, and its second access from the first.
  const bool rotates = !COPIES || chunk < p.rotated;
  uint32_t x_at = t.start + chunk * ((IN ? PARTS : 1) * ACCESS), y_at = t.start + chunk * ((OUT ? PARTS : 1) * ACCESS);
  uint32_t x_apart = IN ? ACCESS : p.apart, y_apart = OUT ? ACCESS : p.apart;
  bool both = PARTS == 2;
  if (!rotates) {
    const uint32_t skipped = 2 * p.apart, copy = chunk - p.rotated, other = copy + t.copied;  // all first accesses, then all second ones
    x_at = copy * ACCESS, x_apart = other * ACCESS;
    if (x_at >= t.start) x_at += skipped;
    if (x_apart >= t.start) x_apart += skipped;
    x_apart -= x_at, both &= other < t.accesses;
    y_at = x_at, y_apart = x_apart;
  }
  const char* const x = t.x + batch * t.x_strides[0] + token * t.x_strides[1] + head * t.x_strides[2] + x_at;
  char* const y = t.y + batch * t.y_strides[0] + token * t.y_strides[1] + head * t.y_strides[2] + y_at;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");  // they wait for the end of this kernel in the same way
#endif
  Words<T, N> from[PARTS];
  from[0].read(x);
  if (both) from[PARTS - 1].read(x + x_apart);

  int64_t row = token + p.offset;
  if (p.positions) {
    const char* const position = p.positions + batch * p.position_strides[0] + token * p.position_strides[1];
    row = integer(position, p.wide_positions, 0);
  }
  const bool inside = row >= 0 && row < p.rows;
  const int64_t row_at = (inside ? row : 0) * p.row + (rotates ? chunk : 0) * uint32_t(NP * sizeof(TABLE));
  Words<TABLE, NP> cosines, sines;  // of chunks that are copied, too, so that no thread waits for another's branch
  cosines.read(p.cos + row_at), sines.read(p.sin + row_at);
  Words<T, N> to[PARTS];
#pragma unroll
  for (int part = 0; part < PARTS; ++part) to[part] = from[part];
#pragma unroll
  for (int first = 0; first < NP && rotates; first += AT_ONCE) {
    constexpr int M = NP < AT_ONCE ? NP : AT_ONCE;
    float cos[M], sin[M], a[M], b[M];
    cosines.template get<M>(cos, first), sines.template get<M>(sin, first);
    if constexpr (!IN) from[0].template get<M>(a, first), from[1].template get<M>(b, first);
#pragma unroll
    for (int j = 0; j < M; ++j) {
      if constexpr (IN) {
        const int at = 2 * (first + j);
        float pair[2];
        from[at / N].template get<2>(pair, at % N);
        a[j] = pair[0], b[j] = pair[1];
      }
      if (p.inverse) sin[j] = -sin[j];
      if (!inside) cos[j] = sin[j] = __int_as_float(0x7fffffff);
      const float pair[2] = {fmaf(a[j], cos[j], -(b[j] * sin[j])), fmaf(b[j], cos[j], a[j] * sin[j])};
      if constexpr (OUT) {
        const int at = 2 * (first + j);
        to[at / N].template set<2>(pair, at % N);
      }
      a[j] = pair[0], b[j] = pair[1];
    }
    if constexpr (!OUT) to[0].template set<M>(a, first), to[1].template set<M>(b, first);
  }
  to[0].write(y);
  if (both) to[PARTS - 1].write(y + y_apart);
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

// Whether the kernel serves a call of so many batch entries and tokens, whose tensors may be read in accesses of `bytes`; and its
// parameters if it does, but for where the tensors lie. `alone`: as for `set_angles`.
inline bool light(const Plan& plan, const Call& call, int64_t batch, int64_t tokens, int64_t bytes, bool alone, Light& p) {
  const int64_t size = plan.kind == FLOAT32 ? 4 : 2, access = 16 / size;  // elements
  const bool one = plan.interleaved_in && plan.interleaved_out, turned = plan.interleaved_in != plan.interleaved_out;
  const int64_t np = one ? access / 2 : access;
  const bool widest = bytes == 16 && plan.pairs % np == 0 && !(turned && plan.in_place);  // there a head must be read before it is written
  if (!widest || batch > MOST_BLOCKS || plan.rows > UINT32_MAX) return false;
  Work work{};
  set_angles(work, plan, call, np, alone);
  const bool one_row = work.axes == ONE && !call.offsets && !call.bounds && plan.cp_size == 1 && (call.positions || !work.alone) && plan.table_strides[0] == 0;
  const bool of_table = work.read == FLOATS || (work.read <= HALVES && plan.table_kind == plan.kind);
  if (!one_row || !of_table) return false;

  int64_t threads = 0;  // of a token
  p.rotated = static_cast<uint32_t>(plan.pairs / np);
  for (int o = 0; o < plan.operands; ++o) {
    LightTensor& t = p.tensors[o];
    t.start = static_cast<uint32_t>(plan.start[o] * size);
    t.accesses = static_cast<uint32_t>(plan.in_place ? 0 : (plan.head_dim[o] - 2 * plan.pairs) / access);
    t.copied = one ? t.accesses : (t.accesses + 1) / 2;
    t.of_head = Divisor(p.rotated + t.copied);
    threads += plan.heads[o] * t.of_head.d;
    if (o == 0) p.of_q = static_cast<uint32_t>(threads);
  }
  p.stripe = static_cast<uint32_t>(stripe_of(batch, tokens, threads * (one ? 2 : 4) * access * size));
  threads *= p.stripe;
  if (threads > INT32_MAX - THREADS || threads < 8 * THREADS || tokens / p.stripe > MOST_BLOCKS) return false;
  p.of_token = Divisor(threads / p.stripe), p.tokens = static_cast<uint32_t>(tokens);
  p.apart = static_cast<uint32_t>(plan.pairs * size);
  p.rows = static_cast<uint32_t>(plan.rows), p.inverse = plan.inverse;
  const int64_t table_size = plan.table_kind == FLOAT32 ? 4 : 2, position_size = plan.wide_positions ? 8 : 4;
  p.cos = work.cos, p.sin = work.sin, p.row = plan.table_strides[1] * table_size;
  p.positions = static_cast<const char*>(call.positions), p.wide_positions = plan.wide_positions, p.offset = call.offset;
  p.position_strides[0] = work.position_strides[1] * position_size, p.position_strides[1] = work.position_strides[2] * position_size;
  return true;
}

template <class T, class TABLE>
auto light_kernel(const Plan& plan, bool copies) {
  constexpr int N = 16 / sizeof(T);
  if (plan.interleaved_in != plan.interleaved_out)
    return plan.interleaved_in ? light_rope_kernel<T, TABLE, true, false, true, N> : light_rope_kernel<T, TABLE, false, true, true, N>;
  if (plan.interleaved_in)
    return copies ? light_rope_kernel<T, TABLE, true, true, true, N / 2> : light_rope_kernel<T, TABLE, true, true, false, N / 2>;
  return copies ? light_rope_kernel<T, TABLE, false, false, true, N> : light_rope_kernel<T, TABLE, false, false, false, N>;
}

inline cudaError_t launch_light(const Light& p, const Plan& plan, int64_t batch, const Device& device, void* stream) {
  const int64_t threads = int64_t(p.stripe) * p.of_token.d;
  const dim3 grid(static_cast<unsigned>(ceil_div(threads, THREADS)), static_cast<unsigned>(batch), p.tokens / p.stripe);
  const bool copies = p.tensors[0].copied + p.tensors[1].copied > 0;
  const auto kernel = with_dtype(plan.kind, [&](auto element) {
    using T = decltype(element);
    return plan.table_kind == FLOAT32 ? light_kernel<T, float>(plan, copies) : light_kernel<T, T>(plan, copies);
  });
  return launched(kernel, grid, dim3(THREADS), stream, device, p);
}

}  // namespace
