// RoPE in CUDA: q and k in one launch, forward and backward (the transposed rotation).
//
//     (y_a, y_b) = (x_a cos θ − x_b sin θ, x_b cos θ + x_a sin θ)
//
// Shape legend: B batch, T tokens, H heads, D features of a head, P rotated pairs. A head is cut into chunks of 2 · NP
// elements, two accesses of up to 16 bytes or one: first the chunks of NP pairs that rotate, then those that are copied
// (not in place). Threads of a block: x a chunk, y a head, z a token; a thread has its chunk of several heads, for which
// it finds cos θ and sin θ once, float32 in registers. Neighbouring threads have neighbouring chunks, then heads, then
// tokens, so that whole lines are read and written, and no thread idles whatever the widths. x is read once, y written
// once, arithmetic in float32, one rounding.
//
// The kernel is bound by memory: all reads of a thread are under way before the first is needed, and what is the same
// for a block is computed once for it. At a few tokens it is bound by latency: x is asked for before the position and
// the table row, which have to follow one another.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "../plan.h"

namespace {

constexpr int THREADS = 128;  // of a block, at most
constexpr int READ = 128;     // bytes that a thread reads at once where there is enough to do

// Heads of which a thread then has a chunk of NP pairs. Its first instructions, as many as those for 30 bytes, serve all.
constexpr int heads_read(int np, int size) { return np * size >= 8 ? READ / (2 * np * size) : 1; }

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
  uint32_t heads;
  uint32_t start, copied;  // bytes before the rotated features; chunks to copy in a head
  uint32_t packs;          // accesses that these take, where the two of a chunk are apart
};

// How a row of the table is read.
enum Read : int32_t { FLOATS, BFLOATS, HALVES, SCALARS, OF_ANGLES, OF_FREQUENCIES };
// Which positions the pairs of a chunk follow: the only ones, those of one axis, or each its own axis.
enum Axes : int32_t { ONE, BY_CHUNK, BY_PAIR };

