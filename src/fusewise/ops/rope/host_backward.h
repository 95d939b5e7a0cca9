// Launch of a cached call, and its autograd node: see host.cpp.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>

#include "host_call.h"

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// --- The launch ------------------------------------------------------------------------------------------------------

// Entry points of the native implementations: `_cpu/rope.cpp`, `_cuda/rope.cu`, `rope_and_cache.cu` and `qk_norm_rope.cu`.
struct Kernels {
  void (*cpu)(const Plan*, const Call*, int64_t threads, void* parallel) = nullptr;
  void* parallel = nullptr;
  int (*cuda)(const Plan*, const Call*, void* stream) = nullptr;
  int (*cached)(const CachePlan*, const CacheCall*, void* stream) = nullptr;
  int (*normed)(const NormPlan*, const NormCall*, void* stream) = nullptr;
  int (*norm_backward)(const NormGradPlan*, const NormGradCall*, void* stream) = nullptr;
  int64_t (*norm_partials)(const NormGradPlan*, const NormGradCall*, int device) = nullptr;
  const char* (*explain)(int) = nullptr;
} kernels;

void check(int code, const char* op) {
  TORCH_CHECK(code == 0, op, ": the CUDA launch must succeed, got ", kernels.explain(code), "; use impl=\"triton\"");
}

void launch(const Plan& plan, const Call& call, c10::Device device) {
  if (device.is_cpu()) kernels.cpu(&plan, &call, at::get_num_threads(), kernels.parallel);
  else check(kernels.cuda(&plan, &call, stream_on(device)), "rope");
}

const void* address(const Tensor* x) { return x == nullptr || !x->defined() ? nullptr : x->const_data_ptr(); }

// The packed call, without its outputs.
Call call_on(const Entry& entry, const Tensors& t, int64_t offset) {
  Call call{};
  call.x[0] = address(t.x[0]), call.x[1] = t.x[1] == nullptr ? call.x[0] : address(t.x[1]);
  call.cos = address(t.table), call.sin = address(t.sin);
  if (call.sin == nullptr) call.sin = static_cast<const char*>(call.cos) + entry.sin_distance;
  call.positions = address(t.positions), call.offsets = address(t.offsets), call.bounds = address(t.bounds);
  call.offset = offset;
  return call;
}

// Launch a cached call into new or existing tensors. Version counters of existing ones are bumped, as autograd does not see
// writes through a pointer. `within` is called with the launch itself.
template <Form FORM, class Within>
void run(const Entry& entry, Tensors& t, int64_t offset, Tensor (&made)[2], const Within& within) {
  const c10::Device device = t.x[0]->device();
  const OnDevice on_device(device);
  CacheCall call{call_on(entry, t, offset)};
  constexpr bool FRESH = FORM == NEW || FORM == NORMED;
  for (int o = 0; FRESH && o < 2; ++o)
    if (t.x[o] != nullptr) t.y[o] = &(made[o] = empty(*t.x[o], t.x[o]->sizes(), entry.dense[o]));
  call.rotation.y[0] = t.y[0]->mutable_data_ptr();
  call.rotation.y[1] = t.y[1] != nullptr ? t.y[1]->mutable_data_ptr() : call.rotation.y[0];
  if constexpr (FORM == CACHED) {
    if (t.y[1] == nullptr) call.rotation.y[1] = const_cast<void*>(call.rotation.x[1]);  // k is only read
    call.v = address(t.v), call.slots = address(t.slots), call.table = address(t.block_table);
    for (int i = 0; i < 2; ++i) call.caches[i] = t.caches[i]->mutable_data_ptr();
    within([&] { check(kernels.cached(&entry.cached, &call, stream_on(device)), "rope_and_cache_"); });
  } else if constexpr (FORM == NORMED) {
    const NormCall normed{call.rotation, {address(t.weights[0]), address(t.weights[t.weights[1] != nullptr])}};
    within([&] { check(kernels.normed(&entry.normed, &normed, stream_on(device)), "qk_norm_rope"); });
  } else {
    within([&] { launch(entry.rotation, call.rotation, device); });
  }
  for (const Tensor* y : {t.y[0], t.y[1], t.caches[0], t.caches[1]})
    if (!FRESH && y != nullptr && !y->is_inference()) y->unsafeGetTensorImpl()->bump_version();
}

