// A repeated RoPE call, from Python to the launch in a microsecond or two: what validation and planning found for a call
// is kept here under everything that they depended on, and the next call like it goes from its arguments to the kernel.
//
// Python stays the one place that validates, plans and raises: whatever is not an ordinary call that has been before is
// answered with None, at once and with nothing changed, and the caller goes on in Python (`api.py`), which calls `remember`
// at its end. A key is made of values alone: of tensors the kind, device, sizes and strides, of options what they are equal
// by. So nothing of the caller's is held, and equal arguments need not be the same objects.
//
// The kernels are reached through the addresses of their entry points and know nothing of torch; this file is compiled
// against the torch that is there.

#define PY_SSIZE_T_CLEAN
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>
#include <unordered_map>

#include "plan.h"

namespace {

using at::Tensor;
using c10::DispatchKey;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// --- What is ordinary ------------------------------------------------------------------------------------------------

// Keys of a dense tensor in memory of its own: no wrapper, no subclass, no lazy negation.
constexpr c10::DispatchKeySet DENSE{DispatchKey::CPU,          DispatchKey::CUDA,        DispatchKey::ADInplaceOrView,
                                    DispatchKey::AutogradCPU,  DispatchKey::AutogradCUDA, DispatchKey::AutocastCPU,
                                    DispatchKey::AutocastCUDA};
// Keys that every thread has: more of them are tracing, dispatch modes or torch.func transforms.
constexpr c10::DispatchKeySet QUIET{DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView};

bool nobody_watches() {
  return QUIET.has_all(c10::impl::tls_local_dispatch_key_set().included_) && !at::impl::torch_function_mode_enabled() &&
         !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

bool dense(const Tensor& x) { return DENSE.has_all(x.key_set()) && x.dim() <= 4; }

// --- The arguments of a call and its key -----------------------------------------------------------------------------

struct Key {
  static constexpr size_t MOST = 192;
  int64_t words[MOST];
  size_t count = 0;

  void add(int64_t word) { words[count++] = word; }

  void add(const Tensor& x) {
    const int64_t kind = static_cast<int64_t>(x.scalar_type());
    add(static_cast<int64_t>(x.key_set().raw_repr()));
    add(kind | (x.dim() << 8) | (int64_t(x.device().index()) << 16) | (int64_t(1) << 40));
    for (const int64_t size : x.sizes()) add(size);
    for (const int64_t stride : x.strides()) add(stride);
  }

  // An option: None, a bool, an int, a float, a short string, up to three ints. False: none of these.
  bool add(PyObject* x) {
    if (x == Py_None || x == Py_True || x == Py_False) {
      add(x == Py_None ? 1 : x == Py_True ? 2 : 3);
    } else if (PyLong_CheckExact(x)) {
      int overflow = 0;
      add(4);
      add(PyLong_AsLongLongAndOverflow(x, &overflow));
      return overflow == 0;
    } else if (PyUnicode_CheckExact(x)) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(x, &size);
      if (text == nullptr) PyErr_Clear();  // not to be encoded, so none of ours: validation says so
      if (text == nullptr || size > 24) return false;
      int64_t padded[3] = {};
      std::memcpy(padded, text, size);
      add(5);
      for (const int64_t word : padded) add(word);
    } else if (PyFloat_CheckExact(x)) {
      const double value = PyFloat_AS_DOUBLE(x);
      int64_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      add(6);
      add(bits);
    } else if (PyTuple_CheckExact(x) && PyTuple_GET_SIZE(x) <= 3) {
      add(7 + (PyTuple_GET_SIZE(x) << 8));
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(x); ++i)
        if (!PyLong_CheckExact(PyTuple_GET_ITEM(x, i)) || !add(PyTuple_GET_ITEM(x, i))) return false;
    } else {
      return false;
    }
    return true;
  }

  size_t hash() const {
    uint64_t h = count;
    for (size_t i = 0; i < count; ++i) {
      h = (h ^ static_cast<uint64_t>(words[i])) * 0x9e3779b97f4a7c15u;
      h ^= h >> 32;
    }
    return h;
  }
};

