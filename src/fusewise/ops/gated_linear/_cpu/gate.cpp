// CPU kernel for the gate of the gated linear unit, forward and backward, over rows of pre-activations.
//
//   y = u · act(g)        du = dy · act(g),  dg = dy · u · act'(g),  and the column sums of du and dg
//
// u, g (and dy) are read once; y, or du and dg, which may overwrite u and g, are written once. Arithmetic is float32, with
// one conversion at each end. Loops run over short blocks of a row that stay in L1, without branches or calls, so that any
// compiler vectorizes them. The matrix products are computed by the platform's BLAS.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../../../_shared/threads.h"
#include "../../../_shared/vectors.h"
#include "gate.h"

namespace {

constexpr int64_t ROWS = 32, COLUMNS = 1024;  // unit of work; ROWS is also the unit of partial sums: fixed, so that they are reproducible
constexpr int64_t BLOCK = 128;                // columns computed at a time
constexpr int64_t THREAD_ELEMENTS = 16384;    // minimum elements that justify a thread

// --- Elements ---------------------------------------------------------------------------------------------------------

template <class To, class From>
inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float widen(float x) { return x; }
inline float widen(Bf16 x) { return as<float>(static_cast<uint32_t>(x.bits) << 16); }

inline void narrow(float x, float& to) { to = x; }

inline void narrow(float x, Bf16& to) {
  const uint32_t bits = as<uint32_t>(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to.bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// --- Functions --------------------------------------------------------------------------------------------------------

// e^x to within two ulps; 0 and infinity beyond its range, NaN for NaN.
inline float exponential(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 · 2^23: leaves the integer in the low mantissa bits
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9841270e-4f;
  p = p * r + 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const int32_t exponent = static_cast<int32_t>(as<uint32_t>(shifted)) - 0x4b400000;
  const int32_t half = exponent >> 1, rest = exponent - half;  // 2^exponent may be subnormal: in two steps
  return p * as<float>(static_cast<uint32_t>(half + 127) << 23) * as<float>(static_cast<uint32_t>(rest + 127) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// s = 1 / (1 + e^-x), and 1 − s without cancellation for s near 1.
inline float sigmoid(float x, float& rest) {
  const float e = exponential(-x), s = 1.0f / (1.0f + e);
  rest = x > 0.0f ? e * s : 1.0f - s;
  return s;
}

// Φ(x), the normal CDF, with small relative error in the tail: Φ(−a) = e^(−a²/2) t P(t), t = 1 / (1 + 0.35 a), with P
// fitted to 3.2e-8 for a from 0 to 14. `density` is set to e^(−x²/2).
inline float normal(float x, float& density) {
  const float a = x < 0.0f ? -x : x;
  const float t = 1.0f / (1.0f + 0.35f * a);
  float p = -2.9145939427e-02f;
  p = p * t + 1.4397174161e-01f;
  p = p * t - 2.5571434357e-01f;
  p = p * t + 1.5917426108e-01f;
  p = p * t - 2.3109903920e-02f;
  p = p * t + 1.0550803306e-01f;
  p = p * t + 1.1983286029e-01f;
  p = p * t + 1.3986187069e-01f;
  p = p * t + 1.3962140424e-01f;
  density = exponential(-0.5f * a * a);
  const float tail = density * t * p;
  return x < 0.0f ? tail : 1.0f - tail;
}

template <int64_t ACTIVATION>
inline float activate(float g) {
  float density;
  // ½ (1 + tanh z) is the sigmoid of 2z, which neither cancels nor saturates early.
  if constexpr (ACTIVATION == GELU_TANH) return g / (1.0f + exponential(g * (-1.59576912f - 0.0713548163f * g * g)));
  if constexpr (ACTIVATION == GELU) return g * normal(g, density);
  if constexpr (ACTIVATION == SILU) return g / (1.0f + exponential(-g));
  if constexpr (ACTIVATION == RELU) return g <= 0.0f ? 0.0f : g;
  if constexpr (ACTIVATION == SIGMOID) return sigmoid(g);
  return g;
}

// act(g), and its derivative.
template <int64_t ACTIVATION>
inline float activate(float g, float& slope) {
  if constexpr (ACTIVATION == GELU_TANH) {
    float rest;
    const float s = sigmoid(g * (1.59576912f + 0.0713548163f * g * g), rest), a = g * s;
    slope = s + a * rest * (1.59576912f + 0.214064449f * g * g);
    return a;
  } else if constexpr (ACTIVATION == GELU) {
    float density;
    const float s = normal(g, density);
    slope = s + g * (0.398942280f * density);
    return g * s;
  } else if constexpr (ACTIVATION == SILU) {
    float rest;
    const float s = sigmoid(g, rest);
    slope = s * (1.0f + g * rest);
    return g * s;
  } else if constexpr (ACTIVATION == RELU) {
    slope = 1.0f;  // for g > 0: gradient_unit handles the rest
    return g <= 0.0f ? 0.0f : g;
  } else if constexpr (ACTIVATION == SIGMOID) {
    const float s = sigmoid(g);
    slope = s * (1.0f - s);
    return s;
  } else {
    slope = 1.0f;
    return g;
  }
}

// --- Blocks of a row --------------------------------------------------------------------------------------------------

template <class T>
inline void load(const T* x, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = widen(x[i]);
}

template <class T>
inline void store(const float* x, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) narrow(x[i], to[i]);
}

// Compilers vectorize the loops above, but do not find the instructions that convert float16.
inline void load(const Fp16* x, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, Elements<Fp16, LANES>::get(x + i));
  for (; i < n; ++i) store(to + i, Elements<Fp16, 1>::get(x + i));
}

inline void store(const float* x, int64_t n, Fp16* to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) Elements<Fp16, LANES>::put(to + i, load<Lanes<LANES>::F>(x + i));
  for (; i < n; ++i) Elements<Fp16, 1>::put(to + i, load<Lanes<1>::F>(x + i));
}

struct Work {
  const Call& call;
  int64_t row_units, column_units;
  std::atomic<int64_t> next{0};
};

template <class T, int64_t ACTIVATION>
void forward_unit(const Call& call, int64_t first, int64_t last, int64_t left, int64_t right, int64_t) {
  float u[BLOCK], g[BLOCK];
  for (int64_t row = first; row < last; ++row) {
    const T* us = static_cast<const T*>(call.u) + row * call.stride_preact;
    const T* gs = static_cast<const T*>(call.g) + row * call.stride_preact;
    T* ys = static_cast<T*>(call.y) + row * call.stride_y;
    for (int64_t column = left; column < right; column += BLOCK) {
      const int64_t n = std::min(BLOCK, right - column);
      load(us + column, n, u);
      load(gs + column, n, g);
      for (int64_t i = 0; i < n; ++i) u[i] *= activate<ACTIVATION>(g[i]);
      store(u, n, ys + column);
    }
  }
}

template <class T, int64_t ACTIVATION>
void gradient_unit(const Call& call, int64_t first, int64_t last, int64_t left, int64_t right, int64_t unit) {
  float u[BLOCK], g[BLOCK], dy[BLOCK], y[BLOCK], du_sum[COLUMNS] = {}, dg_sum[COLUMNS] = {};
  for (int64_t row = first; row < last; ++row) {
    const T* us = static_cast<const T*>(call.u) + row * call.stride_preact;
    const T* gs = static_cast<const T*>(call.g) + row * call.stride_preact;
    const T* dys = static_cast<const T*>(call.dy) + row * call.stride_dy;
    T* dus = static_cast<T*>(call.du) + row * call.stride_dpreact;
    T* dgs = static_cast<T*>(call.dg) + row * call.stride_dpreact;
    for (int64_t column = left; column < right; column += BLOCK) {
      const int64_t n = std::min(BLOCK, right - column);
      load(us + column, n, u);
      load(gs + column, n, g);
      load(dys + column, n, dy);
      for (int64_t i = 0; i < n; ++i) {
        float slope;
        const float a = activate<ACTIVATION>(g[i], slope);
        float dg = dy[i] * u[i] * slope;
        if constexpr (ACTIVATION == RELU) dg = g[i] <= 0.0f ? 0.0f : dg;
        y[i] = u[i] * a;
        u[i] = dy[i] * a;
        g[i] = dg;
      }
      store(u, n, dus + column);
      store(g, n, dgs + column);
      if (call.y) store(y, n, static_cast<T*>(call.y) + row * call.stride_y + column);
      if (call.sums)
        for (int64_t i = 0; i < n; ++i) {
          du_sum[column - left + i] += u[i];
          dg_sum[column - left + i] += g[i];
        }
    }
  }
  if (call.sums) {
    float* sums = call.sums + unit * 2 * call.columns;
    std::copy_n(du_sum, right - left, sums + left);
    std::copy_n(dg_sum, right - left, sums + call.columns + left);
  }
}

using Unit = void (*)(const Call&, int64_t, int64_t, int64_t, int64_t, int64_t);

template <class T, int64_t ACTIVATION>
Unit choose(const Call& call) {
  return call.dy ? gradient_unit<T, ACTIVATION> : forward_unit<T, ACTIVATION>;
}

template <class T>
Unit choose(const Call& call) {
  switch (call.activation) {
    case GELU_TANH: return choose<T, GELU_TANH>(call);
    case GELU: return choose<T, GELU>(call);
    case SILU: return choose<T, SILU>(call);
    case RELU: return choose<T, RELU>(call);
    case SIGMOID: return choose<T, SIGMOID>(call);
    default: return choose<T, IDENTITY>(call);
  }
}

void run_thread(void* pointer) {
  Work& work = *static_cast<Work*>(pointer);
  const Call& call = work.call;
  const Unit unit = call.kind == FLOAT32 ? choose<float>(call) : call.kind == BFLOAT16 ? choose<Bf16>(call) : choose<Fp16>(call);
  const int64_t units = work.row_units * work.column_units;
  for (int64_t i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < units;) {
    const int64_t row = i / work.column_units, column = i % work.column_units;
    unit(call, row * ROWS, std::min(call.rows, (row + 1) * ROWS), column * COLUMNS,
         std::min(call.columns, (column + 1) * COLUMNS), row);
  }
}

}  // namespace

// Forward if there is no dy, else backward.
extern "C" __attribute__((visibility("default"))) void fusewise_gate(const Call* call) noexcept {
  Work work{*call, (call->rows + ROWS - 1) / ROWS, (call->columns + COLUMNS - 1) / COLUMNS};
  const int64_t units = work.row_units * work.column_units;
  const int64_t useful = std::max<int64_t>(1, call->rows * call->columns / THREAD_ELEMENTS);
  const int64_t threads = std::max<int64_t>(1, std::min({call->threads, units, useful}));
  in_threads(run_thread, &work, threads, call->parallel);
}