// Launch the backward of `qk_norm_rope` on the device of x; returns false if no kernel serves the call.
bool launch_norm_backward(const NormGradPlan& plan, NormGradCall& call, const Tensor& x) {
  const OnDevice on_device(x.device());
  const int64_t partials = kernels.norm_partials(&plan, &call, x.is_cpu() ? 0 : x.device().index());
  if (partials < 0) return false;
  Tensor sums;
  if (partials > 0) {
    sums = empty(x, {partials}, {1}, at::kFloat);
    call.partials = sums.mutable_data_ptr();
  }
  check(kernels.norm_backward(&plan, &call, stream_on(x.device())), "qk_norm_rope");
  return true;
}

// --- Autograd --------------------------------------------------------------------------------------------------------

// `gradients` of rope/_op.py and of qk_norm_rope/_op.py, for gradients that native code does not handle.
PyObject *differentiable = nullptr, *norm_differentiable = nullptr;

PyObject* wrapped(const Tensor& x) { return x.defined() ? THPVariable_Wrap(x) : Py_NewRef(Py_None); }

// A tuple of new references.
PyObject* tuple_of(std::initializer_list<PyObject*> items) {
  PyObject* const made = PyTuple_New(static_cast<Py_ssize_t>(items.size()));
  Py_ssize_t i = 0;
  for (PyObject* const item : items) PyTuple_SET_ITEM(made, i++, item);
  return made;
}

// What a backward needs besides tensors. NORMED: all but the strides.
struct Options {
  int64_t offset = 0;
  std::string spec, impl;
  std::vector<int64_t> strides[2];  // of new tensors like q and k
  double eps = 0, weight_offset = 0;
  bool together = false;
  std::array<bool, 4> needed{};  // gradients of q, k and their weights
};

// The tensors that a backward needs: table, sin, positions, offsets, bounds; NORMED: then q, k and their weights.
constexpr int OF_ROTATION = 5;
constexpr int saved_by(Form form) { return form == NORMED ? OF_ROTATION + 4 : OF_ROTATION; }

// Gradients by Python, which supports double backward and all tensor subclasses and transforms.
template <Form FORM>
variable_list in_python(const variable_list& dys, at::ArrayRef<Tensor> tensors, const Options& options) {
  const pybind11::gil_scoped_acquire gil;
  const auto list = [](const std::vector<int64_t>& values) { return pybind11::cast(values).release().ptr(); };
  const auto text = [](const std::string& value) { return pybind11::cast(value).release().ptr(); };
  const auto rotation = [&](std::initializer_list<PyObject*> more) {
    PyObject* const all = PyTuple_New(OF_ROTATION + 2 + more.size());
    for (int i = 0; i < OF_ROTATION; ++i) PyTuple_SET_ITEM(all, i, wrapped(tensors[i]));
    PyTuple_SET_ITEM(all, OF_ROTATION, PyLong_FromLongLong(options.offset));
    PyTuple_SET_ITEM(all, OF_ROTATION + 1, text(options.spec));
    Py_ssize_t i = OF_ROTATION + 2;
    for (PyObject* const item : more) PyTuple_SET_ITEM(all, i++, item);
    return all;
  };
  PyObject* const given = tuple_of({wrapped(dys[0]), wrapped(dys.size() > 1 ? dys[1] : Tensor())});
  const auto result = pybind11::reinterpret_steal<pybind11::object>([&] {
    if constexpr (FORM == NORMED) {
      const auto needed = [&](int i) { return PyBool_FromLong(options.needed[i]); };
      const auto input = [&](int i) { return wrapped(tensors[OF_ROTATION + i]); };
      return PyObject_CallFunction(
          norm_differentiable, "(NNNN)", given, tuple_of({input(0), input(1), input(2), input(3)}),
          rotation({PyFloat_FromDouble(options.eps), PyFloat_FromDouble(options.weight_offset),
                    text(options.together ? "all" : "head"), text(options.impl)}),
          tuple_of({needed(0), needed(1), needed(2), needed(3)}));
    } else {
      return PyObject_CallFunction(differentiable, "(NNN)", given, rotation({text(options.impl)}),
                                   tuple_of({list(options.strides[0]), list(options.strides[1])}));
    }
  }());
  if (!result) {
    python_error error;
    error.persist();
    throw std::move(error);
  }
  variable_list found(FORM == NORMED ? 4 : dys.size());
  for (size_t o = 0; o < found.size(); ++o) {
    PyObject* const one = PyTuple_GET_ITEM(result.ptr(), o);
    if (one != Py_None) found[o] = THPVariable_Unpack(one);
  }
  return found;
}