// The arguments of `fusewise.rope`, in its order.
enum Argument { Q, K, COS, SIN, COS_SIN_, ANGLES_, INV_FREQ_, POSITIONS, OFFSET, BOUNDS, FIRST_OPTION, ARGUMENTS = 20 };

struct Arguments {
  const Tensor* x[2] = {};
  const Tensor *table = nullptr, *sin = nullptr, *positions = nullptr, *offsets = nullptr, *bounds = nullptr;
  int64_t offset = 0;
  int operands = 1;
  Key key;

  // Whether this is a call that can be remembered or recalled.
  bool read(PyObject* const* given, bool in_place) {
    if (!nobody_watches()) return false;
    key.add(in_place);
    for (int i = 0; i < FIRST_OPTION; ++i) {
      PyObject* const object = given[i];
      if (object == Py_None) {
        key.add(int64_t(1));
        continue;
      }
      if (i == OFFSET && PyLong_CheckExact(object)) {  // its value is not in the key
        int overflow = 0;
        offset = PyLong_AsLongLongAndOverflow(object, &overflow);
        if (overflow != 0 || offset < 0) return false;
        key.add(int64_t(4));
        continue;
      }
      if (!THPVariable_CheckExact(object)) return false;
      const Tensor& tensor = THPVariable_Unpack(object);
      if (!dense(tensor) || (i > K && tensor.requires_grad())) return false;
      key.add(tensor);
      keep(i, tensor);
    }
    for (int i = FIRST_OPTION; i < ARGUMENTS; ++i)
      if (!key.add(given[i])) return false;
    if (x[0] == nullptr || table == nullptr) return false;
    operands = x[1] == nullptr ? 1 : 2;
    if (in_place) {
      for (int o = 0; o < operands; ++o)
        if (x[o]->is_inference() && !c10::InferenceMode::is_enabled()) return false;
      if (operands == 2 && x[0]->storage().data() == x[1]->storage().data())  // whether they overlap depends on it
        key.add(static_cast<const char*>(x[1]->const_data_ptr()) - static_cast<const char*>(x[0]->const_data_ptr()));
    }
    return true;
  }

  bool records() const {
    return at::GradMode::is_enabled() && (x[0]->requires_grad() || (operands == 2 && x[1]->requires_grad()));
  }

 private:
  void keep(int i, const Tensor& tensor) {
    switch (i) {
      case Q: x[0] = &tensor; break;
      case K: x[1] = &tensor; break;
      case SIN: sin = &tensor; break;
      case POSITIONS: positions = &tensor; break;
      case OFFSET: offsets = &tensor; break;
      case BOUNDS: bounds = &tensor; break;
      default: table = &tensor;
    }
  }
};

// --- What is remembered ----------------------------------------------------------------------------------------------

struct Entry {
  std::vector<int64_t> key;
  Plan plan;
  int64_t sin_distance;          // bytes from the table to its sine part where both are one tensor
  int64_t most_offset;           // that the validation holds for
  int64_t dims[3];               // of q: batch (-1: none), token, head
  std::vector<int64_t> dense[2];  // strides of a new tensor like q and k
  std::string spec, impl;        // as the operators of Python take them

  // Where the elements of x lie, as a plan has it.
  void strides(at::IntArrayRef of, int64_t (&to)[3]) const {
    for (int i = 0; i < 3; ++i) to[i] = dims[i] < 0 ? 0 : of[dims[i]];
  }
};
using Remembered = std::shared_ptr<const Entry>;

// Training sees a few keys, serving some hundred; the bound is there only against a leak.
class Cache {
 public:
  Remembered find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (latest != nullptr && same(latest->key, key)) return latest;  // the layers of a model all make the same call
    const auto [first, last] = entries.equal_range(key.hash());
    for (auto i = first; i != last; ++i)
      if (same(i->second->key, key)) return latest = i->second;
    return nullptr;
  }
  void keep(const Key& key, Remembered entry) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (entries.size() >= 4096) entries.clear();
    entries.emplace(key.hash(), std::move(entry));
  }
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex);
    entries.clear();
    latest = nullptr;
  }
  std::mutex mutex;

 private:
  static bool same(const std::vector<int64_t>& words, const Key& key) {
    return words.size() == key.count && std::memcmp(words.data(), key.words, key.count * sizeof(int64_t)) == 0;
  }
  std::unordered_multimap<size_t, Remembered> entries;
  Remembered latest;
};
Cache& cache = *new Cache;  // never destroyed: threads may outlive the exit

