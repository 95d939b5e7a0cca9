// RoPE CPU kernel: q and k in one call, forward and backward (the transposed rotation).
//
//     (y_a, y_b) = (x_a cos θ − x_b sin θ, x_b cos θ + x_a sin θ)
//
// Shape legend: B batch, T tokens, H heads, D features of a head, P rotated pairs; a block is up to BLOCK tokens of one
// batch entry. Threads take runs of blocks. For each block cos θ and sin θ are computed or converted once, as float32 in
// L1, and used for all heads of q and k; if they are the same for every batch entry, the blocks of all entries are
// processed back to back and share them. x is read once, y written once; float32 arithmetic with one final rounding. A
// result depends only on its token, not on the number of threads or on the blocking, so it is bitwise reproducible.
//
// There is no torch header and no OpenMP pragma: it compiles in seconds. Threads come from the OpenMP runtime that torch
// has loaded, whose `GOMP_parallel` is passed in, or are started here.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../../../_shared/threads.h"
#include "../../../_shared/vectors.h"
#include "../plan.h"
#include "memory.h"

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace {

constexpr int64_t MAX_HEAD_DIM = 512, MAX_PAIRS = MAX_HEAD_DIM / 2;
constexpr int64_t BLOCK = 32;                // tokens
constexpr int64_t TABLE_FLOATS = 4096;       // floats of a block's cos or sin: 16 KiB
constexpr int64_t RUN_BYTES = 256 << 10;     // bytes of x that a thread takes at a time
constexpr int64_t THREAD_BYTES = 128 << 10;  // bytes of x that justify another thread
constexpr int64_t AHEAD_BYTES = 8 << 10;     // prefetch distance in bytes of x
constexpr int64_t STREAM_BYTES = 32 << 20;   // bytes of y from which on stores are non-temporal

// --- One head -------------------------------------------------------------------------------------------------------

// Rotate pairs [i, i + N) of x into y. x and y are disjoint, or the same if the pairings are: no pair then overwrites another's input.
template <class T, bool INTERLEAVED_IN, bool INTERLEAVED_OUT, int N>
inline void rotate_some(const T* x, T* y, const float* cos, const float* sin, int64_t pairs, int64_t i) {
  using E = Elements<T, N>;
  using F = typename E::F;
  F a, b;
  if (INTERLEAVED_IN) {
    E::get_pairs(x + 2 * i, a, b);
  } else {
    E::get(x + i, x + pairs + i, a, b);
  }
  const F c = load<F>(cos + i), s = load<F>(sin + i);
  const F y_a = a * c - b * s, y_b = b * c + a * s;
  if (INTERLEAVED_OUT) {
    E::put_pairs(y + 2 * i, y_a, y_b);
  } else {
    E::put(y + i, y + pairs + i, y_a, y_b);
  }
}

template <class T, bool IN, bool OUT>
inline void rotate(const T* x, T* y, const float* cos, const float* sin, int64_t pairs) {
  int64_t i = 0;
  for (; i + LANES <= pairs; i += LANES) rotate_some<T, IN, OUT, LANES>(x, y, cos, sin, pairs, i);
  if constexpr (LANES > 8)
    if (pairs & 8) rotate_some<T, IN, OUT, 8>(x, y, cos, sin, pairs, i), i += 8;
  if constexpr (LANES > 4)
    if (pairs & 4) rotate_some<T, IN, OUT, 4>(x, y, cos, sin, pairs, i), i += 4;
  for (; i < pairs; ++i) rotate_some<T, IN, OUT, 1>(x, y, cos, sin, pairs, i);
}

// Change the pairing without rotating: every element keeps its bits.
template <class T, bool IN, bool OUT>
inline void pass(const T* x, T* y, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const T a = x[IN ? 2 * i : i], b = x[IN ? 2 * i + 1 : pairs + i];
    y[OUT ? 2 * i : i] = a, y[OUT ? 2 * i + 1 : pairs + i] = b;
  }
}

