// The calls of most models, but for a few tokens: tensors and table read by vectors, a row of the table for each token. They have
// a kernel of their own, since it is the number of threads with an access under way that counts, and what the general kernel can
// be asked takes registers: here there are 32, so that a multiprocessor has all the threads it can.
//
// Shape legend: as in rope.cu. A thread has two accesses of 16 bytes in one head: of what rotates, the same place in its first and
// in its second half, whichever elements pair; or of what is copied (not in place). With one access its first instructions would
// serve too little. Where halves pair, accesses are of 8 bytes if alignment wants it and nothing is copied: copying a wide rest by
// halves is too little again. Neighbouring threads have neighbouring accesses, then heads of q and k, then tokens. A block belongs
// to one stripe of tokens (z) of one batch entry (y): those stripes of all entries follow each other, so that the rows of the
// table are still in the cache.

#pragma once

#include "launch.cuh"
#include "rows.cuh"
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
  Rows rows;
  uint32_t rotated;         // chunks of a head
  uint32_t tokens, stripe;  // of a batch entry, of a stripe
  int32_t halves;           // bytes from the first half of what rotates to the second
  uint32_t of_q;            // threads of a token
  Divisor of_token;
  float turn;               // -1 for the inverse of neighbours
  LightTensor tensors[2];
};

constexpr int LIGHT_THREADS = 2048, WARP = 32;  // threads of a multiprocessor, of a warp

// What a thread has of a head in two accesses of N elements each. N pairs where either side has halves: their first elements and
// their second ones, which are neighbours in two accesses side by side before `unzip` and after `zip`. Else N/2 pairs twice.
template <class T, int N, bool IN, bool OUT>
struct Accesses {
  Words<T, N> one, other;
  static constexpr bool NEIGHBOURS = IN && OUT, MIXED = IN != OUT;
  static constexpr int AT_ONCE = NEIGHBOURS ? N / 2 : MIXED ? 2 : N < 4 ? N : 4;  // pairs, as many as there are registers for

  __device__ __forceinline__ void read(const char* from, int32_t apart, bool both) {
    one.read(from);
    if (both) other.read(from + apart);
  }
  __device__ __forceinline__ void write(char* to, int32_t apart, bool both) const {
    one.write(to);
    if (both) other.write(to + apart);
  }
  // AT_ONCE pairs from the first on.
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
  static constexpr int WORDS = N * sizeof(T) / 4;  // of an access
  __device__ __forceinline__ uint32_t& word(int i) { return (i < WORDS ? one : other).words.values[i % WORDS]; }
  __device__ __forceinline__ uint32_t word(int i) const { return (i < WORDS ? one : other).words.values[i % WORDS]; }
};

// Accesses are of BYTES; a head has elements that are copied: COPIES.
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

  // Where the chunk lies in a head, and its second access from the first.
  const bool rotates = !COPIES || chunk < p.rotated;
  uint32_t x_at = t.first + chunk * (MIXED && IN ? 2 : 1) * BYTES, y_at = t.first + chunk * (MIXED && OUT ? 2 : 1) * BYTES;
  int32_t x_apart = MIXED && IN ? BYTES : p.halves, y_apart = MIXED && OUT ? BYTES : p.halves;
  bool both = true;
  if (!rotates) {
    const uint32_t copy = chunk - p.rotated, other = copy + t.copied;  // all first accesses, then all second ones
    uint32_t at = copy * BYTES, other_at = other * BYTES;
    both = other < t.accesses;
    if (at >= t.start) at += p.rotated * 2 * BYTES;
    if (other_at >= t.start) other_at += p.rotated * 2 * BYTES;
    x_at = y_at = at, x_apart = y_apart = int32_t(other_at - at);
  }
  const char* const x = t.x + batch * t.x_strides[0] + token * t.x_strides[1] + head * t.x_strides[2] + x_at;
  char* const y = t.y + batch * t.y_strides[0] + token * t.y_strides[1] + head * t.y_strides[2] + y_at;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");  // they wait for the end of this kernel in the same way
#endif
  Mine mine;
  mine.read(x, x_apart, both);

  bool inside;
  const int64_t row = p.rows.of(batch, token, inside);
  Words<TABLE, N> cosines, sines;  // of chunks that are copied, too, so that no thread waits for another's branch
  constexpr uint32_t ENTRIES = (NEIGHBOURS ? N / 2 : N) * sizeof(TABLE);  // of an access, in bytes
  const int64_t row_at = row + (rotates ? chunk : 0) * ENTRIES;
  if constexpr (NEIGHBOURS) {
    const uint32_t apart = p.rotated * ENTRIES;
    cosines.read_part(p.rows.cos + row_at, 0), sines.read_part(p.rows.sin + row_at, 0);
    cosines.read_part(p.rows.cos + row_at + apart, 1), sines.read_part(p.rows.sin + row_at + apart, 1);
  } else {
    cosines.read(p.rows.cos + row_at), sines.read(p.rows.sin + row_at);
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
  if (MIXED) __syncwarp();  // in place a head, which one warp has, is read whole before another thread writes into it
  mine.write(y, y_apart, both);
}

// --- The launch ------------------------------------------------------------------------------------------------------

constexpr int64_t STRIPE = 16 << 20;  // bytes that a stripe of tokens moves: well within the cache that holds its table rows
constexpr int64_t STRIPE_OF_TABLE = 2 << 20;  // or reads of the table, where that is longer: read again, these cost less than stripes
constexpr int64_t MOST_BLOCKS = 65535;  // along y and z

// The tokens of a stripe: all, where there is one batch entry or they fit; else the largest even share that moves STRIPE bytes or
// reads STRIPE_OF_TABLE of the table at most. All again, where that makes more than twice as many as uneven shares would be: short
// stripes are slower than none. `times`: of so many tokens together.
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

// Whether the kernel serves a call of so many batch entries and tokens, whose tensors may be read in accesses of `bytes`; and its
// parameters if it does, but for where the tensors lie. `alone`: as for `set_angles`.
inline bool light(const Plan& plan, const Call& call, int64_t batch, int64_t tokens, int64_t bytes, bool alone, Light& p) {
  const int64_t size = plan.kind == FLOAT32 ? 4 : 2, access = bytes / size;  // elements
  if (bytes < 8 || batch > MOST_BLOCKS) return false;
  if (neighbours(plan) && (bytes < 16 || plan.pairs % access != 0)) return false;
  if (!rows_of(plan, call, plan.interleaved_in && plan.interleaved_out ? access / 2 : access, alone, p.rows)) return false;

  int64_t threads = 0;  // of a token
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
  // The inverse of (a, b) is what (b, a) is turned to, which needs no other sign where halves can change places.
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
#ifdef FUSEWISE_DTYPE
  return light_kernel<T, TABLE, FUSEWISE_IN, FUSEWISE_OUT>(bytes, copies);
#else
  if (plan.interleaved_in) return (plan.interleaved_out ? light_kernel<T, TABLE, true, true> : light_kernel<T, TABLE, true, false>)(bytes, copies);
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