// --- The launch ------------------------------------------------------------------------------------------------------

// The entry points of the native implementations, see `_cpu/rope.cpp` and `_cuda/rope.cu`.
struct Kernels {
  void (*cpu)(const Plan*, const Call*, int64_t threads, void* parallel) = nullptr;
  void* parallel = nullptr;
  int (*cuda)(const Plan*, const Call*, void* stream) = nullptr;
  const char* (*explain)(int) = nullptr;
} kernels;

void launch(const Plan& plan, const Call& call, c10::Device device) {
  if (device.is_cpu()) return kernels.cpu(&plan, &call, at::get_num_threads(), kernels.parallel);
  const auto* impl = c10::impl::getDeviceGuardImpl(device.type());
  const int code = kernels.cuda(&plan, &call, impl->getStreamNativeHandle(impl->getStream(device)));
  TORCH_CHECK(code == 0, "rope: the CUDA launch must succeed, got ", kernels.explain(code), "; use impl=\"triton\"");
}

Tensor empty(const Tensor& like, at::IntArrayRef strides) {
  const DispatchKey key = like.is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA;
  c10::Allocator* const allocator = c10::GetAllocator(like.device().type());
  return at::detail::empty_strided_generic(like.sizes(), strides, allocator, c10::DispatchKeySet(key), like.scalar_type());
}

const void* address(const Tensor* x) { return x == nullptr || !x->defined() ? nullptr : x->const_data_ptr(); }

// The call without its outputs.
Call call_on(const Entry& entry, const Tensor* q, const Tensor* k, const Tensor* table, const Tensor* sin,
             const Tensor* positions, const Tensor* offsets, const Tensor* bounds, int64_t offset) {
  Call call{};
  call.x[0] = address(q), call.x[1] = address(k);
  call.cos = address(table), call.sin = address(sin);
  if (call.sin == nullptr) call.sin = static_cast<const char*>(call.cos) + entry.sin_distance;
  call.positions = address(positions), call.offsets = address(offsets), call.bounds = address(bounds);
  call.offset = offset;
  return call;
}

// --- Autograd --------------------------------------------------------------------------------------------------------

PyObject* differentiable = nullptr;  // the gradients in Python, for what is not ordinary

PyObject* wrapped(const Tensor& x) { return x.defined() ? THPVariable_Wrap(x) : Py_NewRef(Py_None); }

// Gradients by `_op.gradients`: it differentiates on, and has a rule for every wrapped tensor.
variable_list in_python(const variable_list& dys, at::ArrayRef<Tensor> tensors, int64_t offset, const std::string& spec,
                        const std::string& impl, const std::vector<int64_t>& q_strides,
                        const std::vector<int64_t>& k_strides) {
  const pybind11::gil_scoped_acquire gil;
  const auto list = [](const std::vector<int64_t>& values) { return pybind11::cast(values).release().ptr(); };
  const auto result = pybind11::reinterpret_steal<pybind11::object>(PyObject_CallFunction(
      differentiable, "(NN)(NNNNN)Lss(NN)", wrapped(dys[0]), wrapped(dys.size() > 1 ? dys[1] : Tensor()),
      wrapped(tensors[0]), wrapped(tensors[1]), wrapped(tensors[2]), wrapped(tensors[3]), wrapped(tensors[4]),
      static_cast<long long>(offset), spec.c_str(), impl.c_str(), list(q_strides), list(k_strides)));
  if (!result) {
    python_error error;
    error.persist();
    throw std::move(error);
  }
  variable_list dxs(dys.size());
  for (size_t o = 0; o < dys.size(); ++o) {
    PyObject* const dx = PyTuple_GET_ITEM(result.ptr(), o);
    if (dx != Py_None) dxs[o] = THPVariable_Unpack(dx);
  }
  return dxs;
}