struct Params {
  Tensor tensors[2];
  uint32_t pairs, rotated;          // rotated: chunks of NP pairs in a head
  uint32_t tokens, steps, q_parts;  // a block has HEADS · steps · blockDim.y heads of its tensor: a part
  Divisor parts, batches;
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

// A chunk of one head: NP pairs, neighbours or halves apart, or 2 · NP elements to copy.
template <class T, bool INTERLEAVED, int NP>
struct Chunk {
  static constexpr bool WHOLE = INTERLEAVED && NP > 1;  // one access; a single pair need not be aligned as a whole
  Pack<T, WHOLE ? 2 * NP : NP> first;
  Pack<T, NP> second;
  __device__ void read(const char* from, uint32_t apart, bool both) {
    first.read(from);
    if (!WHOLE && both) second.read(from + apart);
  }
  __device__ void write(char* to, uint32_t apart, bool both) const {
    first.write(to);
    if (!WHOLE && both) second.write(to + apart);
  }
  __device__ T& a(int i) { return first.values[WHOLE ? 2 * i : i]; }
  __device__ T& b(int i) { return WHOLE ? first.values[(2 * i + 1) % (2 * NP)] : second.values[i]; }
  __device__ T& element(int i) { return WHOLE || i < NP ? first.values[i % (WHOLE ? 2 * NP : NP)] : second.values[i % NP]; }
};

// The work of a thread on tensor `t`: a constant for the compiler, so that what a block shares stays in uniform registers.
template <class T, bool IN, bool OUT, int NP, int HEADS>
__device__ __forceinline__ void rotate(const Params& p, const Tensor& t, uint32_t part, uint32_t batch, uint32_t tile) {
  constexpr uint32_t SIZE = sizeof(T), PACK = NP * SIZE;
  constexpr bool BOTH_APART = !Chunk<T, IN, NP>::WHOLE && !Chunk<T, OUT, NP>::WHOLE;
  const uint32_t first_head = part * (HEADS * p.steps * blockDim.y), first_token = tile * blockDim.z;
  const char* block_x = t.x + batch * t.x_strides[0] + first_token * t.x_strides[1] + first_head * t.x_strides[2];
  char* block_y = t.y + batch * t.y_strides[0] + first_token * t.y_strides[1] + first_head * t.y_strides[2];
  const int64_t x_step = blockDim.y * t.x_strides[2], y_step = blockDim.y * t.y_strides[2];

  // Where the thread's chunk lies in a head, and its second access from the first.
  const uint32_t token = first_token + threadIdx.z, chunk = threadIdx.x;
  bool rotates = chunk < p.rotated, both = true;
  const bool active = token < p.tokens && chunk < p.rotated + t.copied;
  uint32_t x_at = t.start + chunk * (IN ? 2 : 1) * PACK, y_at = t.start + chunk * (OUT ? 2 : 1) * PACK;
  uint32_t x_apart = IN ? SIZE : p.pairs * SIZE, y_apart = OUT ? SIZE : p.pairs * SIZE;
  if (!rotates) {
    const uint32_t skipped = 2 * p.pairs * SIZE, copy = chunk - p.rotated;
    // Two accesses have all first ones, then all second ones, unless one of the sides has a single one.
    const uint32_t one = BOTH_APART ? copy : 2 * copy, other = BOTH_APART ? copy + t.copied : 2 * copy + 1;
    uint32_t one_at = one * PACK, other_at = other * PACK;
    if (one_at >= t.start) one_at += skipped;
    if (other_at >= t.start) other_at += skipped;
    x_at = y_at = one_at;
    x_apart = y_apart = other_at - one_at;
    both = other < t.packs;
  }
  const char* x = block_x + threadIdx.z * t.x_strides[1] + threadIdx.y * t.x_strides[2] + x_at;
  char* y = block_y + threadIdx.z * t.y_strides[1] + threadIdx.y * t.y_strides[2] + y_at;
  int heads = active ? int(t.heads - first_head - threadIdx.y) : 0;  // from this thread's first on

#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");  // they wait for the end of this kernel in the same way
#endif
  Chunk<T, IN, NP> from[HEADS];
#pragma unroll
  for (int i = 0; i < HEADS; ++i)
    if (i * int(blockDim.y) < heads) from[i].read(x + i * x_step, x_apart, both);
  float cos[NP], sin[NP];
  bool passes = false;
  if (active && rotates) angles(p, batch, token, chunk * NP, cos, sin, passes);
  if (IN == OUT && passes) rotates = false;
  for (uint32_t step = 0; step < p.steps; ++step) {
    if (step > 0) {
      x += HEADS * x_step, y += HEADS * y_step, heads -= HEADS * blockDim.y;
#pragma unroll
      for (int i = 0; i < HEADS; ++i)
        if (i * int(blockDim.y) < heads) from[i].read(x + i * x_step, x_apart, both);
    }
    if (IN != OUT && p.in_place) __syncthreads();  // a head is read whole before another thread writes into it
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
      if (i * int(blockDim.y) >= heads) continue;
      Chunk<T, OUT, NP> to;
      if (rotates) {
#pragma unroll
        for (int j = 0; j < NP; ++j) {
          const T a = from[i].a(j), b = from[i].b(j);
          const float x_a = to_float(a), x_b = to_float(b);
          to.a(j) = IN != OUT && passes ? a : from_float<T>(fmaf(x_a, cos[j], -(x_b * sin[j])));
          to.b(j) = IN != OUT && passes ? b : from_float<T>(fmaf(x_b, cos[j], x_a * sin[j]));
        }
      } else {
#pragma unroll
        for (int j = 0; j < 2 * NP; ++j) to.element(j) = from[i].element(j);
      }
      to.write(y + i * y_step, y_apart, both);
    }
  }
}

// A block has blockDim.z tokens of one batch entry, and of those a part of the heads of one tensor.
template <class T, bool IN, bool OUT, int NP, int HEADS>
__global__ void __launch_bounds__(THREADS, (HEADS > 1 ? 768 : 1024) / THREADS) rope_kernel(const __grid_constant__ Params p) {
  const uint32_t tile_and_batch = p.parts(blockIdx.x), tile = p.batches(tile_and_batch);
  const uint32_t batch = tile_and_batch - tile * p.batches.d, part = blockIdx.x - tile_and_batch * p.parts.d;
  if (part < p.q_parts) {
    rotate<T, IN, OUT, NP, HEADS>(p, p.tensors[0], part, batch, tile);
  } else {
    rotate<T, IN, OUT, NP, HEADS>(p, p.tensors[1], part - p.q_parts, batch, tile);
  }
}

// --- The launch ------------------------------------------------------------------------------------------------------

using Kernel = void (*)(Params);

template <class T, bool IN, bool OUT, int NP>
Kernel with_heads(int64_t heads) {
  constexpr int MOST = heads_read(NP, sizeof(T));
  return heads > 1 ? rope_kernel<T, IN, OUT, NP, MOST> : rope_kernel<T, IN, OUT, NP, 1>;
}

template <class T, bool IN, bool OUT>
Kernel with_pairs(int64_t np, int64_t heads) {
  constexpr int MOST = 16 / sizeof(T) / (IN || OUT ? 2 : 1);
  if constexpr (MOST >= 8) if (np == 8) return with_heads<T, IN, OUT, 8>(heads);
  if constexpr (MOST >= 4) if (np == 4) return with_heads<T, IN, OUT, 4>(heads);
  if (np == 2) return with_heads<T, IN, OUT, 2>(heads);
  return with_heads<T, IN, OUT, 1>(heads);
}

