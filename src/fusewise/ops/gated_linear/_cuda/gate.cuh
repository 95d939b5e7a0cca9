// Activations of the gate and their derivatives: the same formulas as `_gluon_gate.py`, for the same bits.

#pragma once

#include "instructions.cuh"

namespace {

enum Activation { GELU_TANH, GELU, SILU, RELU, SIGMOID, IDENTITY };

struct Gate {
  float value, slope;  // act(g), act'(g); the compiler drops what is unused
};

template <int ACTIVATION>
__device__ inline Gate gate(float g) {
  if constexpr (ACTIVATION == GELU_TANH) {
    // (1 + tanh z) / 2 is the sigmoid of 2z, which neither cancels nor saturates early.
    const float s = reciprocal(1.0f + exp2_fast(g * (-2.302208198144325f - 0.1029432396100769f * g * g))), a = g * s;
    return {a, s + a * (1.0f - s) * (1.5957691216057308f + 0.21406444881479645f * g * g)};
  } else if constexpr (ACTIVATION == GELU) {
    // The normal distribution below -|g| is exp(-g²/2) R(t), t = 1 / (1 + 0.3 |g|): a polynomial, within 8.3e-6 of R.
    const float e = exp2_fast(g * g * -0.7213475204444817f), t = reciprocal(1.0f + 0.3f * fabsf(g));
    float r = 0.21603712500373093f - 0.07709744549371036f * t;
    r = -0.01694814478679431f + r * t;
    r = 0.1441964174765832f + r * t;
    r = 0.11374191823647448f + r * t;
    r = (0.12007423271297478f + r * t) * t;
    const float below = e * r, s = g < 0.0f ? below : 1.0f - below;
    return {g * s, s + g * (0.3989422804014327f * e)};
  } else if constexpr (ACTIVATION == SILU) {
    const float s = reciprocal(1.0f + exp2_fast(g * -1.4426950408889634f)), a = g * s;
    return {a, s + (a - a * s)};
  } else if constexpr (ACTIVATION == RELU) {
    return {g <= 0.0f ? 0.0f : g, g <= 0.0f ? 0.0f : 1.0f};  // NaN stays
  } else if constexpr (ACTIVATION == SIGMOID) {
    const float s = reciprocal(1.0f + exp2_fast(g * -1.4426950408889634f));
    return {s, s - s * s};
  } else {
    return {g, 1.0f};
  }
}

struct Gradient {
  float u, g, gate;  // du, dg, act(g)
};

template <int ACTIVATION>
__device__ inline Gradient gate_gradient(float dy, float u, float g) {
  const Gate a = gate<ACTIVATION>(g);
  if constexpr (ACTIVATION == RELU) return {dy * a.value, g <= 0.0f ? 0.0f : dy * u, a.value};
  else if constexpr (ACTIVATION == IDENTITY) return {dy * a.value, dy * u, a.value};
  else return {dy * a.value, dy * u * a.slope, a.value};
}

}  // namespace
