// Host fast path: an inference call of `geglu_linear` or `gated_linear`, or a compiled graph's of their operators, goes from its
// arguments to the kernels without running Python. On a CPU these are the products and the gate of `_cpu`: 3 µs of host overhead per
// call instead of 30, and with cold caches 0.1 ms instead of 0.4. On a GPU it is the launch of `_cuda`: `host_gpu.h`. Of a call that
// records gradients the autograd functions stay in Python (`_autograd.py`, `_mlp.py`); what they compute, forward and backward, is
// here, too.
//
// Supported are plain tensors of one dtype, one weight in layout "stacked" or two weights, without modes or transforms
// (`host_call.h`); on a GPU once Python has served such a call. Any other call returns None at once, without side effects, and the
// caller continues in Python, the only place that raises.

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

std::atomic<void (*)(const Call*)> run{nullptr};  // `fusewise_gate` of gate.cpp, or null if there is none; set after the next two
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
  std::vector<IValue> stack{x, weight, bias.defined() ? IValue(bias) : IValue(), "none",
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
  run.load()(&call);
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

// What a function is asked for, and what computes it on a GPU.
struct Asked {
  const Job job;
  Arguments a{};
  Wanted wanted{};
  std::optional<gpu::Operands> operands{};  // on a GPU
  gpu::Choice choice{};                     // on a GPU, if it is served here
  std::vector<IValue> operator_arguments{};

  // Whether the arguments of the job's function are supported.
  bool read(PyObject* const* given, Py_ssize_t count) {
    if (job == GRADIENT) return read_gradient(given, count);
    const Py_ssize_t before = BEFORE[job], left = count - before;
    TORCH_CHECK_TYPE(left == COUNT, "gated_linear: the host function must have ", int(COUNT), " arguments, got ", left);
    if (!a.read(given + before) || (before > 0 && !wanted.read(given, job == MLP_BACKWARD, a))) return false;
    if (a.on_gpu()) operands.emplace(a, wanted);
    return true;
  }

  // Those of an operator for it.
  bool read(const IValue* given) {
    if (job == GRADIENT ? !a.read_gradient(given) || !wanted.read_gradient(given, a) : !a.read(given)) return false;
    if (a.on_gpu()) operands.emplace(a, wanted);
    return true;
  }

  // The same from Python: dy, the pre-activations, spec, impl, and whether sums are wanted.
  bool read_gradient(PyObject* const* given, Py_ssize_t count) {
    if (count != OF_GRADIENT || !THPVariable_CheckExact(given[GRAD_DY]) || !THPVariable_CheckExact(given[GRAD_PREACT])) return false;
    operator_arguments = {THPVariable_Unpack(given[GRAD_DY]), THPVariable_Unpack(given[GRAD_PREACT]), std::string(text(given[GRAD_SPEC])),
                          std::string(text(given[GRAD_IMPL])), given[GRAD_BIAS] == Py_True};
    return read(operator_arguments.data());
  }

  // Whether it is also served here, rather than by Python.
  bool served() {
    if (!a.on_gpu()) {  // which of a backward's products oneDNN computes is for Python to say
      return run != nullptr && !(onednn && a.kind == FLOAT32 && wanted.multiplications >= ONEDNN_WORTH);
    }
    const auto found = gpu::find(job, a, *operands);
    if (!found || found->run == nullptr) return false;
    choice = *found;
    return true;
  }
};

// y.
Tensor computed(const Asked& asked) {
  const Arguments& a = asked.a;
  if (a.on_gpu()) return gpu::computed(a, *asked.operands, asked.choice);
  const GilReleased no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor y = empty(*a.x, {a.rows(), a.hidden}, {a.hidden, 1});
  forward(a, matrix(a), y);
  return shaped(a, y);
}

// u and g, (M, F) each, of both pre-activations: `split_preact`.
gpu::Pair split(const Arguments& a, const Tensor& preact) {
  if (a.apart) return {preact.select(0, 0), preact.select(0, 1)};
  const auto half = [&](int64_t index) { return preact.narrow(1, index * a.hidden, a.hidden); };
  return {half(a.gate_first), half(!a.gate_first)};
}

// y and both pre-activations of x (M, D): `forward` of _chunks.py that keeps them.
void forward(const Arguments& a, const Tensor& x, const Tensor& y, const Tensor& preact) {
  const int64_t rows = x.size(0), size = chunk_rows(a);
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
}

// y and both pre-activations, which are in one tensor.
std::pair<Tensor, Tensor> keeping(const Asked& asked) {
  const Arguments& a = asked.a;
  const OnDevice on_device(a.x->device());
  const GilReleased no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t rows = a.rows(), hidden = a.hidden;
  const Tensor y = empty(*a.x, {rows, hidden}, {hidden, 1});
  const Tensor preact = a.w_gate == nullptr ? empty(*a.x, {rows, 2 * hidden}, {2 * hidden, 1})
                                            : empty(*a.x, {2, rows, hidden}, {rows * hidden, hidden, 1});
  if (a.on_gpu()) {
    const auto [u, g] = split(a, preact);
    gpu::forward(a, *asked.operands, asked.choice, y, u, g);
  } else forward(a, matrix(a), y, preact);
  return {shaped(a, y), preact};
}

// dx, dW, dW of the gate, db, db of the gate, dW_down, db_down; undefined where not wanted.
using Gradients = std::array<Tensor, 7>;

// The gradient of both pre-activations from dy, which is in y where y is recomputed; and the sums of its columns (2, F), value first.
Tensor gate_gradient(const Arguments& a, const Wanted& wanted, const gpu::Pair& preact, const gpu::Pair& dpreact, const Tensor& y) {
  const int64_t rows = a.rows(), hidden = a.hidden;
  const auto& [u, g] = preact;
  const auto& [du, dg] = dpreact;
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
    run.load()(&call);
  }
  return wanted.bias ? at::sum(sums, at::IntArrayRef{0}) : sums;
}

