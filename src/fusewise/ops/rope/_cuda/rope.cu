// RoPE in CUDA: q and k in one launch, forward and backward (the transposed rotation).
//
//     (y_a, y_b) = (x_a cos θ − x_b sin θ, x_b cos θ + x_a sin θ)
//
// Shape legend: B batch, T tokens, H heads, D features of a head, P rotated pairs. A head is cut into chunks: first those
// of NP pairs that rotate, up to 16 bytes of both halves, then those that are copied (not in place). A thread has one
// chunk of HEADS · steps heads of one token: it finds cos θ and sin θ once, float32 in registers, and uses them for all.
// Neighbouring threads have neighbouring chunks, then heads, then tokens, so that whole lines are read and written and
// no thread idles whatever the widths. x is read once, y written once, arithmetic in float32, one rounding. The kernel is
// bound by memory; at a few tokens by the two reads that follow one another, position and table row, which is why x is
// asked for before either.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../plan.h"

namespace {

constexpr int THREADS = 256;

// --- What the kernel receives ----------------------------------------------------------------------------------------

// n / d for n < 2³¹ by a multiplication.
struct Divisor {
  uint32_t d = 1, magic = 0, shift = 0;
  Divisor() = default;
  explicit Divisor(int64_t divisor) : d(static_cast<uint32_t>(divisor)) {
    if (d == 1) return;
    while ((uint64_t(1) << (shift + 1)) < d) ++shift;
    magic = static_cast<uint32_t>((uint64_t(1) << (32 + shift)) / d + 1);
  }
  __device__ uint32_t operator()(uint32_t n) const { return d == 1 ? n : __umulhi(n, magic) >> shift; }
};

struct Tensor {
  const char* x;
  char* y;
  int64_t x_strides[3], y_strides[3];  // bytes: batch, token, head
  int32_t heads, groups;               // a thread takes heads g, g + groups, g + 2 · groups, ...
  int32_t start;                       // bytes before the rotated features
  int32_t copied;                      // chunks to copy in a head
  Divisor chunks;                      // in a head
};

// How a row of the table is read.
enum Read : int32_t { FLOATS, BFLOATS, HALVES, SCALARS, OF_ANGLES, OF_FREQUENCIES };
// Which positions the pairs of a chunk follow: the only ones, those of one axis, or each its own axis.
enum Axes : int32_t { ONE, BY_CHUNK, BY_PAIR };

struct Params {
  Tensor tensors[2];
  int32_t pairs, rotated;  // rotated: chunks of NP pairs in a head
  int32_t copy_bytes;      // of a copied chunk
  int32_t steps;
  int32_t tokens, tile_tokens, q_units;  // units: threads for a token
  int32_t block_units;                   // units of a block, at most its threads
  Divisor units, parts, batches;         // parts: blocks for a tile of tokens
  bool inverse, in_place, alone, wide_positions, wide_offsets, wide_bounds, sections_interleaved;
  Read read;
  Axes axes;
  Kind table_kind;
  const char *cos, *sin;
  int64_t table_strides[3], rows;  // elements: batch, row, pair
  float scale;
  const void *positions, *offsets, *bounds;
  int64_t position_strides[3], offset;
  int32_t sequences, sections[3], cp_rank, cp_size;
};

// --- Memory ----------------------------------------------------------------------------------------------------------

template <int BYTES> struct Word;
template <> struct Word<16> { using type = uint4; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<4> { using type = uint32_t; };
template <> struct Word<2> { using type = uint16_t; };

// N consecutive elements as one access of up to 16 bytes, or several.
template <class T, int N>
struct Pack {
  static constexpr int BYTES = sizeof(T) * N < 16 ? sizeof(T) * N : 16;
  static constexpr int WORDS = sizeof(T) * N / BYTES;
  union {
    typename Word<BYTES>::type words[WORDS];
    T values[N];
  };
  __device__ Pack() {}
  __device__ void read(const char* from) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = reinterpret_cast<const typename Word<BYTES>::type*>(from)[i];
  }
  __device__ void write(char* to) const {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) reinterpret_cast<typename Word<BYTES>::type*>(to)[i] = words[i];
  }
};

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_float(__half x) { return __half2float(x); }
template <class T> __device__ T from_float(float x);
template <> __device__ float from_float(float x) { return x; }
template <> __device__ __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __half from_float(float x) { return __float2half_rn(x); }

