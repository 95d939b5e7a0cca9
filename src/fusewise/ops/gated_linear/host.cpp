// A call of `geglu_linear` or `gated_linear` that makes y alone, on a CPU: from Python's arguments to the products and the
// gate of `_cpu` without Python between. That is 3 µs of the host a call instead of 30, and with cold caches 0.1 ms instead
// of 0.4.
//
// What is taken is checked here and is right for certain: plain tensors of one dtype, one weight in layout "stacked" or two,
// and nobody to record a gradient or to watch. Everything else is answered with None, at once and with nothing changed, and
// the caller goes on in Python (`api.py`), the one place that raises. So nothing is kept from call to call.

#define PY_SSIZE_T_CLEAN
#include "../../_shared/host.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>
#include <pthread.h>

#include <algorithm>

#include "_cpu/gate.h"

namespace {

void (*run)(const Call*) = nullptr;  // `fusewise_gate` of gate.cpp
decltype(Call::parallel) parallel = nullptr;

bool is(PyObject* given, const char* text) {
  return PyUnicode_CheckExact(given) && PyUnicode_CompareWithASCIIString(given, text) == 0;
}

// The arguments of `gated_linear`, in its order.
enum Argument { X, WEIGHT, BIAS, ACTIVATION, W_GATE, B_GATE, LAYOUT, GATE_FIRST, SAVE, IMPL, COUNT };

// Shape legend: D features in, F = `hidden` features out.
struct Arguments {
  const Tensor *x = nullptr, *weight = nullptr, *bias = nullptr, *w_gate = nullptr, *b_gate = nullptr;
  int64_t hidden = 0, kind = 0, activation = 0;
  bool gate_first = false;

  bool read(PyObject* const* given) {
    if (!nobody_watches() || !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::AutocastCPU)) return false;
    return options(given) && tensors(given) && shapes();
  }

 private:
  bool options(PyObject* const* given) {
    constexpr const char* NAMES[] = {"gelu_tanh", "gelu", "silu", "relu", "sigmoid", "identity"};  // as in Activation
    const auto name = std::find_if(std::begin(NAMES), std::end(NAMES), [&](auto text) { return is(given[ACTIVATION], text); });
    activation = name - NAMES;
    gate_first = given[GATE_FIRST] == Py_True;
    return name != std::end(NAMES) && is(given[LAYOUT], "stacked") && (gate_first || given[GATE_FIRST] == Py_False) &&
           (is(given[SAVE], "preact") || is(given[SAVE], "input")) && (is(given[IMPL], "auto") || is(given[IMPL], "cpu"));
  }

  bool tensors(PyObject* const* given) {
    if (!plain(given[X], x) || !plain(given[WEIGHT], weight)) return false;
    if (given[BIAS] != Py_None && !plain(given[BIAS], bias)) return false;
    if (given[W_GATE] != Py_None && !plain(given[W_GATE], w_gate)) return false;
    if (given[B_GATE] != Py_None && !plain(given[B_GATE], b_gate)) return false;
    const at::ScalarType dtype = x->scalar_type();
    kind = dtype == at::kFloat ? FLOAT32 : dtype == at::kBFloat16 ? BFLOAT16 : FLOAT16;
    return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  }

  bool plain(PyObject* object, const Tensor*& to) {
    if (!THPVariable_CheckExact(object)) return false;
    to = &THPVariable_Unpack(object);
    return dense(*to) && to->is_cpu() && to->scalar_type() == x->scalar_type() &&
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

// Rows of a tensor, or entries.
Tensor part(const Tensor& x, int64_t first, int64_t count) {
  return count == x.size(0) ? x : x.narrow(0, first, count);
}

void product(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor to) {
  if (bias.defined()) at::addmm_out(to, bias, x, weight.t());
  else at::mm_out(to, x, weight.t());
}

void gate(const Arguments& a, const Tensor& y, const Tensor& u, const Tensor& g) {
  const Call call{u.const_data_ptr(), g.const_data_ptr(), nullptr, y.mutable_data_ptr(), nullptr, nullptr, nullptr,
                  u.stride(0), 0, y.stride(0), 0, y.size(0), a.hidden, a.kind, a.activation, at::get_num_threads(), parallel};
  run(&call);
}

// y (M, F) as `_cpu.forward` makes it of x (M, D), chunk for chunk.
void forward(const Arguments& a, const Tensor& x, const Tensor& y) {
  const int64_t rows = x.size(0), hidden = a.hidden;
  const Tensor none, &bias = a.bias == nullptr ? none : *a.bias;
  if (a.w_gate == nullptr && rows <= FEW_ROWS) {
    const Tensor preact = empty(x, {rows, 2 * hidden}, {2 * hidden, 1});
    product(x, *a.weight, bias, preact);
    const Tensor first = preact.narrow(1, 0, hidden), second = preact.narrow(1, hidden, hidden);
    return a.gate_first ? gate(a, y, second, first) : gate(a, y, first, second);
  }
  const auto half = [&](const Tensor& both, int64_t index) {
    return both.defined() ? both.narrow(0, index * hidden, hidden) : both;
  };
  Tensor value = *a.weight, of_gate, value_bias = bias, gate_bias;
  if (a.w_gate != nullptr) {
    of_gate = *a.w_gate;
    if (a.b_gate != nullptr) gate_bias = *a.b_gate;
  } else {
    of_gate = half(value, !a.gate_first), gate_bias = half(bias, !a.gate_first);
    value = half(value, a.gate_first), value_bias = half(bias, a.gate_first);
  }
  const int64_t row_bytes = 2 * hidden * x.element_size();
  const int64_t size = std::min(rows, std::max<int64_t>(CHUNK_ROWS, CHUNK_BYTES / row_bytes / ROW_MULTIPLE * ROW_MULTIPLE));
  const Tensor scratch = empty(x, {size, hidden}, {hidden, 1});
  for (int64_t row = 0; row < rows; row += size) {
    const int64_t count = std::min(size, rows - row);
    const Tensor from = part(x, row, count), u = part(y, row, count), g = part(scratch, 0, count);
    product(from, value, value_bias, u);
    product(from, of_gate, gate_bias, g);
    gate(a, u, u, g);
  }
}

PyObject* gated_linear(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == COUNT, "gated_linear: the host function must have ", int(COUNT), " arguments, got ", count);
  Arguments a;
  if (!a.read(given)) Py_RETURN_NONE;
  Tensor y;
  {
    const OthersGoOn while_this_lives;
    RECORD_FUNCTION("fusewise::gated_linear", (std::vector<c10::IValue>{*a.x}));  // as Python's
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const int64_t rows = a.x->numel() / a.x->size(-1);
    y = empty(*a.x, {rows, a.hidden}, {a.hidden, 1});
    if (a.x->dim() == 2) {
      forward(a, *a.x, y);
    } else {
      forward(a, a.x->view({rows, a.x->size(-1)}), y);
      std::vector<int64_t> sizes = a.x->sizes().vec();
      sizes.back() = a.hidden;
      y = y.view(sizes);
    }
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"gated_linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(gated_linear)), METH_FASTCALL, nullptr},
    {"quick", quick, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "fusewise_gated_host", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

// The module, made of the entry point of the gate and GOMP_parallel or null.
extern "C" __attribute__((visibility("default"))) PyObject* fusewise_gated_host(void* entry, void* threads) {
  run = reinterpret_cast<decltype(run)>(entry), parallel = reinterpret_cast<decltype(parallel)>(threads);
  pthread_atfork(nullptr, nullptr, [] { parallel = nullptr; });  // a child has none of the parent's OpenMP threads
  return PyModule_Create(&definition);
}
