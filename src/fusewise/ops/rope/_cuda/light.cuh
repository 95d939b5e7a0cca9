// RoPE kernel for the common case, except for very few tokens: vectorized loads of tensors and table, one table row per token. It
// is separate because throughput depends on the number of threads with a load in flight, and the options of the general kernel
// cost registers: this one uses 32, which allows full occupancy.
//
// Shape legend: as in rope.cu. A thread makes two 16-byte accesses in one head: to the same place in the first and in the second
// half of the rotated features, whichever elements pair; or to features that are copied (out of place). A single access would not
// amortize the index computation. For the half pairing accesses may be 8 bytes if alignment requires it and nothing is copied;
// copying with 8-byte accesses would again be too little work per thread. Consecutive threads take consecutive accesses, then
// heads of q and k, then tokens. A block belongs to one stripe of tokens (blockIdx.z) of one batch entry (blockIdx.y): the same
// stripe of all entries runs back to back, so that its table rows stay in L2.

#pragma once

#include "launch.cuh"
#include "rows.cuh"
#include "words.cuh"

namespace {

struct LightTensor {
  const char* x;
  char* y;
  int64_t x_strides[3], y_strides[3];  // bytes: batch, token, head
  Divisor of_head;                     // threads per head
  uint32_t first;                      // byte offset of the first rotated access of the first chunk
  uint32_t start, copied, accesses;    // bytes before the rotated features; copied chunks per head, and the accesses they take
};

struct Light {
  Rows rows;
  uint32_t rotated;         // rotated chunks per head
  uint32_t tokens, stripe;  // tokens per batch entry, tokens per stripe
  int32_t halves;           // bytes from the first half of the rotated features to the second
  uint32_t of_q;            // threads per token for q
  Divisor of_token;         // threads per token
  float turn;               // sign of sin: -1 for the inverse; not used by the half pairing
  LightTensor tensors[2];
};

constexpr int LIGHT_THREADS = 2048;  // threads per SM at full occupancy

// A thread's part of a head: two accesses of N elements each. If input or output has the half pairing, these are the first and the
// second elements of N pairs; an interleaved side (two adjacent accesses) is converted by `unzip` or `zip`. Otherwise each access
// holds N/2 interleaved pairs.
template <class T, int N, bool IN, bool OUT>
struct Accesses {
  Words<T, N> one, other;
  static constexpr bool NEIGHBOURS = IN && OUT, MIXED = IN != OUT;
  static constexpr int AT_ONCE = NEIGHBOURS ? N / 2 : MIXED ? 2 : N < 4 ? N : 4;  // pairs unpacked at once, limited by registers

  __device__ __forceinline__ void read(const char* from, int32_t apart, bool both) {
    one.read(from);
    if (both) other.read(from + apart);
  }
  __device__ __forceinline__ void write(char* to, int32_t apart, bool both) const {
    one.write(to);
    if (both) other.write(to + apart);
  }
  // Unpack the AT_ONCE pairs starting at `first`.
  __device__ __forceinline__ void get(float* a, float* b, int first) const {
    if constexpr (!NEIGHBOURS) {
      one.template get<AT_ONCE>(a, first), other.template get<AT_ONCE>(b, first);
    } else {
      float x[N];
      (first == 0 ? one : other).get(x);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) a[j] = x[2 * j], b[j] = x[2 * j + 1];
    }
  }
  __device__ __forceinline__ void set(const float* a, const float* b, int first) {
    if constexpr (!NEIGHBOURS) {
      one.template set<AT_ONCE>(a, first), other.template set<AT_ONCE>(b, first);
    } else {
      float x[N];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) x[2 * j] = a[j], x[2 * j + 1] = b[j];
      (first == 0 ? one : other).set(x);
    }
  }
  __device__ __forceinline__ void unzip() {
    const Accesses zipped = *this;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const uint32_t low = zipped.word(2 * i), high = zipped.word(2 * i + 1);
      if constexpr (sizeof(T) == 4) word(i) = low, word(WORDS + i) = high;
      else word(i) = __byte_perm(low, high, 0x5410), word(WORDS + i) = __byte_perm(low, high, 0x7632);
    }
  }
  __device__ __forceinline__ void zip() {
    const Accesses unzipped = *this;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const uint32_t a = unzipped.word(i), b = unzipped.word(WORDS + i);
      if constexpr (sizeof(T) == 4) word(2 * i) = a, word(2 * i + 1) = b;
      else word(2 * i) = __byte_perm(a, b, 0x5410), word(2 * i + 1) = __byte_perm(a, b, 0x7632);
    }
  }

 private:
  static constexpr int WORDS = N * sizeof(T) / 4;  // 32-bit words per access
  __device__ __forceinline__ uint32_t& word(int i) { return (i < WORDS ? one : other).words.values[i % WORDS]; }
  __device__ __forceinline__ uint32_t word(int i) const { return (i < WORDS ? one : other).words.values[i % WORDS]; }
};