__device__ int64_t integer(const void* data, bool wide, int64_t i) {
  return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
}

// --- Angles ----------------------------------------------------------------------------------------------------------

// scale · cos and scale · sin of a float64 angle, to half a unit in the last place of 1: reduced in float64 by quarter
// turns (π/2 in two parts), then polynomials in float32 (Cephes) on [-π/4, π/4].
__device__ void cos_and_sin(double angle, float scale, float& cos, float& sin) {
  const double turns = rint(angle * 0.63661977236758134308);
  const float x = static_cast<float>(fma(turns, -6.123233995736766e-17, fma(turns, -1.5707963267948966, angle)));
  const float x2 = x * x;
  const float s = x + x * x2 * (-1.6666654611e-1f + x2 * (8.3321608736e-3f + x2 * -1.9515295891e-4f));
  const float quartic = 4.166664568298827e-2f + x2 * (-1.388731625493765e-3f + x2 * 2.443315711809948e-5f);
  const float c = 1.0f - 0.5f * x2 + x2 * x2 * quartic;
  const int quadrant = static_cast<int>(static_cast<long long>(turns)) & 3;
  const float new_c = (quadrant & 1 ? s : c) * scale, new_s = (quadrant & 1 ? c : s) * scale;
  cos = quadrant == 1 || quadrant == 2 ? -new_c : new_c;
  sin = quadrant >= 2 ? -new_s : new_s;
}

__device__ float table_entry(const Params& p, const char* table, int64_t i) {
  if (p.table_kind == FLOAT32) return reinterpret_cast<const float*>(table)[i];
  if (p.table_kind == BFLOAT16) return to_float(reinterpret_cast<const __nv_bfloat16*>(table)[i]);
  return to_float(reinterpret_cast<const __half*>(table)[i]);
}

template <class T, int NP>
__device__ void read_row(const Params& p, int64_t index, float (&cos)[NP], float (&sin)[NP]) {
  Pack<T, NP> c, s;
  c.read(p.cos + index * sizeof(T));
  s.read(p.sin + index * sizeof(T));
#pragma unroll
  for (int i = 0; i < NP; ++i) cos[i] = to_float(c.values[i]), sin[i] = to_float(s.values[i]);
}

// One entry of a row that is not read as a vector.
__device__ void entry(const Params& p, uint32_t batch, int64_t row, int pair, float& cos, float& sin) {
  if (p.read == OF_FREQUENCIES) {
    const float frequency = table_entry(p, p.cos, pair * p.table_strides[2]);
    cos_and_sin(static_cast<double>(row) * static_cast<double>(frequency), p.scale, cos, sin);
  } else if (row < 0 || row >= p.rows) {
    cos = sin = __int_as_float(0x7fffffff);
  } else {
    const int64_t index = batch * p.table_strides[0] + row * p.table_strides[1] + pair * p.table_strides[2];
    cos = table_entry(p, p.cos, index);
    if (p.read == OF_ANGLES) {
      cos_and_sin(static_cast<double>(cos), p.scale, cos, sin);
    } else {
      sin = table_entry(p, p.sin, index);
    }
  }
}

__device__ int axis_of(const Params& p, int pair) {
  if (p.sections_interleaved) return pair < 3 * p.sections[pair % 3] ? pair % 3 : 0;
  return (pair >= p.sections[0]) + (pair >= p.sections[0] + p.sections[1]);
}

// The table row of a token whose position no tensor gives, or that it passes through: a token past the last sequence.
__device__ int64_t running_row(const Params& p, uint32_t batch, uint32_t token, bool& passes) {
  // Entries of a single token each come as tokens of one.
  int64_t row = p.alone ? 0 : token, length = p.tokens, sequence = p.alone ? token : batch;
  if (p.bounds) {
    int32_t low = 0, high = p.sequences + 1;  // bound[low] <= token < bound[high]
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      if (integer(p.bounds, p.wide_bounds, middle) / p.cp_size <= token) low = middle; else high = middle;
    }
    passes = low >= p.sequences;
    if (passes) return 0;
    const int64_t start = integer(p.bounds, p.wide_bounds, low) / p.cp_size;
    length = integer(p.bounds, p.wide_bounds, low + 1) / p.cp_size - start;
    row -= start;
    sequence = low;
  }
  if (p.cp_size > 1) {  // local token to position, see `reference._chunk_map`
    const int64_t half = length / 2;
    row += row >= half ? (2 * p.cp_size - 2 - p.cp_rank) * half : p.cp_rank * half;
  }
  if (p.offsets) row += integer(p.offsets, p.wide_offsets, sequence);
  return row + p.offset;
}