// The backward for compiled autograd; `Backward::compiled_args` fills its context.
template <Form FORM>
struct Traced {
  static constexpr bool is_traceable = false;
  static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& dys) {
    auto& data = context->saved_data;
    Options options{data["offset"].toInt(), data["spec"].toStringRef(), data["impl"].toStringRef()};
    options.strides[0] = data["q_strides"].toIntVector(), options.strides[1] = data["k_strides"].toIntVector();
    options.eps = data["eps"].toDouble(), options.weight_offset = data["weight_offset"].toDouble();
    options.together = data["together"].toBool();
    for (int i = 0; i < 4; ++i) options.needed[i] = data["needed"].toInt() >> i & 1;
    return in_python<FORM>(dys, context->get_saved_variables(), options);
  }
};

// The properties of a tensor that a plan relies on. A saved-tensor hook may return a tensor with other ones, for example after
// offloading, packing or compression.
struct Geometry {
  at::ScalarType dtype{};
  c10::Device device{c10::DeviceType::CPU};
  c10::SmallVector<int64_t, 4> sizes, strides;
  Geometry() = default;
  explicit Geometry(const Tensor& x)
      : dtype(x.scalar_type()),
        device(x.device()),
        sizes(x.sizes().begin(), x.sizes().end()),
        strides(x.strides().begin(), x.strides().end()) {}
  // x as a saved-tensor hook has brought it back, in the dtype that it had. Hooks must keep values, sizes and device.
  Tensor restored(Tensor x, const char* op) const {
    if (!x.defined()) return x;
    TORCH_CHECK_VALUE(x.sizes() == sizes && x.device() == device, op, ": what a saved-tensor hook returns must have the shape and "
                      "device of what it got, ", at::IntArrayRef(sizes), " and ", device, ", got ", x.sizes(), " and ", x.device(),
                      "; undo in its unpack what its pack did");
    return x.scalar_type() == dtype ? x : x.to(dtype);
  }
  bool of(const Tensor& x) const {
    return dense(x) && x.scalar_type() == dtype && x.device() == device && x.sizes() == sizes && x.strides() == strides;
  }
};

// Whether there is only one reference to x, either in C++ or through its Python object.
bool sole(const at::TensorBase& x) {
  return x.use_count() == 1 || (x.use_count() == 2 && x.unsafeGetTensorImpl()->pyobj_slot()->has_unique_reference());
}

// Whether x may be overwritten: nothing else references x, its view base or their storage; x covers the whole storage; and torch
// owns it (storage borrowed from another library may still be read there). Torch's in-place gradient accumulation uses the same
// criteria. Tensors that require grad and inference tensors are excluded, as they would stay such.
bool exclusively_owned(const Tensor& x) {
  if (x.requires_grad() || x.is_inference()) return false;
  const c10::Storage& memory = x.storage();
  const bool view = x.is_view();
  return sole(x) && (!view || sole(x._base())) && memory.use_count() == (view ? 2 : 1) &&
         memory.nbytes() == static_cast<size_t>(x.numel()) * x.element_size() && memory.unsafeGetStorageImpl()->resizable();
}

// Autograd node. FORM is NEW, y = R x, dx = Rᵀ dy, where x is not saved; or NORMED. The base class CppNode with its context only
// serves compiled autograd.
template <Form FORM>
struct Backward : torch::autograd::CppNode<Traced<FORM>> {
  using Base = torch::autograd::CppNode<Traced<FORM>>;
  static constexpr int SAVED = saved_by(FORM), INPUTS = FORM == NORMED ? 4 : 2;
  static constexpr const char* OP = FORM == NORMED ? "qk_norm_rope" : "rope";
  Remembered entry;
  SavedVariable saved[SAVED];
  Geometry planned[SAVED];
  int64_t offset = 0;

  Backward(Remembered remembered, const Arguments& a) : entry(std::move(remembered)), offset(a.offset) {
    const Tensor* const tensors[] = {a.table, a.sin, a.positions, a.offsets, a.bounds, a.x[0], a.x[1], a.weights[0], a.weights[1]};
    for (int i = 0; i < SAVED; ++i)
      if (tensors[i] != nullptr) saved[i] = SavedVariable(*tensors[i], /*is_output=*/false), planned[i] = Geometry(*tensors[i]);
    torch::autograd::edge_list edges;
    for (int i = 0; i < INPUTS; ++i) {
      const Tensor* const input = tensors[OF_ROTATION + i];
      if (FORM != NORMED && i == a.operands) break;
      edges.push_back(input != nullptr ? torch::autograd::impl::gradient_edge(*input) : torch::autograd::Edge());
    }
    this->set_next_edges(std::move(edges));
  }

  std::string name() const override { return FORM == NORMED ? "QkNormRopeBackward" : "RopeBackward"; }

