// Heads that rotate whole, or in place whatever of them does, read and written by vectors: what models train and prefill with.
// It has a kernel of its own, since at large sizes it is the number of threads with an access under way that counts, and what
// the general kernel can be asked takes registers: here there are 32, so that a multiprocessor has all the threads it can.
//
// Shape legend: as in rope.cu. A thread has a chunk of NP pairs of one head, neighbours have neighbouring chunks, then heads of
// q and k, then tokens. A block belongs to one stripe of tokens (z) of one batch entry (y): those stripes of all entries follow
// each other, so that the rows of the table are still in the cache.

#pragma once

#include "angles.cuh"
#include "launch.cuh"
#include "words.cuh"

namespace {

struct WholeTensor {
  const char* x;
  char* y;
  int64_t x_strides[3], y_strides[3];  // bytes: batch, token, head
};

struct Whole {
  const char *positions, *cos, *sin;
  int64_t position_strides[2], row, offset;  // bytes; bytes from a row of the table to the next; the row of the first token
  uint32_t rows, heads_of_q;
  uint32_t tokens, stripe;                   // of a batch entry, of a stripe
  uint32_t apart;                            // bytes from the first half of a head to the second
  Divisor of_token, of_head;                 // threads of a token, of a head
  bool wide_positions, inverse;
  WholeTensor tensors[2];
};

// Halves with a table of 16 bits would spill in 32 registers.
template <class T, class TABLE, bool INTERLEAVED>
constexpr int whole_threads() { return sizeof(TABLE) == 2 && !INTERLEAVED ? 1536 : 2048; }

template <class T, class TABLE, bool INTERLEAVED, int NP>
__global__ void __launch_bounds__(THREADS, whole_threads<T, TABLE, INTERLEAVED>() / THREADS) whole_rope_kernel(const __grid_constant__ Whole p) {
  constexpr int PARTS = INTERLEAVED ? 1 : 2, N = 2 * NP / PARTS, AT_ONCE = 4;  // accesses of a head; elements of one
  const uint32_t thread = blockIdx.x * THREADS + threadIdx.x, nth = p.of_token(thread), batch = blockIdx.y;
  const uint32_t token = blockIdx.z * p.stripe + nth;
  if (nth >= p.stripe) return;
  const uint32_t in_token = thread - nth * p.of_token.d, of_all = p.of_head(in_token), chunk = in_token - of_all * p.of_head.d;
  const bool is_k = of_all >= p.heads_of_q;
  const WholeTensor& t = p.tensors[is_k];
  const uint32_t head = of_all - (is_k ? p.heads_of_q : 0), at = chunk * uint32_t(N * sizeof(T));
  const char* const x = t.x + batch * t.x_strides[0] + token * t.x_strides[1] + head * t.x_strides[2] + at;
  char* const y = t.y + batch * t.y_strides[0] + token * t.y_strides[1] + head * t.y_strides[2] + at;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");  // they wait for the end of this kernel in the same way
#endif
  Words<T, N> chunks[PARTS];
#pragma unroll
  for (int part = 0; part < PARTS; ++part) chunks[part].read(x + part * p.apart);

  int64_t row = token + p.offset;
  if (p.positions) {
    const char* const position = p.positions + batch * p.position_strides[0] + token * p.position_strides[1];
    row = integer(position, p.wide_positions, 0);
  }
  const bool inside = row >= 0 && row < p.rows;
  const char* const cos_at = p.cos + (inside ? row : 0) * p.row + chunk * uint32_t(NP * sizeof(TABLE));
  const char* const sin_at = p.sin + (inside ? row : 0) * p.row + chunk * uint32_t(NP * sizeof(TABLE));
  Words<TABLE, NP> cosines, sines;
  cosines.read(cos_at), sines.read(sin_at);
#pragma unroll
  for (int first = 0; first < NP; first += AT_ONCE) {
    constexpr int M = NP < AT_ONCE ? NP : AT_ONCE;
    float cos[M], sin[M], from[2 * M], to[2 * M];
    cosines.template get<M>(cos, first), sines.template get<M>(sin, first);
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      chunks[part].template get<2 * M / PARTS>(from + part * M, first * 2 / PARTS);
#pragma unroll
    for (int j = 0; j < M; ++j) {
      if (p.inverse) sin[j] = -sin[j];
      if (!inside) cos[j] = sin[j] = __int_as_float(0x7fffffff);
      const int a = INTERLEAVED ? 2 * j : j, b = INTERLEAVED ? 2 * j + 1 : M + j;
      to[a] = fmaf(from[a], cos[j], -(from[b] * sin[j]));
      to[b] = fmaf(from[b], cos[j], from[a] * sin[j]);
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      chunks[part].template set<2 * M / PARTS>(to + part * M, first * 2 / PARTS);
  }
#pragma unroll
  for (int part = 0; part < PARTS; ++part) chunks[part].write(y + part * p.apart);
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

// Whether the kernel serves a call, whose tensors `t` of so many batch entries and tokens may be read in chunks of `np` pairs and
// whose angles come as `work` says; and its parameters if it does.
inline bool whole(const Plan& plan, const Call& call, const Work& work, int64_t batch, int64_t tokens, int64_t np, Whole& p) {
  const int64_t size = plan.kind == FLOAT32 ? 4 : 2;
  const bool widest = np > 1 && np * size * (plan.interleaved_in ? 2 : 1) == 16 && plan.interleaved_in == plan.interleaved_out;
  const bool one_row = work.axes == ONE && !call.offsets && !call.bounds && plan.cp_size == 1 && (call.positions || !work.alone) && plan.table_strides[0] == 0;
  const bool of_table = work.read == FLOATS || (work.read <= HALVES && plan.table_kind == plan.kind);
  if (!widest || !one_row || !of_table || batch > MOST_BLOCKS || plan.rows > UINT32_MAX) return false;
  for (int o = 0; o < plan.operands; ++o)
    if (!plan.in_place && plan.head_dim[o] != 2 * plan.pairs) return false;

  const int64_t heads = plan.heads[0] + (plan.operands > 1 ? plan.heads[1] : 0), chunks = plan.pairs / np;
  p.stripe = static_cast<uint32_t>(stripe_of(batch, tokens, heads * 4 * plan.pairs * size));
  const int64_t threads = p.stripe * heads * chunks;
  if (threads > INT32_MAX - THREADS || threads < 8 * THREADS || tokens / p.stripe > MOST_BLOCKS) return false;
  p.of_head = Divisor(chunks), p.of_token = Divisor(heads * chunks);
  p.heads_of_q = static_cast<uint32_t>(plan.heads[0]), p.tokens = static_cast<uint32_t>(tokens);
  p.apart = static_cast<uint32_t>(plan.pairs * size);
  p.rows = static_cast<uint32_t>(plan.rows), p.inverse = plan.inverse;
  const int64_t table_size = plan.table_kind == FLOAT32 ? 4 : 2, position_size = plan.wide_positions ? 8 : 4;
  p.cos = work.cos, p.sin = work.sin, p.row = plan.table_strides[1] * table_size;
  p.positions = static_cast<const char*>(call.positions), p.wide_positions = plan.wide_positions, p.offset = call.offset;
  p.position_strides[0] = work.position_strides[1] * position_size, p.position_strides[1] = work.position_strides[2] * position_size;
  return true;
}

template <class T, bool INTERLEAVED>
auto whole_kernel(bool floats) {
  constexpr int NP = 16 / sizeof(T) / (INTERLEAVED ? 2 : 1);
  return floats ? whole_rope_kernel<T, float, INTERLEAVED, NP> : whole_rope_kernel<T, T, INTERLEAVED, NP>;
}

inline cudaError_t launch_whole(const Whole& p, const Plan& plan, int64_t batch, const Device& device, void* stream) {
  const int64_t threads = int64_t(p.stripe) * p.of_token.d;
  const dim3 grid(static_cast<unsigned>(ceil_div(threads, THREADS)), static_cast<unsigned>(batch), p.tokens / p.stripe);
  const auto kernel = with_dtype(plan.kind, [&](auto element) {
    return (plan.interleaved_in ? whole_kernel<decltype(element), true> : whole_kernel<decltype(element), false>)(plan.table_kind == FLOAT32);
  });
  return launched(kernel, grid, dim3(THREADS), stream, device, p);
}

}  // namespace