// BYTES: width of an access; COPIES: some features of a head are copied.
template <class T, class TABLE, bool IN, bool OUT, int BYTES, bool COPIES>
__global__ void __launch_bounds__(THREADS, LIGHT_THREADS / THREADS) light_rope_kernel(const __grid_constant__ Light p) {
  constexpr int N = BYTES / sizeof(T);
  using Mine = Accesses<T, N, IN, OUT>;
  constexpr bool NEIGHBOURS = Mine::NEIGHBOURS, MIXED = Mine::MIXED;
  const uint32_t thread = blockIdx.x * THREADS + threadIdx.x, nth = p.of_token(thread), batch = blockIdx.y;
  const uint32_t token = blockIdx.z * p.stripe + nth;
  if (nth >= p.stripe) return;
  const uint32_t in_token = thread - nth * p.of_token.d;
  const bool is_k = in_token >= p.of_q;
  const LightTensor& t = p.tensors[is_k];
  const uint32_t in_tensor = in_token - (is_k ? p.of_q : 0), head = t.of_head(in_tensor), chunk = in_tensor - head * t.of_head.d;

  // Byte offset of the chunk in a head, and the distance from its first to its second access.
  const bool rotates = !COPIES || chunk < p.rotated;
  uint32_t x_at = t.first + chunk * (MIXED && IN ? 2 : 1) * BYTES, y_at = t.first + chunk * (MIXED && OUT ? 2 : 1) * BYTES;
  int32_t x_apart = MIXED && IN ? BYTES : p.halves, y_apart = MIXED && OUT ? BYTES : p.halves;
  bool both = true;
  if (!rotates) {
    const uint32_t copy = chunk - p.rotated, other = copy + t.copied;  // all first accesses precede all second ones
    uint32_t at = copy * BYTES, other_at = other * BYTES;
    both = other < t.accesses;
    if (at >= t.start) at += p.rotated * 2 * BYTES;
    if (other_at >= t.start) other_at += p.rotated * 2 * BYTES;
    x_at = y_at = at, x_apart = y_apart = int32_t(other_at - at);
  }
  const char* const x = t.x + batch * t.x_strides[0] + token * t.x_strides[1] + head * t.x_strides[2] + x_at;
  char* const y = t.y + batch * t.y_strides[0] + token * t.y_strides[1] + head * t.y_strides[2] + y_at;
  wait_and_launch_dependents();
  Mine mine;
  mine.read(x, x_apart, both);

  bool inside;
  const int64_t row = p.rows.of(batch, token, inside);
  Words<TABLE, N> cosines, sines;  // loaded for copied chunks, too: no divergence
  constexpr uint32_t ENTRIES = (NEIGHBOURS ? N / 2 : N) * sizeof(TABLE);  // table bytes per access
  const int64_t row_at = row + (rotates ? chunk : 0) * ENTRIES;
  if constexpr (NEIGHBOURS) {
    const uint32_t apart = p.rotated * ENTRIES;
    cosines.read_part(p.rows.cos + row_at, 0), sines.read_part(p.rows.sin + row_at, 0);
    cosines.read_part(p.rows.cos + row_at + apart, 1), sines.read_part(p.rows.sin + row_at + apart, 1);
  } else {
    cosines.read_evict_last(p.rows.cos + row_at), sines.read_evict_last(p.rows.sin + row_at);
  }
  if (rotates) {
    constexpr uint32_t nan = sizeof(T) == 4 ? 0x7fffffff : 0x7fff7fff;
    if (!inside) mine.one.fill(nan), mine.other.fill(nan);
    if (MIXED && IN) mine.unzip();
#pragma unroll
    for (int first = 0; first < N; first += Mine::AT_ONCE) {
      float cos[Mine::AT_ONCE], sin[Mine::AT_ONCE], a[Mine::AT_ONCE], b[Mine::AT_ONCE];
      cosines.template get<Mine::AT_ONCE>(cos, first), sines.template get<Mine::AT_ONCE>(sin, first);
      mine.get(a, b, first);
#pragma unroll
      for (int j = 0; j < Mine::AT_ONCE; ++j) {
        const float x_a = a[j], x_b = b[j], s = NEIGHBOURS || MIXED ? p.turn * sin[j] : sin[j];
        a[j] = fmaf(x_a, cos[j], -(x_b * s));
        b[j] = fmaf(x_b, cos[j], x_a * s);
      }
      mine.set(a, b, first);
    }
    if (MIXED && OUT) mine.zip();
  }
  if (MIXED) __syncwarp();  // in place: the whole head, which lies within one warp, must be read before any thread writes to it
  mine.write(y, y_apart, both);
}