  void release_variables() override {
    for (SavedVariable& variable : saved) variable.reset_data();
    Base::release_variables();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    const_cast<Backward*>(this)->fill_context();
    Base::compiled_args(args);
  }

  variable_list apply(variable_list&& dys) override {
    Tensor tensors[SAVED];
    for (int i = 0; i < SAVED; ++i) tensors[i] = unpacked(i);
    const Tensor* given = nullptr;
    bool ordinary = no_active_modes();
    for (size_t o = 0; o < dys.size(); ++o) {
      if (!wants(o)) dys[o].reset();
      const Tensor& dy = dys[o];
      if (!dy.defined()) continue;
      // The engine guarantees this, but a direct call of the node, `y.grad_fn(dy)`, does not.
      const auto& y = this->input_metadata(o);
      const auto dtype = c10::typeMetaToScalarType(y.options().dtype());
      TORCH_CHECK_VALUE(y.is_same_shape(dy) && dy.scalar_type() == dtype && dy.device() == y.device(), OP,
                        ": the gradient must have the shape, dtype and device of the result, got ", dy.sizes(), ", ",
                        dy.scalar_type(), " and ", dy.device(), "; pass one like it");
      ordinary = ordinary && dense(dy) && !recorded(dy);
      given = &dy;
    }
    if (given == nullptr) return variable_list(this->num_outputs());
    for (int i = 0; i < SAVED; ++i) ordinary = ordinary && (!tensors[i].defined() || planned[i].of(tensors[i]));
    for (int i = OF_ROTATION; i < SAVED; ++i) ordinary = ordinary && !recorded(tensors[i]);
    if constexpr (FORM == NORMED) {
      variable_list found;
      if (ordinary && normed(dys, tensors, found)) return found;
    } else if (ordinary) {
      return rotated(dys, tensors, given->device());
    }
    return in_python<FORM>(dys, tensors, options());
  }

 private:
  Tensor unpacked(int i) const { return planned[i].restored(saved[i].unpack(), OP); }

  static bool recorded(const Tensor& x) { return at::GradMode::is_enabled() && x.defined() && x.requires_grad(); }

  // Whether a gradient of an output is used.
  bool wants(size_t o) const {
    return this->task_should_compute_output(o) || (FORM == NORMED && this->task_should_compute_output(2 + o));
  }

  Options options() const {
    Options found{offset, entry->spec, entry->impl};
    found.strides[0] = entry->dense[0], found.strides[1] = entry->dense[this->num_inputs() - 1];
    if constexpr (FORM == NORMED) {
      found.eps = entry->normed.eps, found.weight_offset = entry->normed.weight_offset, found.together = entry->normed.together;
      for (int i = 0; i < INPUTS; ++i) found.needed[i] = this->task_should_compute_output(i);
    }
    return found;
  }

  void fill_context() {
    auto& context = this->ctx_;
    this->set_ctx_grad_fn(this->getptr());
    variable_list tensors;
    for (int i = 0; i < SAVED; ++i) tensors.push_back(unpacked(i));
    context.save_for_backward(std::move(tensors));
    this->save_variables_to_ctx();
    context.set_materialize_grads(false);
    const Options all = options();
    int64_t needed = 0;
    for (int i = 0; i < 4; ++i) needed |= int64_t(all.needed[i]) << i;
    auto& data = context.saved_data;
    data["offset"] = all.offset, data["spec"] = all.spec, data["impl"] = all.impl;
    data["q_strides"] = all.strides[0], data["k_strides"] = all.strides[1];
    data["eps"] = all.eps, data["weight_offset"] = all.weight_offset, data["together"] = all.together, data["needed"] = needed;
    this->is_variable_input_.assign(this->num_outputs(), true);
  }

  // The tensors of the call besides q and k.
  static Tensors of_rotation(const Tensor (&tensors)[SAVED]) {
    Tensors t;
    t.table = &tensors[0], t.sin = &tensors[1], t.positions = &tensors[2], t.offsets = &tensors[3], t.bounds = &tensors[4];
    return t;
  }

  // The only copy: of a gradient whose features are not contiguous, like the expanded scalar of `y.sum()`.
  static Tensor readable(const Tensor& dy) { return dy.stride(-1) == 1 || dy.size(-1) == 1 ? dy : dy.contiguous(); }

  // Make the ith operand of a plan the oth of the forward, with new y.
  void pick(Plan& plan, int i, int o, const Tensor& x, const Tensor& y) const {
    const Plan& forward = entry->rotation;
    plan.heads[i] = forward.heads[o], plan.head_dim[i] = forward.head_dim[o], plan.start[i] = forward.start[o];
    entry->strides(x.strides(), plan.x_strides[i]);
    entry->strides(y.strides(), plan.y_strides[i]);
  }

