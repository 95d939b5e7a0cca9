// Host fast path: an inference call of `geglu_linear` or `gated_linear` goes from its arguments to the kernels without running
// Python. On a CPU these are the products and the gate of `_cpu`: 3 µs of host overhead per call instead of 30, and with cold
// caches 0.1 ms instead of 0.4. On a GPU it is the launch of `_cuda`: `host_gpu.h`. Of a call that records gradients the autograd
// function stays in Python (`_autograd.py`); on a CPU what it computes, forward and backward, is here, too.
//
// Supported are plain tensors of one dtype, one weight in layout "stacked" or two weights, without autograd, modes or transforms
// (`host_call.h`). Any other call returns None at once, without side effects, and the caller continues in Python (`api.py`), the
// only place that raises.

#define PY_SSIZE_T_CLEAN
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/record_function.h>
#include <pthread.h>

#include "host_gpu.h"

namespace {

void (*run)(const Call*) = nullptr;  // `fusewise_gate` of gate.cpp, or null if there is none
decltype(Call::parallel) parallel = nullptr;
bool onednn = false;  // whether oneDNN computes float32 products, see `_onednn.py`

// Rows [first, first + count) of a tensor.
Tensor part(const Tensor& x, int64_t first, int64_t count) {
  return count == x.size(0) ? x : x.narrow(0, first, count);
}

// `takes` and `linear` of _onednn.py, for operands that are not transposed.
bool takes(const Tensor& x, const Tensor& weight) {
  return onednn && x.scalar_type() == at::kFloat && x.is_contiguous() && weight.is_contiguous() &&
         x.numel() * weight.size(0) >= ONEDNN_WORTH && at::globalContext().userEnabledMkldnn();
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "");
  std::vector<c10::IValue> stack{x, weight, bias.defined() ? c10::IValue(bias) : c10::IValue(), "none",
                                 c10::List<std::optional<at::Scalar>>(), ""};
  op.callBoxed(stack);
  return stack[0].toTensor();
}

void product(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor to) {
  if (takes(x, weight)) to.copy_(linear(x, weight, bias));
  else if (bias.defined()) at::addmm_out(to, bias, x, weight.t());
  else at::mm_out(to, x, weight.t());
}

void gate(const Arguments& a, const Tensor& y, const Tensor& u, const Tensor& g) {
  const Call call{u.const_data_ptr(), g.const_data_ptr(), nullptr, y.mutable_data_ptr(), nullptr, nullptr, nullptr,
                  u.stride(0), 0, y.stride(0), 0, y.size(0), a.hidden, a.kind, a.activation, at::get_num_threads(), parallel};
  run(&call);
}

// Value's and gate's half of the weights and biases of a call.
struct Halves {
  Tensor value, gate, value_bias, gate_bias;
  explicit Halves(const Arguments& a) {
    const Tensor none, &bias = a.bias == nullptr ? none : *a.bias;
    if (a.w_gate != nullptr) {
      value = *a.weight, gate = *a.w_gate, value_bias = bias;
      if (a.b_gate != nullptr) gate_bias = *a.b_gate;
      return;
    }
    const auto half = [&](const Tensor& both, int64_t index) {
      return both.defined() ? both.narrow(0, index * a.hidden, a.hidden) : both;
    };
    value = half(*a.weight, a.gate_first), value_bias = half(bias, a.gate_first);
    gate = half(*a.weight, !a.gate_first), gate_bias = half(bias, !a.gate_first);
  }
};

// Rows of a chunk, of at most `rows`.
int64_t chunk_rows(int64_t rows, int64_t row_bytes) {
  return std::min(rows, std::max<int64_t>(CHUNK_ROWS, CHUNK_BYTES / row_bytes / ROW_MULTIPLE * ROW_MULTIPLE));
}

// Those of both pre-activations.
int64_t chunk_rows(const Arguments& a) { return chunk_rows(a.rows(), 2 * a.hidden * a.x->element_size()); }

// x (M, D).
Tensor matrix(const Arguments& a) { return a.x->dim() == 2 ? *a.x : a.x->view({a.rows(), a.x->size(-1)}); }

// y (M, F) with the leading dimensions of x.
Tensor shaped(const Arguments& a, const Tensor& y) {
  if (a.x->dim() == 2) return y;
  std::vector<int64_t> sizes = a.x->sizes().vec();
  sizes.back() = a.hidden;
  return y.view(sizes);
}