// The backward that compiled autograd runs, from what `RopeBackward::compiled_args` put into the context.
struct Rope {
  static constexpr bool is_traceable = false;
  static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& dys) {
    auto& data = context->saved_data;
    return in_python(dys, context->get_saved_variables(), data["offset"].toInt(), data["spec"].toStringRef(),
                     data["impl"].toStringRef(), data["q_strides"].toIntVector(), data["k_strides"].toIntVector());
  }
};

// y = R x, dx = Rᵀ dy; of x nothing is saved. Torch's own node with a context serves compiled autograd alone.
struct RopeBackward : torch::autograd::CppNode<Rope> {
  Remembered entry;
  SavedVariable saved[5];  // table, sin, positions, offsets, bounds
  int64_t offset = 0;

  RopeBackward(Remembered remembered, const Arguments& a) : entry(std::move(remembered)), offset(a.offset) {
    const Tensor* const tensors[5] = {a.table, a.sin, a.positions, a.offsets, a.bounds};
    for (int i = 0; i < 5; ++i)
      if (tensors[i] != nullptr) saved[i] = SavedVariable(*tensors[i], /*is_output=*/false);
    if (a.operands == 1) set_next_edges(torch::autograd::collect_next_edges(*a.x[0]));
    else set_next_edges(torch::autograd::collect_next_edges(*a.x[0], *a.x[1]));
  }

  std::string name() const override { return "RopeBackward"; }

  void release_variables() override {
    for (SavedVariable& variable : saved) variable.reset_data();
    CppNode::release_variables();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    const_cast<RopeBackward*>(this)->fill_context();
    CppNode::compiled_args(args);
  }

  variable_list apply(variable_list&& dys) override {
    Tensor tensors[5];
    for (int i = 0; i < 5; ++i) tensors[i] = saved[i].unpack();
    const Tensor* given = nullptr;
    bool ordinary = nobody_watches();
    for (const Tensor& dy : dys) {
      if (!dy.defined()) continue;
      ordinary = ordinary && dense(dy) && !(at::GradMode::is_enabled() && dy.requires_grad());
      given = &dy;
    }
    if (given == nullptr) return variable_list(dys.size());
    for (const Tensor& tensor : tensors) ordinary = ordinary && (!tensor.defined() || dense(tensor));
    if (ordinary) return rotated(dys, tensors, given->device());
    return in_python(dys, tensors, offset, entry->spec, entry->impl, entry->dense[0], entry->dense[dys.size() - 1]);
  }

 private:
  void fill_context() {
    set_ctx_grad_fn(getptr());
    variable_list tensors;
    for (const SavedVariable& variable : saved) tensors.push_back(variable.unpack());
    ctx_.save_for_backward(std::move(tensors));
    save_variables_to_ctx();
    ctx_.set_materialize_grads(false);
    ctx_.saved_data["offset"] = offset;
    ctx_.saved_data["spec"] = entry->spec;
    ctx_.saved_data["impl"] = entry->impl;
    ctx_.saved_data["q_strides"] = entry->dense[0];
    ctx_.saved_data["k_strides"] = entry->dense[num_inputs() - 1];
    is_variable_input_.assign(num_inputs(), true);
  }

  variable_list rotated(const variable_list& dys, const Tensor (&tensors)[5], c10::Device device) const {
    const c10::DeviceGuard there(device);
    Plan plan = entry->plan;
    plan.inverse ^= 1, plan.in_place = 0;
    std::swap(plan.interleaved_in, plan.interleaved_out);
    variable_list dxs(dys.size()), sources(dys.size());
    int count = 0, from[2] = {};
    for (int o = 0; o < static_cast<int>(dys.size()); ++o) {
      if (!dys[o].defined()) continue;
      // The one permitted copy: a gradient whose features are not contiguous, as the expanded scalar of `y.sum()`.
      sources[o] = dys[o].stride(-1) == 1 || dys[o].size(-1) == 1 ? dys[o] : dys[o].contiguous();
      dxs[o] = empty(sources[o], entry->dense[o]);
      from[count++] = o;
    }
    if (count == 1) from[1] = from[0];
    plan.operands = count;
    Call call = call_on(*entry, &sources[from[0]], &sources[from[1]], &tensors[0], &tensors[1], &tensors[2], &tensors[3],
                        &tensors[4], offset);
    for (int i = 0; i < 2; ++i) {
      const int o = from[i];
      plan.heads[i] = entry->plan.heads[o];
      plan.head_dim[i] = entry->plan.head_dim[o];
      plan.start[i] = entry->plan.start[o];
      entry->strides(sources[o].strides(), plan.x_strides[i]);
      entry->strides(dxs[o].strides(), plan.y_strides[i]);
      call.y[i] = dxs[o].mutable_data_ptr();
    }
    RECORD_FUNCTION(count == 1 ? "fusewise::rope" : "fusewise::rope_qk", (std::vector<c10::IValue>{sources[from[0]]}));
    launch(plan, call, device);
    return dxs;
  }
};