// `count` heads with a constant stride, each with its own row of cos and sin or sharing one (table_step 0), or without (cos is
// null): then they pass through. While one head is processed, the one `ahead` of it is prefetched.
struct Heads {
  const void* x;
  void* y;
  int64_t x_step, y_step, x_ahead, y_ahead, count;
  const float *cos, *sin;
  int64_t table_step, width, start;
};

template <class T, bool INTERLEAVED_IN, bool INTERLEAVED_OUT>
void rotate_heads(const Plan& plan, const Heads& heads, bool streamed) {
  const int64_t width = heads.width, start = heads.start, rest = start + 2 * plan.pairs;
  // In place with a different pairing, the whole head must be read before it is written.
  const bool reordered = plan.in_place && INTERLEAVED_IN != INTERLEAVED_OUT;
  const bool prefetch_y = !streamed && !plan.in_place;
  // Several heads are staged before they are streamed: loading data that spans two pending stores would stall (failed
  // store-to-load forwarding).
  alignas(64) T stage[MAX_HEAD_DIM];
  const int64_t most = streamed ? MAX_HEAD_DIM / width : 1;
  int64_t staged = 0;
  for (int64_t h = 0; h < heads.count; ++h) {
    const T* x = static_cast<const T*>(heads.x) + h * heads.x_step;
    T* y = static_cast<T*>(heads.y) + h * heads.y_step;
    T* to = streamed || reordered ? stage + staged * width : y;
    const int64_t row = h * heads.table_step;
    for (int64_t i = 0; i < width * int64_t(sizeof(T)); i += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(x + heads.x_ahead) + i);
      if (prefetch_y) __builtin_prefetch(reinterpret_cast<const char*>(y + heads.y_ahead) + i, 1);
    }
    if (heads.cos)
      rotate<T, INTERLEAVED_IN, INTERLEAVED_OUT>(x + start, to + start, heads.cos + row, heads.sin + row, plan.pairs);
    else
      pass<T, INTERLEAVED_IN, INTERLEAVED_OUT>(x + start, to + start, plan.pairs);
    if (!plan.in_place) {
      if (start > 0) std::memcpy(to, x, start * sizeof(T));
      if (rest < width) std::memcpy(to + rest, x + rest, (width - rest) * sizeof(T));
    }
    if (reordered) {
      std::memcpy(y + start, stage + start, (rest - start) * sizeof(T));
    } else if (streamed && (++staged == most || h + 1 == heads.count)) {
      T* first = y - (staged - 1) * heads.y_step;
      if (heads.y_step == width) stream(first, stage, staged * width * sizeof(T));
      for (int64_t i = 0; i < staged && heads.y_step != width; ++i)
        stream(first + i * heads.y_step, stage + i * width, width * sizeof(T));
      staged = 0;
    }
  }
}

using RotateHeads = void (*)(const Plan&, const Heads&, bool);

template <class T>
RotateHeads rotation(const Plan& plan) {
  if (plan.interleaved_in) return plan.interleaved_out ? rotate_heads<T, true, true> : rotate_heads<T, true, false>;
  return plan.interleaved_out ? rotate_heads<T, false, true> : rotate_heads<T, false, false>;
}

RotateHeads rotation_of(const Plan& plan) {
  if (plan.kind == FLOAT32) return rotation<float>(plan);
  return plan.kind == BFLOAT16 ? rotation<Bf16>(plan) : rotation<Fp16>(plan);
}

// --- Angles ---------------------------------------------------------------------------------------------------------