// --- The launch ------------------------------------------------------------------------------------------------------

// A stripe of tokens is as long as the larger of two limits allows:
constexpr int64_t STRIPE = 16 << 20;  // bytes of x and y; well below the L2 size, so that the stripe's table rows stay in L2
constexpr int64_t STRIPE_OF_TABLE = 2 << 20;  // bytes of the table; re-reading so few costs less than shorter stripes
constexpr int64_t MOST_BLOCKS = 65535;  // grid limit along y and z

// Tokens per stripe: all tokens if there is one batch entry or they fit; else the largest equal share that moves at most STRIPE
// bytes or reads at most STRIPE_OF_TABLE of the table. If equal shares need more than twice as many stripes as unequal ones
// would, there are no stripes: short ones are slower than none. `times`: the count is in groups of so many tokens.
inline int64_t stripe_of(const Plan& plan, int64_t batch, int64_t tokens, int64_t bytes_per_token, int64_t times = 1) {
  const int64_t row = plan.table == INV_FREQ ? 0 : plan.pairs * (plan.table_kind == FLOAT32 ? 4 : 2) * (plan.table == COS_SIN ? 2 : 1);
  const int64_t stripes = std::min(ceil_div(tokens * times * bytes_per_token, STRIPE), ceil_div(tokens * times * row, STRIPE_OF_TABLE));
  if (batch <= 1) return tokens;
  for (int64_t n = std::max<int64_t>(1, stripes); n <= std::min(2 * stripes, MOST_BLOCKS); ++n)
    if (tokens % n == 0) return tokens / n;
  return tokens;
}

inline bool copies(const Light& p) { return p.tensors[0].copied + p.tensors[1].copied > 0; }
inline bool neighbours(const Plan& plan) { return plan.interleaved_in || plan.interleaved_out; }

