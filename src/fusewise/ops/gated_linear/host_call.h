// The arguments that the functions of host.cpp accept. All checks are here; what is accepted is known to be valid.

#pragma once

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string_view>

#include "../../_shared/operators.h"
#include "_cpu/gate.h"

namespace {

// The characters of a str; empty for any other object, and for what has no UTF-8.
std::string_view text(PyObject* given) {
  if (!PyUnicode_CheckExact(given)) return {};
  Py_ssize_t size = 0;
  const char* const start = PyUnicode_AsUTF8AndSize(given, &size);
  if (start == nullptr) return PyErr_Clear(), std::string_view();
  return {start, size_t(size)};
}

// The arguments of `gated_linear`, in order.
enum Argument { X, WEIGHT, BIAS, ACTIVATION, W_GATE, B_GATE, LAYOUT, GATE_FIRST, SAVE, IMPL, COUNT };
// Those of the operators `gated_linear` and `gated_linear_preact`, and of `gated_linear_grad`.
enum Operand { OP_X, OP_WEIGHT, OP_W_GATE, OP_BIAS, OP_B_GATE, OP_SPEC, OP_IMPL, OPERANDS };
enum OfGradient { GRAD_DY, GRAD_PREACT, GRAD_SPEC, GRAD_IMPL, GRAD_BIAS, OF_GRADIENT };

// Shape legend: D features in, F = `hidden` features out.
struct Arguments {
  const Tensor *x = nullptr, *weight = nullptr, *bias = nullptr, *w_gate = nullptr, *b_gate = nullptr;
  int64_t hidden = 0, kind = 0, activation = 0;
  bool gate_first = false, by_choice = false;  // impl="auto"
  bool apart = false;                          // two weights: their pre-activations are two matrices

  bool read(PyObject* const* given) {
    gate_first = given[GATE_FIRST] == Py_True;
    const std::string_view save = text(given[SAVE]);
    return no_active_modes() && tensors(given[X], given[WEIGHT], given[W_GATE], given[BIAS], given[B_GATE]) &&
           (gate_first || given[GATE_FIRST] == Py_False) && text(given[LAYOUT]) == "stacked" && (save == "preact" || save == "input") &&
           options(text(given[ACTIVATION]), text(given[IMPL])) && shapes();
  }

  // Those of an operator: x is a matrix, and whether gradients are recorded is decided.
  bool read(const IValue* given) {
    return no_active_modes() && tensors(given[OP_X], given[OP_WEIGHT], given[OP_W_GATE], given[OP_BIAS], given[OP_B_GATE]) &&
           x->dim() == 2 && options(given[OP_SPEC], given[OP_IMPL]) && apart == (w_gate != nullptr) && shapes();
  }

  // Those of `gated_linear_grad`: dy has the place of x, and there are no weights.
  bool read_gradient(const IValue* given) {
    if (!no_active_modes() || !plain(given[GRAD_DY], x) || !has_kind() || !options(given[GRAD_SPEC], given[GRAD_IMPL])) return false;
    if (x->dim() != 2 || x->numel() == 0 || x->stride(1) != 1) return false;
    hidden = x->size(1);
    return true;
  }

  bool on_gpu() const { return !x->is_cpu(); }
  int64_t rows() const { return x->numel() / x->size(-1); }

 private:
  // Of an operator, whose `spec` is activation/layout/order.
  bool options(const IValue& spec, const IValue& impl) {
    const std::string_view text = spec.toStringView();
    const size_t first = text.find('/'), last = text.rfind('/');
    const std::string_view layout = text.substr(first + 1, last - first - 1), order = text.substr(last + 1);
    gate_first = order == "gate_first", apart = layout == "separate";
    return (gate_first || order == "value_first") && (apart || layout == "stacked") &&
           options(text.substr(0, first), impl.toStringView());
  }

  bool options(std::string_view name, std::string_view impl) {
    constexpr std::string_view NAMES[] = {"gelu_tanh", "gelu", "silu", "relu", "sigmoid", "identity"};  // as in Activation
    const auto found = std::find(std::begin(NAMES), std::end(NAMES), name);
    activation = found - NAMES, by_choice = impl == "auto";
    return found != std::end(NAMES) && (by_choice || impl == (on_gpu() ? "cuda" : "cpu"));
  }