// cos and sin of `factor` times each of the angles, to within half an ulp of 1. The product and the range reduction by
// quarter turns are float64 (π/2 in three parts whose products are exact), the polynomials float32 on [-π/4, π/4]. An angle
// too large for its quarter turns to be counted gives NaN instead of a polynomial evaluated far outside its range.
void cos_and_sin(double factor, const float* angles, float scale, int64_t pairs, float* cos, float* sin) {
  INDEPENDENT
  for (int64_t i = 0; i < pairs; ++i) {
    const double angle = factor * static_cast<double>(angles[i]);
    const double turns = std::nearbyint(angle * 0.63661977236758134308);
    const double reduced = ((angle - turns * 1.57079625129699707031) - turns * 7.54978941586159635335e-8) -
                           turns * 5.39030285815811905290e-15;
    const int32_t quadrant = static_cast<int32_t>(turns - 4.0 * std::floor(turns * 0.25));
    const float x = std::abs(angle) < 0x1p52 ? static_cast<float>(reduced) : std::numeric_limits<float>::quiet_NaN();
    const float x2 = x * x;
    const float s = x + x * x2 * (-1.6666654611e-1f + x2 * (8.3321608736e-3f + x2 * -1.9515295891e-4f));
    const float quartic = 4.166664568298827e-2f + x2 * (-1.388731625493765e-3f + x2 * 2.443315711809948e-5f);
    const float c = 1.0f - 0.5f * x2 + x2 * x2 * quartic;
    const bool swap = quadrant & 1;
    const float new_c = (swap ? s : c) * scale, new_s = (swap ? c : s) * scale;
    cos[i] = quadrant == 1 || quadrant == 2 ? -new_c : new_c;
    sin[i] = quadrant >= 2 ? -new_s : new_s;
  }
}

template <class T>
void convert(const T* from, int64_t step, int64_t count, float* to) {
  int64_t i = 0;
  if (step == 1)
    for (; i + LANES <= count; i += LANES) store(to + i, Elements<T, LANES>::get(from + i));
  for (; i < count; ++i) store(to + i, Elements<T, 1>::get(from + i * step));
}

int64_t integer(const void* data, int64_t wide, int64_t i) {
  return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
}

// --- One thread -----------------------------------------------------------------------------------------------------

// The work queue of a call: blocks 0 … blocks − 1, of which a thread takes `run` at a time.
struct Work {
  const Plan& plan;
  const Call& call;
  int64_t block, blocks, run;  // tokens per block; block b of batch entry e has index e + b * batch
  bool streamed;
  std::atomic<int64_t> next{0};
};

class Thread {
 public:
  explicit Thread(Work& work) : work(work), plan(work.plan), call(work.call) {
    for (int64_t i = 0; i < plan.pairs; ++i) axis[i] = axis_of(i);
    if (plan.table == INV_FREQ) load_row(call.cos, 0, frequencies);
  }

  void run() {
    const RotateHeads rotate_heads = rotation_of(plan);
    const bool alike = plan.table_strides[0] == 0 && plan.position_strides[1] == 0 && !call.offsets;
    int64_t first;
    while ((first = work.next.fetch_add(work.run)) < work.blocks) {
      int64_t filled = -1;
      for (int64_t i = first; i < std::min(first + work.run, work.blocks); ++i) {
        const int64_t batch = i % plan.batch, token = i / plan.batch * work.block;
        const int64_t count = std::min(work.block, plan.tokens - token), rotated = in_sequences(token, count);
        if (!alike || token != filled) {
          for (int64_t t = 0; t < rotated; ++t) fill(batch, token + t, cos + t * plan.pairs, sin + t * plan.pairs);
          filled = token;
        }
        for (int64_t o = 0; o < plan.operands; ++o) {
          if (plan.heads[o] == 0) continue;
          rotate_block(rotate_heads, o, batch, token, rotated, cos);
          if (rotated < count) rotate_block(rotate_heads, o, batch, token + rotated, count - rotated, nullptr);
        }
      }
    }
    if (work.streamed) stream_fence();
  }

 private:
  Work& work;
  const Plan& plan;
  const Call& call;
  alignas(64) float cos[TABLE_FLOATS];
  alignas(64) float sin[TABLE_FLOATS];
  alignas(64) float frequencies[MAX_PAIRS];
  int8_t axis[MAX_PAIRS];