// Whether this kernel supports a call whose tensors allow accesses of `bytes`. If so, sets its parameters except the addresses
// and strides of the tensors. `alone`: as for `set_angles`.
inline bool light(const Plan& plan, const Call& call, int64_t batch, int64_t tokens, int64_t bytes, bool alone, Light& p) {
  const int64_t size = plan.kind == FLOAT32 ? 4 : 2, access = bytes / size;  // elements
  if (bytes < 8 || batch > MOST_BLOCKS) return false;
  if (neighbours(plan) && (bytes < 16 || plan.pairs % access != 0)) return false;
  if (!rows_of(plan, call, plan.interleaved_in && plan.interleaved_out ? access / 2 : access, alone, p.rows)) return false;

  int64_t threads = 0;  // per token
  p.rotated = static_cast<uint32_t>(plan.pairs / access);
  for (int o = 0; o < plan.operands; ++o) {
    LightTensor& t = p.tensors[o];
    t.start = static_cast<uint32_t>(plan.start[o] * size);
    t.first = t.start + (plan.inverse && !neighbours(plan) ? plan.pairs * size : 0);
    t.accesses = static_cast<uint32_t>(plan.in_place ? 0 : (plan.head_dim[o] - 2 * plan.pairs) / access);
    t.copied = static_cast<uint32_t>(first_of_two(plan, o, t.accesses, bytes));
    t.of_head = Divisor(p.rotated + t.copied);
    if (plan.in_place && plan.interleaved_in != plan.interleaved_out && WARP % t.of_head.d != 0) return false;
    threads += plan.heads[o] * t.of_head.d;
    if (o == 0) p.of_q = static_cast<uint32_t>(threads);
  }
  if (bytes < 16 && copies(p)) return false;
  p.stripe = static_cast<uint32_t>(stripe_of(plan, batch, tokens, threads * 4 * bytes));
  threads *= p.stripe;
  if (threads > INT32_MAX - THREADS || threads < 8 * THREADS || tokens / p.stripe > MOST_BLOCKS) return false;
  p.of_token = Divisor(threads / p.stripe), p.tokens = static_cast<uint32_t>(tokens);
  // The inverse rotation of (a, b) is the rotation of (b, a): the half pairing swaps the halves instead of negating sin.
  p.halves = static_cast<int32_t>(plan.inverse && !neighbours(plan) ? -plan.pairs * size : plan.pairs * size);
  p.turn = plan.inverse ? -1.0f : 1.0f;
  return true;
}

template <class T, class TABLE, bool IN, bool OUT>
auto light_kernel(int64_t bytes, bool copies) {
  if constexpr (!IN && !OUT)
    if (bytes < 16) return light_rope_kernel<T, TABLE, IN, OUT, 8, false>;
  return copies ? light_rope_kernel<T, TABLE, IN, OUT, 16, true> : light_rope_kernel<T, TABLE, IN, OUT, 16, false>;
}

template <class T, class TABLE>
auto light_kernel(const Plan& plan, int64_t bytes, bool copies) {
#ifdef FUSEWISE_IN
  return light_kernel<T, TABLE, FUSEWISE_IN, FUSEWISE_OUT>(bytes, copies);
#else
  if (plan.interleaved_in)
    return (plan.interleaved_out ? light_kernel<T, TABLE, true, true> : light_kernel<T, TABLE, true, false>)(bytes, copies);
  return (plan.interleaved_out ? light_kernel<T, TABLE, false, true> : light_kernel<T, TABLE, false, false>)(bytes, copies);
#endif
}

inline cudaError_t launch_light(const Light& p, const Plan& plan, int64_t batch, int64_t bytes, const Device& device, void* stream) {
  const int64_t threads = int64_t(p.stripe) * p.of_token.d;
  const dim3 grid(static_cast<unsigned>(ceil_div(threads, THREADS)), static_cast<unsigned>(batch), p.tokens / p.stripe);
  const auto kernel = with_dtype(plan.kind, [&](auto element) {
    using T = decltype(element);
    return plan.table_kind == FLOAT32 ? light_kernel<T, float>(plan, bytes, copies(p)) : light_kernel<T, T>(plan, bytes, copies(p));
  });
  return launched(kernel, grid, dim3(THREADS), stream, device, p);
}

}  // namespace