// torch holds nodes by one smart pointer or another, depending on its version.
using NodePointer = decltype(torch::autograd::Edge::function);

NodePointer node_of(Remembered entry, const Arguments& a) {
#if __has_include(<torch/csrc/autograd/node.h>)
  return c10::make_intrusive<RopeBackward>(std::move(entry), a);
#else
  return NodePointer(new RopeBackward(std::move(entry), a), torch::autograd::deleteNode);
#endif
}

// --- A repeated call -------------------------------------------------------------------------------------------------

// Other threads of Python run; half the cost of pybind11's way to say so.
struct OthersGoOn {
  PyThreadState* const thread = PyEval_SaveThread();
  ~OthersGoOn() { PyEval_RestoreThread(thread); }
};

// Whether autograd can follow a write into x without what Python does for views and leaves.
bool followed(const Tensor& x) { return x.requires_grad() && !x.is_leaf() && !x.is_view(); }

template <bool IN_PLACE>
PyObject* recall(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == ARGUMENTS, "rope: the host function must have ", int(ARGUMENTS), " arguments, got ", count);
  Arguments a;
  if (!a.read(given, IN_PLACE)) Py_RETURN_NONE;
  Remembered entry = cache.find(a.key);
  if (entry == nullptr || a.offset > entry->most_offset) Py_RETURN_NONE;
  const bool records = a.records();
  if (IN_PLACE && records)
    for (int o = 0; o < a.operands; ++o)
      if (!followed(*a.x[o])) Py_RETURN_NONE;

  const c10::DeviceGuard there(a.x[0]->device());
  Call call = call_on(*entry, a.x[0], a.x[a.operands - 1], a.table, a.sin, a.positions, a.offsets, a.bounds, a.offset);
  NodePointer node;
  if (records) node = node_of(entry, a);
  Tensor ys[2];
  for (int o = 0; o < a.operands; ++o) ys[o] = IN_PLACE ? *a.x[o] : empty(*a.x[o], entry->dense[o]);
  for (int o = 0; o < 2; ++o) call.y[o] = ys[a.operands == 2 ? o : 0].mutable_data_ptr();
  {
    constexpr const char* NAMES[2] = {IN_PLACE ? "fusewise::rope_" : "fusewise::rope", IN_PLACE ? "fusewise::rope_qk_" : "fusewise::rope_qk"};
    RECORD_FUNCTION(NAMES[a.operands - 1], (std::vector<c10::IValue>{*a.x[0]}));
    const OthersGoOn while_this_lives;
    launch(entry->plan, call, a.x[0]->device());
  }
  for (int o = 0; o < a.operands; ++o) {
    if (IN_PLACE && !ys[o].is_inference()) ys[o].unsafeGetTensorImpl()->bump_version();
    if (!records) continue;
    if (IN_PLACE) torch::autograd::impl::rebase_history(ys[o], {node, node->add_input_metadata(ys[o])});
    else torch::autograd::set_history(ys[o], node);
  }
  if (IN_PLACE) return a.operands == 1 ? Py_NewRef(given[Q]) : PyTuple_Pack(2, given[Q], given[K]);
  if (a.operands == 1) return THPVariable_Wrap(std::move(ys[0]));
  return Py_BuildValue("(NN)", THPVariable_Wrap(std::move(ys[0])), THPVariable_Wrap(std::move(ys[1])));
  END_HANDLE_TH_ERRORS
}

