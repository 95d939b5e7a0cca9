// The arguments of a call that host.cpp accepts. All checks are here; an accepted call is known to be valid.

#pragma once

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "../../_shared/host.h"
#include "_cpu/gate.h"

namespace {

bool is(PyObject* given, const char* text) {
  return PyUnicode_CheckExact(given) && PyUnicode_CompareWithASCIIString(given, text) == 0;
}

// The arguments of `gated_linear`, in order.
enum Argument { X, WEIGHT, BIAS, ACTIVATION, W_GATE, B_GATE, LAYOUT, GATE_FIRST, SAVE, IMPL, COUNT };

// Shape legend: D features in, F = `hidden` features out.
struct Arguments {
  const Tensor *x = nullptr, *weight = nullptr, *bias = nullptr, *w_gate = nullptr, *b_gate = nullptr;
  int64_t hidden = 0, kind = 0, activation = 0;
  bool gate_first = false, by_choice = false;  // impl="auto"

  bool read(PyObject* const* given) { return no_active_modes() && tensors(given) && options(given) && shapes(); }

  bool on_gpu() const { return !x->is_cpu(); }
  int64_t rows() const { return x->numel() / x->size(-1); }

 private:
  bool options(PyObject* const* given) {
    constexpr const char* NAMES[] = {"gelu_tanh", "gelu", "silu", "relu", "sigmoid", "identity"};  // as in Activation
    const auto name = std::find_if(std::begin(NAMES), std::end(NAMES), [&](auto text) { return is(given[ACTIVATION], text); });
    activation = name - NAMES;
    gate_first = given[GATE_FIRST] == Py_True, by_choice = is(given[IMPL], "auto");
    return name != std::end(NAMES) && is(given[LAYOUT], "stacked") && (gate_first || given[GATE_FIRST] == Py_False) &&
           (is(given[SAVE], "preact") || is(given[SAVE], "input")) && (by_choice || is(given[IMPL], on_gpu() ? "cuda" : "cpu"));
  }

  bool tensors(PyObject* const* given) {
    if (!plain(given[X], x) || !plain(given[WEIGHT], weight)) return false;
    if (given[BIAS] != Py_None && !plain(given[BIAS], bias)) return false;
    if (given[W_GATE] != Py_None && !plain(given[W_GATE], w_gate)) return false;
    if (given[B_GATE] != Py_None && !plain(given[B_GATE], b_gate)) return false;
    if (!c10::impl::tls_is_dispatch_key_excluded(on_gpu() ? DispatchKey::AutocastCUDA : DispatchKey::AutocastCPU)) return false;
    const at::ScalarType dtype = x->scalar_type();
    kind = dtype == at::kFloat ? FLOAT32 : dtype == at::kBFloat16 ? BFLOAT16 : FLOAT16;
    return dtype == at::kBFloat16 || dtype == at::kHalf || (dtype == at::kFloat && !on_gpu());
  }

  bool plain(PyObject* object, const Tensor*& to) {
    if (!THPVariable_CheckExact(object)) return false;
    to = &THPVariable_Unpack(object);
    return dense(*to) && to->device() == x->device() && to->scalar_type() == x->scalar_type() &&
           !(to->requires_grad() && at::GradMode::is_enabled());
  }

  bool shapes() {
    if (x->dim() == 0 || x->numel() == 0) return false;
    if (!(x->dim() == 2 ? x->stride(1) == 1 : x->is_contiguous())) return false;
    if (!matrix(*weight) || (bias == nullptr ? b_gate != nullptr : (b_gate != nullptr) != (w_gate != nullptr))) return false;
    hidden = weight->size(0);
    if (w_gate != nullptr) {
      gate_first = false;
      return matrix(*w_gate) && w_gate->size(0) == hidden && vector(bias) && vector(b_gate);
    }
    if (hidden % 2 != 0 || !vector(bias)) return false;
    hidden /= 2;
    return true;
  }

  bool matrix(const Tensor& w) const {
    return w.dim() == 2 && w.size(1) == x->size(-1) && w.stride(1) == 1 && w.size(0) > 0;
  }
  bool vector(const Tensor* b) const {
    return b == nullptr || (b->dim() == 1 && b->size(0) == hidden && b->is_contiguous());
  }
};

}  // namespace