Gradients backward(const Asked& asked) {
  const Arguments& a = asked.a;
  const Wanted& wanted = asked.wanted;
  const OnDevice on_device(a.x->device());
  const GilReleased no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool apart = a.apart;
  if (wanted.overwrite) wanted.preact->unsafeGetTensorImpl()->bump_version();  // `overwritten` of _autograd.py
  const Tensor x = matrix(a), dpreact = wanted.overwrite ? *wanted.preact : at::empty_like(*wanted.preact);
  Tensor y = wanted.w_down == nullptr ? Tensor() : empty(x, {a.rows(), a.hidden}, {a.hidden, 1});
  const gpu::Pair before = split(a, *wanted.preact), after = split(a, dpreact);
  const Tensor sum = a.on_gpu() ? gpu::gate_gradient(a, wanted, asked.choice, before, after, y)
                                : gate_gradient(a, wanted, before, after, y);
  const auto& [du, dg] = after;
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

// The gradient of the pre-activations, and the sums of its columns (2, F), or no numbers if they are not wanted.
std::pair<Tensor, Tensor> gradient(const Asked& asked) {
  const Arguments& a = asked.a;
  const Wanted& wanted = asked.wanted;
  const OnDevice on_device(a.x->device());
  const GilReleased no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor dpreact = at::empty_like(*wanted.preact);
  const gpu::Pair before = split(a, *wanted.preact), after = split(a, dpreact);
  const Tensor sums = a.on_gpu() ? gpu::gate_gradient(a, wanted, asked.choice, before, after, {})
                                 : gate_gradient(a, wanted, before, after, {});
  return {dpreact, wanted.bias ? sums : empty(*a.x, {0}, {1}, at::kFloat)};
}

PyObject* gated_linear(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Asked asked{ONLY_Y};
  if (!asked.read(given, count) || !asked.served()) Py_RETURN_NONE;
  RECORD_FUNCTION("fusewise::gated_linear", (std::vector<IValue>{*asked.a.x}));  // as the operator shows in profiles
  return THPVariable_Wrap(computed(asked));
  END_HANDLE_TH_ERRORS
}

// kept(the arguments of a call): y and both pre-activations.
PyObject* kept(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Asked asked{KEEPING};
  if (!asked.read(given, count) || !asked.served()) Py_RETURN_NONE;
  RECORD_FUNCTION("fusewise::gated_linear_preact", (std::vector<IValue>{*asked.a.x}));
  const auto [y, preact] = keeping(asked);
  return Py_BuildValue("NN", THPVariable_Wrap(y), THPVariable_Wrap(preact));
  END_HANDLE_TH_ERRORS
}

PyObject* gradients_of(Job job, PyObject* const* given, Py_ssize_t count, const char* name) {
  HANDLE_TH_ERRORS
  Asked asked{job};
  if (!asked.read(given, count) || !asked.served()) Py_RETURN_NONE;
  RECORD_FUNCTION(name, (std::vector<IValue>{*asked.wanted.upstream}));
  const Gradients found = backward(asked);
  const Py_ssize_t those = job == MLP_BACKWARD ? 7 : 5;
  PyObject* const tuple = PyTuple_New(those);
  for (Py_ssize_t i = 0; i < those; ++i) PyTuple_SET_ITEM(tuple, i, THPVariable_Wrap(found[i]));  // None where undefined
  return tuple;
  END_HANDLE_TH_ERRORS
}

// gradients(dy, both pre-activations, whether to overwrite them, whether the gradients of x, weight, w_gate and the biases are wanted,
// the arguments of the call): a tuple of those of x, weight, w_gate, bias and b_gate.
PyObject* gradients(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return gradients_of(BACKWARD, given, count, "fusewise::gated_linear_grad");
}

// The same behind a down projection: mlp_gradients(dz, …, whether those of w_down and b_down are wanted, w_down, the arguments of the
// unit's call): a tuple that ends with those of w_down and b_down.
PyObject* mlp_gradients(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return gradients_of(MLP_BACKWARD, given, count, "fusewise::gated_linear_down_grad");
}

// new(job, the arguments of its function): whether it is a GPU call that can be cached and is not cached yet.
PyObject* is_new(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Asked asked{Job(PyLong_AsLong(given[0]))};
  return PyBool_FromLong(asked.read(given + 1, count - 1) && asked.a.on_gpu() && asked.operands->describable(asked.a) &&
                         !gpu::find(asked.job, asked.a, *asked.operands));
  END_HANDLE_TH_ERRORS
}

// remember(job, the arguments of its function, entry point, function that explains its error codes, epilogue, width); from the entry
// point on all 0: Python serves it.
PyObject* remember(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject* arguments = nullptr;
  int job = 0;
  unsigned long long run = 0, explain = 0;
  long long epilogue = 0, width = 0;
  if (!PyArg_ParseTuple(given, "iO!KKLL", &job, &PyTuple_Type, &arguments, &run, &explain, &epilogue, &width)) return nullptr;
  Asked asked{Job(job)};
  if (!asked.read(&PyTuple_GET_ITEM(arguments, 0), PyTuple_GET_SIZE(arguments)) || !asked.a.on_gpu()) Py_RETURN_FALSE;
  gpu::remember(asked.job, asked.a, *asked.operands,
                {reinterpret_cast<decltype(gpu::Choice::run)>(run), reinterpret_cast<decltype(gpu::Choice::explain)>(explain), epilogue, width});
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// on_cpu(entry point of the gate, GOMP_parallel or 0, whether oneDNN computes float32 products).
PyObject* on_cpu(PyObject*, PyObject* given) {
  unsigned long long entry = 0, threads = 0;
  int by_onednn = 0;
  if (!PyArg_ParseTuple(given, "KKp", &entry, &threads, &by_onednn)) return nullptr;
  onednn = by_onednn, parallel = reinterpret_cast<decltype(parallel)>(threads);
  run = reinterpret_cast<void (*)(const Call*)>(entry);
  Py_RETURN_NONE;
}

// Kernel of an operator; Python's, which raises, for what is not served here.
template <Job JOB>
void operate(const c10::OperatorHandle& op, Stack* stack) {
  constexpr size_t COUNT_OF = JOB == GRADIENT ? size_t(OF_GRADIENT) : size_t(OPERANDS);
  Asked asked{JOB};
  if (!asked.read(&torch::jit::peek(*stack, 0, COUNT_OF)) || !asked.served())
    return op.callBoxedForDispatchKey(DispatchKey::CompositeExplicitAutograd, *stack);
  std::vector<IValue> made;
  if constexpr (JOB == ONLY_Y) made = {computed(asked)};
  else {
    const auto [first, second] = JOB == KEEPING ? keeping(asked) : gradient(asked);
    made = {first, second};
  }
  torch::jit::drop(*stack, COUNT_OF);
  for (IValue& value : made) stack->push_back(std::move(value));
}

void register_operators() {
  for (const DispatchKey key : {DispatchKey::CPU, DispatchKey::CUDA}) {
    torch::Library& library = kernels_for(key);
    library.impl("gated_linear", torch::CppFunction::makeFromBoxedFunction<&operate<ONLY_Y>>());
    library.impl("gated_linear_preact", torch::CppFunction::makeFromBoxedFunction<&operate<KEEPING>>());
    library.impl("gated_linear_grad", torch::CppFunction::makeFromBoxedFunction<&operate<GRADIENT>>());
  }
  register_at_autograd({"gated_linear"});
}

// operators(): register the kernels of operators, if they are not.
PyObject* operators(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  static const bool once = (register_operators(), true);
  (void)once;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"gated_linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(gated_linear)), METH_FASTCALL, nullptr},
    {"kept", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(kept)), METH_FASTCALL, nullptr},
    {"gradients", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(gradients)), METH_FASTCALL, nullptr},
    {"mlp_gradients", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(mlp_gradients)), METH_FASTCALL, nullptr},
    {"new", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(is_new)), METH_FASTCALL, nullptr},
    {"remember", remember, METH_VARARGS, nullptr},
    {"on_cpu", on_cpu, METH_VARARGS, nullptr},
    {"operators", operators, METH_NOARGS, nullptr},
    {"quick", quick, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "fusewise_gated_host", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* fusewise_gated_host() {
  // A forked child has no OpenMP threads of its parent; and no other thread may hold the lock across the fork.
  pthread_atfork([] { gpu::lock.lock(); }, [] { gpu::lock.unlock(); },
                 [] { gpu::lock.unlock(), parallel = nullptr, onednn = false; });
  return PyModule_Create(&definition);
}
