// The arguments that the functions of host.cpp accept. All checks are here; what is accepted is known to be valid.

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

// What a backward is asked for, besides the arguments of its call.
struct Wanted {
  const Tensor *upstream = nullptr, *preact = nullptr, *w_down = nullptr;  // dy; behind a down projection dz
  bool overwrite = false, x = false, weight = false, w_gate = false, bias = false, down = false, b_down = false;
  int64_t multiplications = 0;  // of the largest product, at most

  bool read(PyObject* const* given, bool behind_down, const Arguments& a) {
    bool* const flags[] = {&overwrite, &x, &weight, &w_gate, &bias, &down, &b_down};
    for (size_t i = 0; i < (behind_down ? 7 : 5); ++i) *flags[i] = given[2 + i] == Py_True;
    const auto plain = [&](PyObject* object, const Tensor*& to) {
      if (!THPVariable_CheckExact(object)) return false;
      to = &THPVariable_Unpack(object);
      return dense(*to) && to->device() == a.x->device() && to->scalar_type() == a.x->scalar_type() && !at::GradMode::is_enabled();
    };
    if (!plain(given[0], upstream) || !plain(given[1], preact) || !preact->is_contiguous()) return false;
    const int64_t rows = a.rows(), hidden = a.hidden;
    if (preact->dim() != (a.w_gate == nullptr ? 2 : 3) || preact->numel() != 2 * rows * hidden) return false;
    int64_t columns = hidden, widest = 2 * a.x->size(-1);
    if (behind_down) {
      if (!plain(given[9], w_down) || w_down->dim() != 2 || w_down->size(1) != hidden || w_down->stride(1) != 1) return false;
      columns = w_down->size(0), widest = std::max(widest, columns);
    }
    multiplications = rows * hidden * widest;
    return upstream->dim() == 2 && upstream->size(0) == rows && upstream->size(1) == columns && upstream->stride(1) == 1;
  }
};

// What a function computes: y; y and both pre-activations; the gradients; those behind a down projection. As in `_host.py`.
enum Job { ONLY_Y, KEEPING, BACKWARD, MLP_BACKWARD };
constexpr Py_ssize_t BEFORE[] = {0, 0, 7, 10};  // values of `Wanted` before the arguments of the call

}  // namespace
