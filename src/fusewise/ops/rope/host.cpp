// Host fast path: takes a repeated call of `rope`, `rope_`, `rope_and_cache_` or `qk_norm_rope` from Python to the launch in a
// microsecond or two. The result of validation and planning is cached under a key of everything that it depends on; a later
// call with the same key goes from its arguments directly to the kernel.
//
// Python stays the only place that validates, plans and raises: any call that is unusual or not cached returns None at once,
// without side effects, and the caller continues in Python (`api.py`), which calls `remember` at its end. Keys contain only
// values: dtype, device, sizes and strides of tensors, and the values of options. So the cache holds no reference to the
// caller's objects, and equal arguments need not be the same objects.
//
// Kernels are called through the addresses of their entry points and do not depend on torch; this file is compiled against
// the installed torch.

#define PY_SSIZE_T_CLEAN
#include <pthread.h>

#include <array>

#include "host_operators.h"

namespace {

// --- A repeated call -------------------------------------------------------------------------------------------------

// Whether autograd can track a write to x, the oth of a call, without what Python does for views, leaves and `retain_grad`.
bool followed(const Tensor& x, int o) {
  return x.requires_grad() && !x.is_leaf() && !x.is_view() && !(x.retains_grad() && static_cast<int>(x.output_nr()) != o);
}

template <Form FORM>
PyObject* recall(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == Arguments::count(FORM), "rope: the host function must have ", Arguments::count(FORM),
                   " arguments, got ", count);
  Arguments a;
  if (!a.read(given, FORM)) Py_RETURN_NONE;
  const Remembered entry = cache.find(a.key);
  if (entry == nullptr || a.offset > entry->most_offset) Py_RETURN_NONE;
  constexpr bool DIFFERENTIABLE = FORM == NEW || FORM == IN_PLACE || FORM == NORMED;
  const bool records = DIFFERENTIABLE && a.records();
  if (FORM == IN_PLACE && records)
    for (int o = 0; o < a.operands; ++o)
      if (!followed(*a.x[o], o)) Py_RETURN_NONE;

  NodePointer node;
  if (records) node = node_of<FORM == NORMED ? NORMED : NEW>(entry, a);
  Tensor made[2];
  run<FORM>(*entry, a, a.offset, made, [&a](const auto& launch) {
    // Profiles show the operator that Python would have called.
    constexpr const char* NAMES[][2] = {{"fusewise::rope", "fusewise::rope_qk"},
                                        {"fusewise::rope_out", "fusewise::rope_qk_out"},
                                        {"fusewise::rope_", "fusewise::rope_qk_"},
                                        {"fusewise::rope_and_cache_keep_k_", "fusewise::rope_and_cache_"},
                                        {"fusewise::qk_norm_rope", "fusewise::qk_norm_rope"}};
    RECORD_FUNCTION(NAMES[FORM][FORM == CACHED ? a.y[1] != nullptr : a.operands - 1], (std::vector<c10::IValue>{*a.x[0]}));
    const GilReleased no_gil;
    launch();
  });
  for (int o = 0; records && o < a.operands; ++o) {
    if (FORM == IN_PLACE) torch::autograd::impl::rebase_history(*a.y[o], {node, node->add_input_metadata(*a.y[o])});
    else if (a.x[o]->requires_grad() || (FORM == NORMED && a.weights[o] != nullptr && a.weights[o]->requires_grad()))
      torch::autograd::set_history(*a.y[o], node);
    else node->add_input_metadata(torch::autograd::Node::undefined_input());  // it receives no gradient
  }
  if (FORM == CACHED) Py_RETURN_TRUE;
  if (FORM == GIVEN)
    return Py_NewRef(a.operands == 1 && PyTuple_CheckExact(given[OUT]) ? PyTuple_GET_ITEM(given[OUT], 0) : given[OUT]);
  if (FORM == IN_PLACE) return a.operands == 1 ? Py_NewRef(given[Q]) : PyTuple_Pack(2, given[Q], given[K]);
  if (a.operands == 1) return THPVariable_Wrap(std::move(made[0]));
  return Py_BuildValue("(NN)", THPVariable_Wrap(std::move(made[0])), THPVariable_Wrap(std::move(made[1])));
  END_HANDLE_TH_ERRORS
}

// The arguments of a call, from a tuple.
PyObject* const* items(PyObject* arguments, Form form) {
  TORCH_CHECK_TYPE(PyTuple_GET_SIZE(arguments) == Arguments::count(form), "rope: a call has ", Arguments::count(form),
                   " arguments");
  return &PyTuple_GET_ITEM(arguments, 0);
}

// new(form, arguments): whether a call can be cached and is not cached yet.
PyObject* is_new(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  int form = 0;
  PyObject* arguments = nullptr;
  if (!PyArg_ParseTuple(given, "iO!", &form, &PyTuple_Type, &arguments)) return nullptr;
  Arguments a;
  const bool readable = a.read(items(arguments, Form(form)), Form(form));
  return PyBool_FromLong(readable && cache.find(a.key) == nullptr);
  END_HANDLE_TH_ERRORS
}