  int axis_of(int64_t pair) const {
    const int64_t* sections = plan.sections;
    if (!plan.has_sections) return 0;
    if (plan.sections_interleaved) return pair < 3 * sections[pair % 3] ? pair % 3 : 0;
    return (pair >= sections[0]) + (pair >= sections[0] + sections[1]);
  }

  // How many of `count` tokens lie before the end of the last sequence; the others pass through.
  int64_t in_sequences(int64_t token, int64_t count) const {
    if (!call.bounds) return count;
    return plan.sequences == 0 ? 0 : std::clamp<int64_t>(bound(plan.sequences) - token, 0, count);
  }

  // Rotate all heads of one operand in a block, in memory order.
  void rotate_block(RotateHeads rotate_heads, int64_t operand, int64_t batch, int64_t token, int64_t count,
                    const float* cos) const {
    const int64_t *xs = plan.x_strides[operand], *ys = plan.y_strides[operand], heads = plan.heads[operand];
    const int64_t width = plan.head_dim[operand], start = plan.start[operand];
    const int64_t size = plan.kind == FLOAT32 ? 4 : 2;
    auto* x = static_cast<const char*>(call.x[operand]) + (batch * xs[0] + token * xs[1]) * size;
    auto* y = static_cast<char*>(call.y[operand]) + (batch * ys[0] + token * ys[1]) * size;
    const int64_t head_bytes = width * size, row_bytes = heads * head_bytes;
    if (heads > 1 && xs[2] <= xs[1]) {
      const int dim = row_bytes >= AHEAD_BYTES ? 2 : 1;
      const int64_t ahead = AHEAD_BYTES / (dim == 2 ? head_bytes : row_bytes);
      for (int64_t t = 0; t < count; ++t) {
        const int64_t row = t * plan.pairs;
        rotate_heads(plan,
                     {x + t * xs[1] * size, y + t * ys[1] * size, xs[2], ys[2], ahead * xs[dim], ahead * ys[dim],
                      heads, cos ? cos + row : nullptr, sin + row, 0, width, start},
                     work.streamed);
      }
    } else {
      const int dim = heads == 1 ? 1 : 2;
      const int64_t ahead = heads == 1 ? AHEAD_BYTES / head_bytes : 1;
      for (int64_t h = 0; h < heads; ++h)
        rotate_heads(plan,
                     {x + h * xs[2] * size, y + h * ys[2] * size, xs[1], ys[1], ahead * xs[dim], ahead * ys[dim],
                      count, cos, sin, plan.pairs, width, start},
                     work.streamed);
    }
  }