// new(in_place, arguments): whether a call can be remembered and is not yet.
PyObject* is_new(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  int in_place = 0;
  PyObject* arguments = nullptr;
  if (!PyArg_ParseTuple(given, "pO!", &in_place, &PyTuple_Type, &arguments)) return nullptr;
  Arguments a;
  TORCH_CHECK_TYPE(PyTuple_GET_SIZE(arguments) == ARGUMENTS, "rope: a call has ", int(ARGUMENTS), " arguments");
  const bool readable = a.read(&PyTuple_GET_ITEM(arguments, 0), in_place != 0);
  return PyBool_FromLong(readable && cache.find(a.key) == nullptr);
  END_HANDLE_TH_ERRORS
}

// remember(in_place, arguments, plan, sin_distance, most_offset, dims, strides of new tensors, spec, impl).
PyObject* remember(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  int in_place = 0;
  PyObject *arguments = nullptr, *dims = nullptr, *strides = nullptr;
  const char *plan = nullptr, *spec = nullptr, *impl = nullptr;
  Py_ssize_t size = 0;
  long long sin_distance = 0, most_offset = 0;
  if (!PyArg_ParseTuple(given, "pO!y#LLOOss", &in_place, &PyTuple_Type, &arguments, &plan, &size, &sin_distance,
                        &most_offset, &dims, &strides, &spec, &impl))
    return nullptr;
  TORCH_CHECK_TYPE(size == sizeof(Plan), "rope: a plan has ", sizeof(Plan), " bytes, got ", size);
  TORCH_CHECK_TYPE(PyTuple_GET_SIZE(arguments) == ARGUMENTS, "rope: a call has ", int(ARGUMENTS), " arguments");
  Arguments a;
  if (!a.read(&PyTuple_GET_ITEM(arguments, 0), in_place != 0)) Py_RETURN_FALSE;
  auto entry = std::make_shared<Entry>();
  entry->key.assign(a.key.words, a.key.words + a.key.count);
  std::memcpy(&entry->plan, plan, sizeof(Plan));
  entry->sin_distance = sin_distance, entry->most_offset = most_offset;
  const auto in_order = pybind11::cast<std::array<int64_t, 3>>(pybind11::handle(dims));
  std::copy(in_order.begin(), in_order.end(), entry->dims);
  const auto wanted = pybind11::cast<std::vector<std::vector<int64_t>>>(pybind11::handle(strides));
  TORCH_CHECK_TYPE(static_cast<int>(wanted.size()) == a.operands, "rope: strides for every operand");
  for (int o = 0; o < a.operands; ++o) entry->dense[o] = wanted[o];
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

// on_cuda(entry point, function that explains its codes).
PyObject* on_cuda(PyObject*, PyObject* given) {
  unsigned long long run = 0, explain = 0;
  if (!PyArg_ParseTuple(given, "KK", &run, &explain)) return nullptr;
  kernels.cuda = reinterpret_cast<decltype(kernels.cuda)>(run);
  kernels.explain = reinterpret_cast<decltype(kernels.explain)>(explain);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"rope", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(recall<false>)), METH_FASTCALL, nullptr},
    {"rope_", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(recall<true>)), METH_FASTCALL, nullptr},
    {"new", is_new, METH_VARARGS, nullptr},
    {"remember", remember, METH_VARARGS, nullptr},
    {"forget", forget, METH_NOARGS, nullptr},
    {"on_cpu", on_cpu, METH_VARARGS, nullptr},
    {"on_cuda", on_cuda, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusewise_rope_host", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

// The module, made by the function that computes gradients in Python: `_op.gradients`.
extern "C" __attribute__((visibility("default"))) PyObject* fusewise_rope_host(PyObject* gradients) {
  differentiable = Py_NewRef(gradients);
  // A forked child has none of the parent's OpenMP threads, and the lock must not be another thread's at that time.
  pthread_atfork([] { cache.mutex.lock(); }, [] { cache.mutex.unlock(); },
                 [] { cache.mutex.unlock(), kernels.parallel = nullptr; });
  return PyModule_Create(&definition);
}