// y (M, F) of x (M, D), with the same chunks as `_cpu.forward`.
void forward(const Arguments& a, const Tensor& x, const Tensor& y) {
  const int64_t rows = x.size(0), hidden = a.hidden;
  const Tensor none, &bias = a.bias == nullptr ? none : *a.bias;
  if (a.w_gate == nullptr && rows <= FEW_ROWS) {
    Tensor preact;
    if (takes(x, *a.weight)) preact = linear(x, *a.weight, bias);
    else product(x, *a.weight, bias, preact = empty(x, {rows, 2 * hidden}, {2 * hidden, 1}));
    const Tensor first = preact.narrow(1, 0, hidden), second = preact.narrow(1, hidden, hidden);
    return a.gate_first ? gate(a, y, second, first) : gate(a, y, first, second);
  }
  const Halves half(a);
  const int64_t size = chunk_rows(a);
  Tensor scratch;
  for (int64_t row = 0; row < rows; row += size) {
    const int64_t count = std::min(size, rows - row);
    const Tensor from = part(x, row, count), u = part(y, row, count);
    if (takes(from, half.value) && takes(from, half.gate)) {
      gate(a, u, linear(from, half.value, half.value_bias), linear(from, half.gate, half.gate_bias));
      continue;
    }
    if (!scratch.defined()) scratch = empty(x, {size, hidden}, {hidden, 1});
    const Tensor g = part(scratch, 0, count);
    product(from, half.value, half.value_bias, u);
    product(from, half.gate, half.gate_bias, g);
    gate(a, u, u, g);
  }
}

// y for tensors on a CPU.
Tensor computed(const Arguments& a) {
  const GilReleased no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor y = empty(*a.x, {a.rows(), a.hidden}, {a.hidden, 1});
  forward(a, matrix(a), y);
  return shaped(a, y);
}

// u and g, (M, F) each, of both pre-activations: `split_preact`.
std::pair<Tensor, Tensor> split(const Arguments& a, const Tensor& preact) {
  if (a.w_gate != nullptr) return {preact.select(0, 0), preact.select(0, 1)};
  const auto half = [&](int64_t index) { return preact.narrow(1, index * a.hidden, a.hidden); };
  return {half(a.gate_first), half(!a.gate_first)};
}

// y and both pre-activations, which are in one tensor: `forward` of _chunks.py that keeps them.
std::pair<Tensor, Tensor> keeping(const Arguments& a) {
  const GilReleased no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t rows = a.rows(), hidden = a.hidden, size = chunk_rows(a);
  const Tensor x = matrix(a), y = empty(x, {rows, hidden}, {hidden, 1});
  const Tensor preact = a.w_gate == nullptr ? empty(x, {rows, 2 * hidden}, {2 * hidden, 1})
                                            : empty(x, {2, rows, hidden}, {rows * hidden, hidden, 1});
  const auto [u, g] = split(a, preact);
  for (int64_t row = 0; row < rows; row += size) {
    const int64_t count = std::min(size, rows - row);
    const Tensor from = part(x, row, count), value = part(u, row, count), of_gate = part(g, row, count);
    if (a.w_gate == nullptr) product(from, *a.weight, a.bias == nullptr ? Tensor() : *a.bias, part(preact, row, count));
    else {
      product(from, *a.weight, a.bias == nullptr ? Tensor() : *a.bias, value);
      product(from, *a.w_gate, a.b_gate == nullptr ? Tensor() : *a.b_gate, of_gate);
    }
    gate(a, part(y, row, count), value, of_gate);
  }
  return {shaped(a, y), preact};
}

// What a backward is asked for, besides the arguments of its call.
struct Wanted {
  const Tensor *upstream = nullptr, *preact = nullptr, *w_down = nullptr;  // dy; behind a down projection dz
  bool overwrite = false, x = false, weight = false, w_gate = false, bias = false, down = false, b_down = false;

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
    if (onednn && a.kind == FLOAT32 && rows * hidden * widest >= ONEDNN_WORTH) return false;  // its choices are Python's
    return upstream->dim() == 2 && upstream->size(0) == rows && upstream->size(1) == columns && upstream->stride(1) == 1;
  }
};

constexpr Py_ssize_t ALONE = 7, DOWN = 10;  // values before the arguments of a call

// dx, dW, dW of the gate, db, db of the gate, dW_down, db_down; undefined where not wanted.
using Gradients = std::array<Tensor, 7>;