  // cos and sin of one token: NaN for a row outside the table.
  void fill(int64_t batch, int64_t token, float* c, float* s) const {
    if (call.positions) {
      const int64_t *strides = plan.position_strides, index = batch * strides[1] + token * strides[2];
      fill_row(batch, integer(call.positions, plan.wide_positions, index), c, s);
      if (plan.has_sections) {
        float other_c[MAX_PAIRS], other_s[MAX_PAIRS];
        for (int64_t a = 1; a < 3; ++a) {
          fill_row(batch, integer(call.positions, plan.wide_positions, index + a * strides[0]), other_c, other_s);
          for (int64_t i = 0; i < plan.pairs; ++i) {
            c[i] = axis[i] == a ? other_c[i] : c[i];
            s[i] = axis[i] == a ? other_s[i] : s[i];
          }
        }
      }
      return;
    }
    int64_t sequence = batch, start = 0, length = plan.tokens;
    if (call.bounds) {
      int64_t low = 0, high = plan.sequences + 1;  // bound(low) <= token < bound(high)
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (bound(middle) <= token ? low : high) = middle;
      }
      sequence = low;
      start = bound(low);
      length = bound(low + 1) - start;
    }
    int64_t row = token - start;
    if (plan.cp_size > 1) {  // local token to position, see `reference._chunk_map`
      const int64_t half = length / 2;
      row += row >= half ? (2 * plan.cp_size - 2 - plan.cp_rank) * half : plan.cp_rank * half;
    }
    if (call.offsets) row += integer(call.offsets, plan.wide_offsets, sequence);
    fill_row(batch, row + call.offset, c, s);
  }

  int64_t bound(int64_t i) const { return integer(call.bounds, plan.wide_bounds, i) / plan.cp_size; }

  void fill_row(int64_t batch, int64_t row, float* c, float* s) const {
    const float scale = static_cast<float>(plan.scale), nan = std::numeric_limits<float>::quiet_NaN();
    if (plan.table == INV_FREQ) {
      cos_and_sin(static_cast<double>(row), frequencies, scale, plan.pairs, c, s);
    } else if (row < 0 || row >= plan.rows) {
      std::fill_n(c, plan.pairs, nan);
      std::fill_n(s, plan.pairs, nan);
      return;
    } else {
      const int64_t index = batch * plan.table_strides[0] + row * plan.table_strides[1];
      load_row(call.cos, index, c);
      if (plan.table == ANGLES) {
        float angles[MAX_PAIRS];
        std::copy_n(c, plan.pairs, angles);
        cos_and_sin(1.0, angles, scale, plan.pairs, c, s);
      } else {
        load_row(call.sin, index, s);
      }
    }
    if (plan.inverse)
      for (int64_t i = 0; i < plan.pairs; ++i) s[i] = -s[i];
  }

  void load_row(const void* table, int64_t index, float* to) const {
    const int64_t step = plan.table_strides[2];
    if (plan.table_kind == FLOAT32)
      convert(static_cast<const float*>(table) + index, step, plan.pairs, to);
    else if (plan.table_kind == BFLOAT16)
      convert(static_cast<const Bf16*>(table) + index, step, plan.pairs, to);
    else
      convert(static_cast<const Fp16*>(table) + index, step, plan.pairs, to);
  }
};

void run_thread(void* work) { Thread(*static_cast<Work*>(work)).run(); }

}  // namespace

// Rotate every x of the call into its y with at most `most` threads, started by `parallel` (GOMP_parallel) or, if null, here.
extern "C" __attribute__((visibility("default"))) void fusewise_rope(const Plan* plan, const Call* call, int64_t most,
                                                                     Parallel parallel) noexcept {
  const int64_t size = plan->kind == FLOAT32 ? 4 : 2;
  const int64_t features[2] = {plan->heads[0] * plan->head_dim[0],
                               plan->operands > 1 ? plan->heads[1] * plan->head_dim[1] : 0};
  const int64_t token_bytes = (features[0] + features[1]) * size;
  const int64_t all_tokens = plan->batch * plan->tokens, bytes = all_tokens * token_bytes;
  if (bytes == 0) return;
  const int64_t threads = std::clamp<int64_t>(bytes / THREAD_BYTES, 1, std::max<int64_t>(1, most));
  // Blocks as large as the table buffer allows and runs as long as is useful, but several of them per thread.
  int64_t block = std::min(BLOCK, TABLE_FLOATS / plan->pairs);
  if (threads > 1) block = std::clamp<int64_t>(all_tokens / (8 * threads), 1, block);
  const int64_t blocks = (plan->tokens + block - 1) / block * plan->batch;
  int64_t run = blocks;
  if (threads > 1) run = std::max<int64_t>(1, std::min(RUN_BYTES / (block * token_bytes), blocks / (8 * threads)));
  const bool large = bytes >= STREAM_BYTES && !plan->in_place;
  bool streamed = large;
  for (int64_t o = 0; large && o < plan->operands; ++o)  // of a tensor with gaps, only a part is examined
    streamed &= !untouched(call->y[o], features[o] * all_tokens * size);
  Work work{*plan, *call, block, blocks, run, streamed};
  in_threads(run_thread, &work, threads, parallel);
}