  template <typename T>
  bool tensors(const T& of_x, const T& of_weight, const T& of_gate, const T& of_bias, const T& of_gate_bias) {
    if (!plain(of_x, x) || !plain(of_weight, weight)) return false;
    if (!optional(of_gate, w_gate) || !optional(of_bias, bias) || !optional(of_gate_bias, b_gate)) return false;
    return has_kind();
  }

  // Whether the dtype is supported, which autocast would leave as it is.
  bool has_kind() {
    if (!c10::impl::tls_is_dispatch_key_excluded(on_gpu() ? DispatchKey::AutocastCUDA : DispatchKey::AutocastCPU)) return false;
    const at::ScalarType dtype = x->scalar_type();
    kind = dtype == at::kFloat ? FLOAT32 : dtype == at::kBFloat16 ? BFLOAT16 : FLOAT16;
    return dtype == at::kBFloat16 || dtype == at::kHalf || (dtype == at::kFloat && !on_gpu());
  }

  bool optional(PyObject* given, const Tensor*& to) { return given == Py_None || plain(given, to); }
  bool optional(const IValue& given, const Tensor*& to) { return given.isNone() || plain(given, to); }

  bool plain(PyObject* given, const Tensor*& to) {
    if (!THPVariable_CheckExact(given)) return false;
    to = &THPVariable_Unpack(given);
    return fits(*to) && !(to->requires_grad() && at::GradMode::is_enabled());
  }
  bool plain(const IValue& given, const Tensor*& to) {
    to = &given.toTensor();
    return to->defined() && fits(*to);
  }
  bool fits(const Tensor& t) const { return dense(t) && t.device() == x->device() && t.scalar_type() == x->scalar_type(); }

  bool shapes() {
    if (x->dim() == 0 || x->numel() == 0) return false;
    if (!(x->dim() == 2 ? x->stride(1) == 1 : x->is_contiguous())) return false;
    if (!matrix(*weight) || (bias == nullptr ? b_gate != nullptr : (b_gate != nullptr) != (w_gate != nullptr))) return false;
    hidden = weight->size(0);
    apart = w_gate != nullptr;
    if (apart) {
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
    if (!plain(given[0], upstream) || !plain(given[1], preact) || !kept(a)) return false;
    const int64_t rows = a.rows(), hidden = a.hidden;
    int64_t columns = hidden, widest = 2 * a.x->size(-1);
    if (behind_down) {
      if (!plain(given[9], w_down) || w_down->dim() != 2 || w_down->size(1) != hidden || w_down->stride(1) != 1) return false;
      columns = w_down->size(0), widest = std::max(widest, columns);
    }
    multiplications = rows * hidden * widest;
    return upstream->dim() == 2 && upstream->size(0) == rows && upstream->size(1) == columns && upstream->stride(1) == 1;
  }

  // What `gated_linear_grad` is asked for, where dy is x.
  bool read_gradient(const IValue* given, const Arguments& a) {
    upstream = a.x, preact = &given[GRAD_PREACT].toTensor(), bias = given[GRAD_BIAS].toBool();
    return preact->defined() && dense(*preact) && preact->device() == a.x->device() && preact->scalar_type() == a.x->scalar_type() &&
           kept(a);
  }

 private:
  // Whether the pre-activations are as the forward makes them.
  bool kept(const Arguments& a) const {
    return preact->is_contiguous() && preact->dim() == (a.apart ? 3 : 2) && preact->numel() == 2 * a.rows() * a.hidden;
  }
};

// What a function computes: y; y and both pre-activations; the gradients; those behind a down projection; only that of the
// pre-activations. As in `_host.py`.
enum Job { ONLY_Y, KEEPING, BACKWARD, MLP_BACKWARD, GRADIENT };
constexpr Py_ssize_t BEFORE[] = {0, 0, 7, 10};  // values of `Wanted` before the arguments of the call

}  // namespace