// The gradient of both pre-activations from dy, which is in y where y is recomputed; and the sums of its columns (2, F), value first.
Tensor gate_gradient(const Arguments& a, const Wanted& wanted, const Tensor& dpreact, const Tensor& y) {
  const int64_t rows = a.rows(), hidden = a.hidden;
  const auto [u, g] = split(a, *wanted.preact);
  const auto [du, dg] = split(a, dpreact);
  Tensor sums;
  if (wanted.bias) {
    sums = empty(*a.x, {(rows + ROW_MULTIPLE - 1) / ROW_MULTIPLE, 2, hidden}, {2 * hidden, hidden, 1}, at::kFloat);
  }
  const int64_t row_bytes = hidden * a.x->element_size(), size = wanted.w_down == nullptr ? rows : chunk_rows(rows, row_bytes);
  for (int64_t row = 0; row < rows; row += size) {
    const auto of = [&](const Tensor& x) { return part(x, row, std::min(size, rows - row)); };
    const Tensor dy = of(wanted.w_down == nullptr ? *wanted.upstream : y), before = of(u), gate = of(g);
    if (wanted.w_down != nullptr) {
      Tensor to = dy;
      at::mm_out(to, of(*wanted.upstream), *wanted.w_down);
    }
    float* const partial = wanted.bias ? sums.mutable_data_ptr<float>() + row / ROW_MULTIPLE * 2 * hidden : nullptr;
    const Call call{before.const_data_ptr(), gate.const_data_ptr(), dy.const_data_ptr(),
                    wanted.w_down == nullptr ? nullptr : dy.mutable_data_ptr(), of(du).mutable_data_ptr(), of(dg).mutable_data_ptr(),
                    partial, u.stride(0), dy.stride(0), wanted.w_down == nullptr ? 0 : dy.stride(0), du.stride(0), dy.size(0), hidden,
                    a.kind, a.activation, at::get_num_threads(), parallel};
    run(&call);
  }
  return wanted.bias ? at::sum(sums, at::IntArrayRef{0}) : sums;
}

Gradients backward(const Arguments& a, const Wanted& wanted) {
  const GilReleased no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool apart = a.w_gate != nullptr;
  if (wanted.overwrite) wanted.preact->unsafeGetTensorImpl()->bump_version();  // `overwritten` of _autograd.py
  const Tensor x = matrix(a), dpreact = wanted.overwrite ? *wanted.preact : at::empty_like(*wanted.preact);
  Tensor y = wanted.w_down == nullptr ? Tensor() : empty(x, {a.rows(), a.hidden}, {a.hidden, 1});
  const Tensor sum = gate_gradient(a, wanted, dpreact, y);
  const auto [du, dg] = split(a, dpreact);
  Gradients found;
  auto& [dx, dweight, dgate, db, db_gate, ddown, db_down] = found;
  if (wanted.down) ddown = at::mm(wanted.upstream->t(), y);
  y.reset();  // before the other gradients are allocated
  if (wanted.b_down) db_down = at::sum(*wanted.upstream, at::IntArrayRef{0});
  if (wanted.x) {
    dx = at::mm(apart ? du : dpreact, *a.weight);
    if (apart) dx.addmm_(dg, *a.w_gate);
    dx = dx.view(a.x->sizes());
  }
  if (wanted.weight) dweight = at::mm((apart ? du : dpreact).t(), x);
  if (wanted.w_gate) dgate = at::mm(dg.t(), x);
  if (wanted.bias) {
    const Tensor both = sum.to(x.scalar_type());  // value first
    if (apart) db = both.select(0, 0), db_gate = both.select(0, 1);
    else db = (a.gate_first ? both.flip({0}) : both).view({2 * a.hidden});
  }
  return found;
}

void all(Py_ssize_t count) {
  TORCH_CHECK_TYPE(count == COUNT, "gated_linear: the host function must have ", int(COUNT), " arguments, got ", count);
}

PyObject* gated_linear(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  all(count);
  Arguments a;
  if (!a.read(given)) Py_RETURN_NONE;
  const auto recorded = [&](const auto& make) {
    RECORD_FUNCTION("fusewise::gated_linear", (std::vector<c10::IValue>{*a.x}));  // as Python's operator shows in profiles
    return THPVariable_Wrap(make());
  };
  if (!a.on_gpu()) {
    if (run == nullptr) Py_RETURN_NONE;
    return recorded([&] { return computed(a); });
  }
  const gpu::Operands operands(a);
  const gpu::Choice* const found = gpu::find(a, operands);
  if (found == nullptr || found->run == nullptr) Py_RETURN_NONE;
  return recorded([&, choice = *found] { return gpu::launched(a, operands, choice); });
  END_HANDLE_TH_ERRORS
}

