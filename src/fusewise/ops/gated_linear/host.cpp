// Host fast path: an inference call of `geglu_linear` or `gated_linear` goes from its arguments to the kernels without running
// Python. On a CPU these are the products and the gate of `_cpu`: 3 µs of host overhead per call instead of 30, and with cold
// caches 0.1 ms instead of 0.4. On a GPU it is the launch of `_cuda`: `host_gpu.h`.
//
// Supported are plain tensors of one dtype, one weight in layout "stacked" or two weights, without autograd, modes or transforms
// (`host_call.h`). Any other call returns None at once, without side effects, and the caller continues in Python (`api.py`), the
// only place that raises.

#define PY_SSIZE_T_CLEAN
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
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
  Tensor scratch;
  for (int64_t row = 0; row < rows; row += size) {
    const int64_t count = std::min(size, rows - row);
    const Tensor from = part(x, row, count), u = part(y, row, count);
    if (takes(from, value) && takes(from, of_gate)) {
      gate(a, u, linear(from, value, value_bias), linear(from, of_gate, gate_bias));
      continue;
    }
    if (!scratch.defined()) scratch = empty(x, {size, hidden}, {hidden, 1});
    const Tensor g = part(scratch, 0, count);
    product(from, value, value_bias, u);
    product(from, of_gate, gate_bias, g);
    gate(a, u, u, g);
  }
}

// y for tensors on a CPU.
Tensor computed(const Arguments& a) {
  const GilReleased no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t rows = a.rows();
  Tensor y = empty(*a.x, {rows, a.hidden}, {a.hidden, 1});
  if (a.x->dim() == 2) {
    forward(a, *a.x, y);
    return y;
  }
  forward(a, a.x->view({rows, a.x->size(-1)}), y);
  std::vector<int64_t> sizes = a.x->sizes().vec();
  sizes.back() = a.hidden;
  return y.view(sizes);
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