// cos θ and sin θ of NP pairs from `first` on: NaN for a row outside the table.
template <int NP>
__device__ void angles(const Params& p, uint32_t batch, uint32_t token, int first, float (&cos)[NP], float (&sin)[NP],
                       bool& passes) {
  int64_t position = batch * p.position_strides[1] + token * p.position_strides[2], row = 0;
  if (p.axes == BY_CHUNK) position += axis_of(p, first) * p.position_strides[0];
  if (!p.positions) {
    row = running_row(p, batch, token, passes);
  } else if (p.axes != BY_PAIR) {
    row = integer(p.positions, p.wide_positions, position);
  }
  const bool inside = row >= 0 && row < p.rows;
  const int64_t index = batch * p.table_strides[0] + row * p.table_strides[1] + first;
  if (p.read <= HALVES && inside) {
    if (p.read == FLOATS) read_row<float>(p, index, cos, sin);
    if (p.read == BFLOATS) read_row<__nv_bfloat16>(p, index, cos, sin);
    if (p.read == HALVES) read_row<__half>(p, index, cos, sin);
  } else {
#pragma unroll 1
    for (int i = 0; i < NP; ++i) {
      if (p.axes == BY_PAIR)
        row = integer(p.positions, p.wide_positions, position + axis_of(p, first + i) * p.position_strides[0]);
      float c, s;
      entry(p, batch, row, first + i, c, s);
#pragma unroll
      for (int j = 0; j < NP; ++j)
        if (i == j) cos[j] = c, sin[j] = s;
    }
  }
#pragma unroll
  for (int i = 0; i < NP; ++i)
    if (p.inverse) sin[i] = -sin[i];
}

// --- The kernel ------------------------------------------------------------------------------------------------------

// NP pairs of one head: where they are read from, and written to.
template <class T, bool INTERLEAVED, int NP>
struct Pairs {
  static constexpr bool TOGETHER = INTERLEAVED && NP > 1;  // a single pair need not be aligned as a whole
  Pack<T, TOGETHER ? 2 * NP : NP> first;
  Pack<T, NP> second;
  __device__ void read(const char* from, int half_bytes) {
    first.read(from);
    if (!TOGETHER) second.read(from + (INTERLEAVED ? int(sizeof(T)) : half_bytes));
  }
  __device__ void write(char* to, int half_bytes) const {
    first.write(to);
    if (!TOGETHER) second.write(to + (INTERLEAVED ? int(sizeof(T)) : half_bytes));
  }
  __device__ T& a(int i) { return first.values[TOGETHER ? 2 * i : i]; }
  __device__ T& b(int i) { return TOGETHER ? first.values[(2 * i + 1) % (2 * NP)] : second.values[i]; }
};

template <int HEADS, int BYTES>
__device__ void copy(const char* x, char* y, int64_t x_step, int64_t y_step, int heads) {
  typename Word<BYTES>::type words[HEADS];
#pragma unroll
  for (int i = 0; i < HEADS; ++i)
    if (i < heads) words[i] = *reinterpret_cast<const typename Word<BYTES>::type*>(x + i * x_step);
#pragma unroll
  for (int i = 0; i < HEADS; ++i)
    if (i < heads) *reinterpret_cast<typename Word<BYTES>::type*>(y + i * y_step) = words[i];
}