  // In place if every gradient is exclusively owned and already has the strides of the result: features that do not rotate then
  // need not be copied.
  variable_list rotated(const variable_list& dys, const Tensor (&tensors)[SAVED], c10::Device device) const {
    const OnDevice on_device(device);
    bool in_place = true;
    for (size_t o = 0; o < dys.size(); ++o)
      in_place = in_place && (!dys[o].defined() || (dys[o].strides() == at::IntArrayRef(entry->dense[o]) && exclusively_owned(dys[o])));
    Plan plan = entry->rotation;
    plan.inverse ^= 1, plan.in_place = in_place;
    std::swap(plan.interleaved_in, plan.interleaved_out);
    variable_list dxs(dys.size()), sources(dys.size());
    int count = 0, from[2] = {};
    for (int o = 0; o < static_cast<int>(dys.size()); ++o) {
      if (!dys[o].defined()) continue;
      sources[o] = readable(dys[o]);
      dxs[o] = in_place ? dys[o] : empty(sources[o], sources[o].sizes(), entry->dense[o]);
      from[count++] = o;
    }
    if (count == 1) from[1] = from[0];
    plan.operands = count;
    Tensors t = of_rotation(tensors);
    t.x[0] = &sources[from[0]], t.x[1] = &sources[from[1]];
    Call call = call_on(*entry, t, offset);
    for (int i = 0; i < 2; ++i) {
      pick(plan, i, from[i], sources[from[i]], dxs[from[i]]);
      call.y[i] = dxs[from[i]].mutable_data_ptr();
    }
    RECORD_FUNCTION(count == 1 ? "fusewise::rope" : "fusewise::rope_qk", (std::vector<c10::IValue>{sources[from[0]]}));
    launch(plan, call, device);
    return dxs;
  }

  // Returns false if no kernel serves the call.
  bool normed(const variable_list& dys, const Tensor (&tensors)[SAVED], variable_list& found) const {
    const Tensor *const xs = tensors + OF_ROTATION, *const weights = xs + 2;
    NormGradPlan plan{entry->normed};
    variable_list dxs(2), sources(2), dweights(2);
    bool of_weights = false;
    int count = 0, from[2] = {};
    for (int o = 0; o < static_cast<int>(dys.size()); ++o) {
      if (!dys[o].defined()) continue;
      sources[o] = readable(dys[o]);
      dxs[o] = empty(xs[o], xs[o].sizes(), entry->dense[o]);
      of_weights = of_weights || this->task_should_compute_output(2 + o);
      from[count++] = o;
    }
    if (count == 1) from[1] = from[0];
    plan.norm.rotation.operands = count;
    Tensors t = of_rotation(tensors);
    t.x[0] = &xs[from[0]], t.x[1] = &xs[from[1]];
    NormGradCall call{{call_on(*entry, t, offset)}};
    for (int i = 0; i < 2; ++i) {
      const int o = from[i];
      pick(plan.norm.rotation, i, o, xs[o], dxs[o]);
      plan.norm.weight_kinds[i] = entry->normed.weight_kinds[o];
      entry->strides(sources[o].strides(), plan.dy_strides[i]);
      call.norm.rotation.y[i] = dxs[o].mutable_data_ptr();
      call.norm.weights[i] = address(&weights[o]), call.dy[i] = address(&sources[o]);
      if (of_weights && !dweights[o].defined()) dweights[o] = empty(weights[o], weights[o].sizes(), weights[o].strides());
      if (of_weights) call.dweights[i] = dweights[o].mutable_data_ptr();
    }
    RECORD_FUNCTION("fusewise::qk_norm_rope_grad", (std::vector<c10::IValue>{sources[from[0]]}));
    if (!launch_norm_backward(plan, call, xs[from[0]])) return false;
    found = {dxs[0], dxs[1], dweights[0], dweights[1]};
    for (int i = 0; i < INPUTS; ++i)
      if (!this->task_should_compute_output(i)) found[i].reset();
    return true;
  }
};

// The smart pointer type that holds a node depends on the torch version.
using NodePointer = decltype(torch::autograd::Edge::function);

template <Form FORM>
NodePointer node_of(Remembered entry, const Arguments& a) {
#if __has_include(<torch/csrc/autograd/node.h>)
  return c10::make_intrusive<Backward<FORM>>(std::move(entry), a);
#else
  return NodePointer(new Backward<FORM>(std::move(entry), a), torch::autograd::deleteNode);
#endif
}

}  // namespace
