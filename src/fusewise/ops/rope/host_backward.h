// Launch of a cached call, and its autograd node: see host.cpp.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

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

// --- Autograd --------------------------------------------------------------------------------------------------------

PyObject* differentiable = nullptr;  // `_op.gradients`, for gradients that native code does not handle

PyObject* wrapped(const Tensor& x) { return x.defined() ? THPVariable_Wrap(x) : Py_NewRef(Py_None); }

// Gradients by `_op.gradients`, which supports double backward and all tensor subclasses and transforms.
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

// The backward for compiled autograd; `RopeBackward::compiled_args` fills its context.
struct Rope {
  static constexpr bool is_traceable = false;
  static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& dys) {
    auto& data = context->saved_data;
    return in_python(dys, context->get_saved_variables(), data["offset"].toInt(), data["spec"].toStringRef(),
                     data["impl"].toStringRef(), data["q_strides"].toIntVector(), data["k_strides"].toIntVector());
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

// Autograd node: y = R x, dx = Rᵀ dy; x is not saved. The base class CppNode with its context only serves compiled autograd.
struct RopeBackward : torch::autograd::CppNode<Rope> {
  Remembered entry;
  SavedVariable saved[5];  // table, sin, positions, offsets, bounds
  Geometry planned[5];
  int64_t offset = 0;

  RopeBackward(Remembered remembered, const Arguments& a) : entry(std::move(remembered)), offset(a.offset) {
    const Tensor* const tensors[5] = {a.table, a.sin, a.positions, a.offsets, a.bounds};
    for (int i = 0; i < 5; ++i)
      if (tensors[i] != nullptr) saved[i] = SavedVariable(*tensors[i], /*is_output=*/false), planned[i] = Geometry(*tensors[i]);
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
    bool ordinary = no_active_modes();
    for (size_t o = 0; o < dys.size(); ++o) {
      if (!task_should_compute_output(o)) dys[o].reset();
      const Tensor& dy = dys[o];
      if (!dy.defined()) continue;
      // The engine guarantees this, but a direct call of the node, `y.grad_fn(dy)`, does not.
      const auto& y = input_metadata(o);
      const auto dtype = c10::typeMetaToScalarType(y.options().dtype());
      TORCH_CHECK_VALUE(y.is_same_shape(dy) && dy.scalar_type() == dtype && dy.device() == y.device(),
                        "rope: the gradient must have the shape, dtype and device of the rotation, got ", dy.sizes(), ", ",
                        dy.scalar_type(), " and ", dy.device(), "; pass one like it");
      ordinary = ordinary && dense(dy) && !(at::GradMode::is_enabled() && dy.requires_grad());
      given = &dy;
    }
    if (given == nullptr) return variable_list(dys.size());
    for (int i = 0; i < 5; ++i) ordinary = ordinary && (!tensors[i].defined() || planned[i].of(tensors[i]));
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

  // In place if every gradient is exclusively owned and already has the strides of the result: features that do not rotate then
  // need not be copied.
  variable_list rotated(const variable_list& dys, const Tensor (&tensors)[5], c10::Device device) const {
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
      // The only copy: a gradient whose features are not contiguous, like the expanded scalar of `y.sum()`.
      sources[o] = dys[o].stride(-1) == 1 || dys[o].size(-1) == 1 ? dys[o] : dys[o].contiguous();
      dxs[o] = in_place ? dys[o] : empty(sources[o], sources[o].sizes(), entry->dense[o]);
      from[count++] = o;
    }
    if (count == 1) from[1] = from[0];
    plan.operands = count;
    Tensors t{{&sources[from[0]], &sources[from[1]]}};
    t.table = &tensors[0], t.sin = &tensors[1], t.positions = &tensors[2], t.offsets = &tensors[3], t.bounds = &tensors[4];
    Call call = call_on(*entry, t, offset);
    for (int i = 0; i < 2; ++i) {
      const int o = from[i];
      plan.heads[i] = entry->rotation.heads[o];
      plan.head_dim[i] = entry->rotation.head_dim[o];
      plan.start[i] = entry->rotation.start[o];
      entry->strides(sources[o].strides(), plan.x_strides[i]);
      entry->strides(dxs[o].strides(), plan.y_strides[i]);
      call.y[i] = dxs[o].mutable_data_ptr();
    }
    RECORD_FUNCTION(count == 1 ? "fusewise::rope" : "fusewise::rope_qk", (std::vector<c10::IValue>{sources[from[0]]}));
    launch(plan, call, device);
    return dxs;
  }
};

// The smart pointer type that holds a node depends on the torch version.
using NodePointer = decltype(torch::autograd::Edge::function);

NodePointer node_of(Remembered entry, const Arguments& a) {
#if __has_include(<torch/csrc/autograd/node.h>)
  return c10::make_intrusive<RopeBackward>(std::move(entry), a);
#else
  return NodePointer(new RopeBackward(std::move(entry), a), torch::autograd::deleteNode);
#endif
}

}  // namespace