template <class T, bool IN, bool OUT, int NP, int HEADS>
__global__ void __launch_bounds__(THREADS) rope_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may take its place, and wait there as this one
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const uint32_t tile = p.parts(blockIdx.x), part = blockIdx.x - tile * p.parts.d;
  const uint32_t group = p.batches(tile), batch = tile - group * p.batches.d;
  const uint32_t unit = part * p.block_units + threadIdx.x;
  const uint32_t in_tile = p.units(unit), token = group * p.tile_tokens + in_tile;
  const bool active = threadIdx.x < p.block_units && in_tile < p.tile_tokens && token < p.tokens;
  uint32_t r = unit - in_tile * p.units.d;
  const int which = r >= p.q_units;
  if (which) r -= p.q_units;
  const Tensor& t = p.tensors[which];
  const int first_head = t.chunks(r), chunk = r - first_head * t.chunks.d;
  const int64_t x_step = t.groups * t.x_strides[2], y_step = t.groups * t.y_strides[2];
  const char* x = t.x + batch * t.x_strides[0] + token * t.x_strides[1] + first_head * t.x_strides[2];
  char* y = t.y + batch * t.y_strides[0] + token * t.y_strides[1] + first_head * t.y_strides[2];
  int heads = active ? (t.heads - first_head + t.groups - 1) / t.groups : 0;  // of this thread

  if (chunk >= p.rotated) {
    int at = (chunk - p.rotated) * p.copy_bytes;
    if (at >= t.start) at += 2 * p.pairs * int(sizeof(T));
    x += at, y += at;
    for (; heads > 0; heads -= HEADS, x += HEADS * x_step, y += HEADS * y_step) {
      if (p.copy_bytes == 16) copy<HEADS, 16>(x, y, x_step, y_step, heads);
      if (p.copy_bytes == 8) copy<HEADS, 8>(x, y, x_step, y_step, heads);
      if (p.copy_bytes == 4) copy<HEADS, 4>(x, y, x_step, y_step, heads);
      if (p.copy_bytes == 2) copy<HEADS, 2>(x, y, x_step, y_step, heads);
    }
    return;
  }
  const int half_bytes = p.pairs * int(sizeof(T));
  x += t.start + chunk * NP * (IN ? 2 : 1) * int(sizeof(T));
  y += t.start + chunk * NP * (OUT ? 2 : 1) * int(sizeof(T));
  Pairs<T, IN, NP> from[HEADS];
#pragma unroll
  for (int i = 0; i < HEADS; ++i)
    if (i < heads) from[i].read(x + i * x_step, half_bytes);
  float cos[NP], sin[NP];
  bool passes = false;
  if (active) angles(p, batch, token, chunk * NP, cos, sin, passes);
  for (int step = 0; step < p.steps; ++step) {
    if (step > 0) {
      x += HEADS * x_step, y += HEADS * y_step, heads -= HEADS;
#pragma unroll
      for (int i = 0; i < HEADS; ++i)
        if (i < heads) from[i].read(x + i * x_step, half_bytes);
    }
    if (IN != OUT && p.in_place) __syncthreads();  // a head is read whole before another thread writes into it
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
      if (i >= heads) continue;
      Pairs<T, OUT, NP> to;
#pragma unroll
      for (int j = 0; j < NP; ++j) {
        const float a = to_float(from[i].a(j)), b = to_float(from[i].b(j));
        to.a(j) = passes ? from[i].a(j) : from_float<T>(fmaf(a, cos[j], -(b * sin[j])));
        to.b(j) = passes ? from[i].b(j) : from_float<T>(fmaf(b, cos[j], a * sin[j]));
      }
      to.write(y + i * y_step, half_bytes);
    }
  }
}

// --- The launch ------------------------------------------------------------------------------------------------------

using Kernel = void (*)(Params);

template <class T, bool IN, bool OUT, int NP>
Kernel with_heads(int heads) {
  if constexpr (NP * sizeof(T) * (IN || OUT ? 2 : 1) == 16)
    if (heads > 1) return rope_kernel<T, IN, OUT, NP, 2>;
  return rope_kernel<T, IN, OUT, NP, 1>;
}

template <class T, bool IN, bool OUT>
Kernel with_pairs(int np, int heads) {
  constexpr int MOST = 16 / sizeof(T) / (IN || OUT ? 2 : 1);
  if constexpr (MOST >= 8) if (np == 8) return with_heads<T, IN, OUT, 8>(heads);
  if constexpr (MOST >= 4) if (np == 4) return with_heads<T, IN, OUT, 4>(heads);
  if (np == 2) return with_heads<T, IN, OUT, 2>(heads);
  return with_heads<T, IN, OUT, 1>(heads);
}

template <class T>
Kernel with_pairing(const Plan& plan, int np, int heads) {
  if (plan.interleaved_in) return (plan.interleaved_out ? with_pairs<T, true, true> : with_pairs<T, true, false>)(np, heads);
  return (plan.interleaved_out ? with_pairs<T, false, true> : with_pairs<T, false, false>)(np, heads);
}