// remember(form, arguments, plan, sin_distance, most_offset, dims, strides of new tensors, spec, impl).
PyObject* remember(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  int form = 0;
  PyObject *arguments = nullptr, *dims = nullptr, *strides = nullptr;
  const char *plan = nullptr, *spec = nullptr, *impl = nullptr;
  Py_ssize_t size = 0;
  long long sin_distance = 0;
  double most_offset = 0;
  if (!PyArg_ParseTuple(given, "iO!y#LdOOss", &form, &PyTuple_Type, &arguments, &plan, &size, &sin_distance,
                        &most_offset, &dims, &strides, &spec, &impl))
    return nullptr;
  Arguments a;
  if (!a.read(items(arguments, Form(form)), Form(form))) Py_RETURN_FALSE;
  auto entry = std::make_shared<Entry>(a.key, Form(form));
  entry->take(plan, size);
  entry->sin_distance = sin_distance, entry->most_offset = static_cast<int64_t>(std::min(most_offset, 0x1p62));
  const auto in_order = pybind11::cast<std::array<int64_t, 3>>(pybind11::handle(dims));
  std::copy(in_order.begin(), in_order.end(), entry->dims);
  const auto wanted = pybind11::cast<std::vector<std::vector<int64_t>>>(pybind11::handle(strides));
  TORCH_CHECK_TYPE(wanted.size() <= 2, "rope: strides for every operand");
  std::copy(wanted.begin(), wanted.end(), entry->dense);
  entry->spec = spec, entry->impl = impl;
  cache.keep(a.key, std::move(entry));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* forget(PyObject*, PyObject*) {
  cache.clear();
  Py_RETURN_NONE;
}

// on_cpu(entry point, GOMP_parallel or 0).
PyObject* on_cpu(PyObject*, PyObject* given) {
  unsigned long long run = 0, parallel = 0;
  if (!PyArg_ParseTuple(given, "KK", &run, &parallel)) return nullptr;
  kernels.cpu = reinterpret_cast<decltype(kernels.cpu)>(run);
  kernels.parallel = reinterpret_cast<void*>(parallel);
  Py_RETURN_NONE;
}

// on_cuda(form, entry point, function that explains its error codes): for form CACHED or NORMED, or for all other forms. NORMED: two
// more entry points, of the backward and of the function that says how many partial sums it needs.
PyObject* on_cuda(PyObject*, PyObject* given) {
  int form = 0;
  unsigned long long run = 0, explain = 0, backward = 0, partials = 0;
  if (!PyArg_ParseTuple(given, "iKK|KK", &form, &run, &explain, &backward, &partials)) return nullptr;
  // When CUDA becomes selectable, calls that have been left to Python so far are forgotten.
  const auto set = [](auto& kernel, unsigned long long address) {
    if (kernel == nullptr) cache.clear();
    kernel = reinterpret_cast<std::decay_t<decltype(kernel)>>(address);
  };
  if (form == NORMED) set(kernels.normed, run), set(kernels.norm_backward, backward), set(kernels.norm_partials, partials);
  else if (form == CACHED) set(kernels.cached, run);
  else set(kernels.cuda, run);
  kernels.explain = reinterpret_cast<decltype(kernels.explain)>(explain);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"rope", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(recall<NEW>)), METH_FASTCALL, nullptr},
    {"rope_out", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(recall<GIVEN>)), METH_FASTCALL, nullptr},
    {"rope_", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(recall<IN_PLACE>)), METH_FASTCALL, nullptr},
    {"rope_and_cache_", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(recall<CACHED>)), METH_FASTCALL, nullptr},
    {"qk_norm_rope", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(recall<NORMED>)), METH_FASTCALL, nullptr},
    {"new", is_new, METH_VARARGS, nullptr},
    {"remember", remember, METH_VARARGS, nullptr},
    {"forget", forget, METH_NOARGS, nullptr},
    {"quick", quick, METH_O, nullptr},
    {"on_cpu", on_cpu, METH_VARARGS, nullptr},
    {"on_cuda", on_cuda, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "fusewise_rope_host", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

// Returns the module, created once with three Python callbacks: the two `_op.gradients`, which compute gradients, and
// `_host._planned`, which plans an operator call.
extern "C" __attribute__((visibility("default"))) PyObject* fusewise_rope_host(PyObject* gradients, PyObject* norm_gradients,
                                                                               PyObject* plans) {
  static PyObject* module = nullptr;
  if (module != nullptr) return Py_NewRef(module);
  module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  differentiable = Py_NewRef(gradients), norm_differentiable = Py_NewRef(norm_gradients), planned = Py_NewRef(plans);
  // A forked child has no OpenMP threads of its parent; and no other thread may hold the lock across the fork.
  pthread_atfork([] { cache.mutex.lock(); }, [] { cache.mutex.unlock(); },
                 [] { cache.mutex.unlock(), kernels.parallel = nullptr; });
  register_operators();
  return Py_NewRef(module);
}