template <class T>
Kernel with_pairing(const Plan& plan, int64_t np, int64_t heads) {
  if (plan.interleaved_in) return (plan.interleaved_out ? with_pairs<T, true, true> : with_pairs<T, true, false>)(np, heads);
  return (plan.interleaved_out ? with_pairs<T, false, true> : with_pairs<T, false, false>)(np, heads);
}

Kernel kernel_for(const Plan& plan, int64_t np, int64_t heads) {
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

// Of the current device.
struct Device {
  int processors = 132, generation = 0;
};

Device current_device() {
  static Device known[64];
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess || index >= 64) return Device{};
  Device& device = known[index];
  if (device.generation == 0) {
    Device asked;
    if (cudaDeviceGetAttribute(&asked.processors, cudaDevAttrMultiProcessorCount, index) != cudaSuccess ||
        cudaDeviceGetAttribute(&asked.generation, cudaDevAttrComputeCapabilityMajor, index) != cudaSuccess)
      return Device{};
    device = asked;
  }
  return device;
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
  Alignment data;
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
    t.start = static_cast<uint32_t>(plan->start[o] * size);
    t.heads = static_cast<uint32_t>(plan->heads[o]);
    if (!plan->in_place) data.see((plan->head_dim[o] - plan->start[o] - 2 * pairs) * size);
    data.see(t.start);
  }
  data.see(pairs * size * (halves ? 1 : 2));
  const int64_t np = std::max<int64_t>(1, data.bytes() / size / (halves ? 1 : 2));

  p.pairs = static_cast<uint32_t>(pairs);
  p.rotated = static_cast<uint32_t>(pairs / np);
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

  // Threads: as many heads each as leaves enough of them to fill the device some times over.
  uint32_t chunks = 0;
  int64_t most_heads = 0, all = 0;
  for (int o = 0; o < plan->operands; ++o) {
    Tensor& t = p.tensors[o];
    t.packs = p.in_place ? 0 : static_cast<uint32_t>((plan->head_dim[o] - 2 * pairs) / np);
    t.copied = (t.packs + 1) / 2;
    chunks = std::max(chunks, p.rotated + t.copied);
    most_heads = std::max<int64_t>(most_heads, t.heads);
    all += int64_t(t.heads) * (p.rotated + t.copied) * tokens * batch;
  }
  if (all == 0) return cudaSuccess;
  const Device device = current_device();
  const int64_t enough = int64_t(device.processors) * 2048;
  const int64_t several = heads_read(static_cast<int>(np), static_cast<int>(size));
  const int64_t unrolled = all >= several * enough ? several : 1;
  const bool costly = p.read == OF_ANGLES || p.read == OF_FREQUENCIES;  // angles that are computed serve more heads
  p.steps = static_cast<uint32_t>(costly ? std::clamp<int64_t>(all / (2 * enough * unrolled), 1, 8) : 1);
  const int64_t room = THREADS / chunks;
  int64_t fewest = most_heads;
  for (int o = 0; o < plan->operands; ++o)
    if (p.tensors[o].heads) fewest = std::min(fewest, ceil_div(p.tensors[o].heads, unrolled * p.steps));
  const int64_t most = std::clamp<int64_t>(fewest, 1, room);  // threads for heads in a block
  int64_t block_tokens = std::clamp<int64_t>(room / most, 1, std::min<int64_t>(tokens, 64));
  while (block_tokens > 1 && all / (chunks * most * block_tokens * unrolled * p.steps) < 4 * device.processors) block_tokens /= 2;
  int64_t parts = 0;
  for (int o = 0; o < plan->operands; ++o) {
    parts += ceil_div(p.tensors[o].heads, most * unrolled * p.steps);
    if (o == 0) p.q_parts = static_cast<uint32_t>(parts);
  }
  p.tokens = static_cast<uint32_t>(tokens);
  p.parts = Divisor(parts);
  p.batches = Divisor(batch);

  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ceil_div(tokens, block_tokens) * batch * parts));
  config.blockDim = dim3(chunks, static_cast<unsigned>(most), static_cast<unsigned>(block_tokens));
  config.stream = static_cast<cudaStream_t>(stream);
  // The blocks of this kernel may take their places while the last ones of the kernel before are still at work.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = device.generation >= 9 ? 1 : 0;  // older GPUs have no such launch
  return cudaLaunchKernelEx(&config, kernel_for(*plan, np, unrolled), p);
}

// Why the kernels cannot run on the current device, as a cudaError_t.
extern "C" __attribute__((visibility("default"))) int fusewise_rope_probe() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, rope_kernel<float, false, false, 1, 1>);
}

extern "C" __attribute__((visibility("default"))) const char* fusewise_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