Kernel kernel_for(const Plan& plan, int np, int heads) {
  if (plan.kind == FLOAT32) return with_pairing<float>(plan, np, heads);
  return (plan.kind == BFLOAT16 ? with_pairing<__nv_bfloat16> : with_pairing<__half>)(plan, np, heads);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The largest power of two, 16 at most, that divides all bits seen.
struct Alignment {
  uint64_t bits = 16;
  void see(int64_t value) { bits |= static_cast<uint64_t>(value); }
  void see(const void* pointer) { bits |= reinterpret_cast<uintptr_t>(pointer); }
  int64_t bytes() const { return static_cast<int64_t>(bits & -bits); }
};

int processors() {
  static int counts[64];
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return 132;
  if (counts[device] == 0 && cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess)
    counts[device] = count;
  return counts[device];
}

}  // namespace

// Rotate every x of the call into its y on the stream of the current device. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusewise_rope(const Plan* plan, const Call* call, void* stream) {
  const int64_t size = plan->kind == FLOAT32 ? 4 : 2, pairs = plan->pairs;
  const bool halves = !plan->interleaved_in && !plan->interleaved_out;
  Params p{};

  // Batch entries of a single token are tokens of a single entry, which leaves more for a block.
  const bool alone = plan->tokens == 1 && plan->batch > 1 && plan->table_strides[0] == 0;
  const int64_t batch = alone ? 1 : plan->batch, tokens = alone ? plan->batch : plan->tokens;
  if (tokens == 0 || batch == 0) return cudaSuccess;
  p.alone = alone;

  // Widest accesses that every address allows.
  Alignment data, copied;
  const int64_t extents[2] = {batch, tokens};
  for (int o = 0; o < plan->operands; ++o) {
    Tensor& t = p.tensors[o];
    t.x = static_cast<const char*>(call->x[o]), t.y = static_cast<char*>(call->y[o]);
    data.see(t.x), data.see(t.y);
    for (int i = 0; i < 3; ++i) {
      const int from = alone && i < 2 ? 0 : i;
      t.x_strides[i] = plan->x_strides[o][from] * size, t.y_strides[i] = plan->y_strides[o][from] * size;
      if ((i == 2 ? plan->heads[o] : extents[i]) > 1) data.see(t.x_strides[i]), data.see(t.y_strides[i]);
    }
    t.start = static_cast<int32_t>(plan->start[o] * size);
    t.heads = static_cast<int32_t>(plan->heads[o]);
    copied.see(t.start), copied.see((plan->head_dim[o] - plan->start[o] - 2 * pairs) * size);
  }
  copied.see(static_cast<int64_t>(data.bits));
  for (int o = 0; o < plan->operands; ++o) data.see(p.tensors[o].start);
  data.see(pairs * size * (halves ? 1 : 2));
  int64_t np = std::max<int64_t>(1, data.bytes() / size / (halves ? 1 : 2));
  while (pairs % np) np /= 2;

  p.pairs = static_cast<int32_t>(pairs);
  p.rotated = static_cast<int32_t>(pairs / np);
  p.copy_bytes = static_cast<int32_t>(copied.bytes());
  p.inverse = plan->inverse, p.in_place = plan->in_place;

  // The table.
  const int64_t table_size = plan->table_kind == FLOAT32 ? 4 : 2, row_bytes = std::min<int64_t>(16, np * table_size);
  Alignment table;
  table.see(call->cos), table.see(call->sin);
  if (batch > 1) table.see(plan->table_strides[0] * table_size);
  if (plan->rows > 1) table.see(plan->table_strides[1] * table_size);
  p.cos = static_cast<const char*>(call->cos), p.sin = static_cast<const char*>(call->sin);
  for (int i = 0; i < 3; ++i) p.table_strides[i] = plan->table_strides[i];
  p.rows = plan->rows;
  p.table_kind = static_cast<Kind>(plan->table_kind);
  p.scale = static_cast<float>(plan->scale);

  // Positions.
  p.positions = call->positions, p.offsets = call->offsets, p.bounds = call->bounds, p.offset = call->offset;
  p.wide_positions = plan->wide_positions, p.wide_offsets = plan->wide_offsets, p.wide_bounds = plan->wide_bounds;
  for (int i = 0; i < 3; ++i) p.position_strides[i] = plan->position_strides[alone && i == 2 ? 1 : i];
  for (int i = 0; i < 3; ++i) p.sections[i] = static_cast<int32_t>(plan->sections[i]);
  p.sections_interleaved = plan->sections_interleaved;
  p.sequences = static_cast<int32_t>(plan->sequences);
  p.cp_rank = static_cast<int32_t>(plan->cp_rank), p.cp_size = static_cast<int32_t>(plan->cp_size);
  if (plan->has_sections) {
    const bool whole = !plan->sections_interleaved && plan->sections[0] % np == 0 && plan->sections[1] % np == 0;
    p.axes = whole ? BY_CHUNK : BY_PAIR;
  }
  if (plan->table != COS_SIN) {
    p.read = plan->table == ANGLES ? OF_ANGLES : OF_FREQUENCIES;
  } else if (plan->table_strides[2] != 1 || table.bytes() < row_bytes || p.axes == BY_PAIR) {
    p.read = SCALARS;
  } else {
    p.read = plan->table_kind == FLOAT32 ? FLOATS : plan->table_kind == BFLOAT16 ? BFLOATS : HALVES;
  }

  // Threads.
  int64_t work = 0;  // threads if each had one head
  for (int o = 0; o < plan->operands; ++o) {
    Tensor& t = p.tensors[o];
    t.copied = p.in_place ? 0 : static_cast<int32_t>((plan->head_dim[o] - 2 * pairs) * size / p.copy_bytes);
    t.chunks = Divisor(p.rotated + t.copied);
    work += t.heads * int64_t(t.chunks.d);
  }
  if (work == 0) return cudaSuccess;
  const int64_t enough = int64_t(processors()) * 2048;  // threads that fill the device
  const int64_t all = work * tokens * batch;
  const int64_t unrolled = all >= 4 * enough ? 2 : 1;
  // Angles that are computed are worth more heads a thread.
  const bool costly = p.read == OF_ANGLES || p.read == OF_FREQUENCIES;
  const int64_t steps = costly ? std::clamp<int64_t>(all / (2 * enough * unrolled), 1, 8) : 1;
  int64_t units = 0;
  p.steps = 0;
  for (int o = 0; o < plan->operands; ++o) {
    Tensor& t = p.tensors[o];
    t.groups = static_cast<int32_t>(std::max<int64_t>(1, ceil_div(t.heads, unrolled * steps)));
    const int64_t own = ceil_div(ceil_div(t.heads, t.groups), unrolled);
    p.steps = std::max(p.steps, static_cast<int32_t>(own));
    units += t.heads ? t.groups * int64_t(t.chunks.d) : 0;
    if (o == 0) p.q_units = static_cast<int32_t>(units);
  }
  if (plan->operands == 1) p.q_units = static_cast<int32_t>(units);
  p.tokens = static_cast<int32_t>(tokens);
  int64_t tile_tokens = std::clamp<int64_t>(THREADS / units, 1, tokens);
  while (tile_tokens > 1 && ceil_div(tokens, tile_tokens) * batch < 2 * processors()) tile_tokens /= 2;
  p.tile_tokens = static_cast<int32_t>(tile_tokens);
  int64_t block_units = std::min<int64_t>(THREADS, units * tile_tokens);
  if (p.in_place && plan->interleaved_in != plan->interleaved_out) block_units = block_units / p.rotated * p.rotated;
  p.block_units = static_cast<int32_t>(block_units);
  p.units = Divisor(units);
  p.parts = Divisor(ceil_div(units * tile_tokens, block_units));
  p.batches = Divisor(batch);

  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ceil_div(tokens, tile_tokens) * batch * p.parts.d));
  config.blockDim = dim3(static_cast<unsigned>(ceil_div(block_units, 32) * 32));
  config.stream = static_cast<cudaStream_t>(stream);
  // The blocks of this kernel may take their places while the last ones of the kernel before are still at work.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel_for(*plan, static_cast<int>(np), static_cast<int>(unrolled)), p);
}

// Why the kernels cannot run on the current device, as a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusewise_rope_probe() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, rope_kernel<float, false, false, 1, 1>);
}

extern "C" __attribute__((visibility("default"))) const char* fusewise_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