// kept(the arguments of a call): y and both pre-activations.
PyObject* kept(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  all(count);
  Arguments a;
  if (!a.read(given) || a.on_gpu() || run == nullptr) Py_RETURN_NONE;
  RECORD_FUNCTION("fusewise::gated_linear_preact", (std::vector<c10::IValue>{*a.x}));
  const auto [y, preact] = keeping(a);
  return Py_BuildValue("NN", THPVariable_Wrap(y), THPVariable_Wrap(preact));
  END_HANDLE_TH_ERRORS
}

PyObject* gradients_of(PyObject* const* given, Py_ssize_t count, Py_ssize_t before, const char* name) {
  HANDLE_TH_ERRORS
  all(count - before);
  Arguments a;
  Wanted wanted;
  if (!a.read(given + before) || a.on_gpu() || run == nullptr || !wanted.read(given, before == DOWN, a)) Py_RETURN_NONE;
  RECORD_FUNCTION(name, (std::vector<c10::IValue>{*wanted.upstream}));
  const Gradients found = backward(a, wanted);
  const Py_ssize_t those = before == DOWN ? 7 : 5;
  PyObject* const tuple = PyTuple_New(those);
  for (Py_ssize_t i = 0; i < those; ++i) PyTuple_SET_ITEM(tuple, i, THPVariable_Wrap(found[i]));  // None where undefined
  return tuple;
  END_HANDLE_TH_ERRORS
}

// gradients(dy, both pre-activations, whether to overwrite them, whether the gradients of x, weight, w_gate and the biases are wanted,
// the arguments of the call): a tuple of those of x, weight, w_gate, bias and b_gate.
PyObject* gradients(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return gradients_of(given, count, ALONE, "fusewise::gated_linear_grad");
}

// The same behind a down projection: mlp_gradients(dz, …, whether those of w_down and b_down are wanted, w_down, the arguments of the
// unit's call): a tuple that ends with those of w_down and b_down.
PyObject* mlp_gradients(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return gradients_of(given, count, DOWN, "fusewise::gated_linear_down_grad");
}

// new(the arguments of a call): whether it is a GPU call that can be cached and is not cached yet.
PyObject* is_new(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  all(count);
  Arguments a;
  if (!a.read(given) || !a.on_gpu()) Py_RETURN_FALSE;
  const gpu::Operands operands(a);
  return PyBool_FromLong(operands.describable(a) && gpu::find(a, operands) == nullptr);
  END_HANDLE_TH_ERRORS
}

// remember(the arguments of a call, entry point, function that explains its error codes, epilogue, width); all 0: Python serves it.
PyObject* remember(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject* arguments = nullptr;
  unsigned long long run = 0, explain = 0;
  long long epilogue = 0, width = 0;
  if (!PyArg_ParseTuple(given, "O!KKLL", &PyTuple_Type, &arguments, &run, &explain, &epilogue, &width)) return nullptr;
  all(PyTuple_GET_SIZE(arguments));
  Arguments a;
  if (!a.read(&PyTuple_GET_ITEM(arguments, 0)) || !a.on_gpu()) Py_RETURN_FALSE;
  if (gpu::choices.size() >= gpu::MOST) gpu::choices.clear();
  gpu::choices[gpu::Operands(a).key(a)] = {reinterpret_cast<decltype(gpu::Choice::run)>(run),
                                           reinterpret_cast<decltype(gpu::Choice::explain)>(explain), epilogue, width};
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// on_cpu(entry point of the gate, GOMP_parallel or 0, whether oneDNN computes float32 products).
PyObject* on_cpu(PyObject*, PyObject* given) {
  unsigned long long entry = 0, threads = 0;
  int by_onednn = 0;
  if (!PyArg_ParseTuple(given, "KKp", &entry, &threads, &by_onednn)) return nullptr;
  onednn = by_onednn;
  run = reinterpret_cast<decltype(run)>(entry), parallel = reinterpret_cast<decltype(parallel)>(threads);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"gated_linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(gated_linear)), METH_FASTCALL, nullptr},
    {"kept", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(kept)), METH_FASTCALL, nullptr},
    {"gradients", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(gradients)), METH_FASTCALL, nullptr},
    {"mlp_gradients", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(mlp_gradients)), METH_FASTCALL, nullptr},
    {"new", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(is_new)), METH_FASTCALL, nullptr},
    {"remember", remember, METH_VARARGS, nullptr},
    {"on_cpu", on_cpu, METH_VARARGS, nullptr},
    {"quick", quick, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "fusewise_gated_host", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* fusewise_gated_host() {
  pthread_atfork(nullptr, nullptr, [] { parallel = nullptr, onednn = false; });  // a forked child has no OpenMP threads of its parent
  return PyModule_Create(&definition);
}
