// Shared by the host fast paths (C++ extensions that replay a validated call): which calls they accept, tensor allocation, and
// device and stream handling. Every other call goes through Python, which validates, plans and raises.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <optional>

namespace {

using at::Tensor;
using c10::DispatchKey;

// Dispatch keys that a plain dense tensor may have: no wrapper, no subclass, no lazy negation.
constexpr c10::DispatchKeySet DENSE{DispatchKey::CPU,          DispatchKey::CUDA,        DispatchKey::ADInplaceOrView,
                                    DispatchKey::AutogradCPU,  DispatchKey::AutogradCUDA, DispatchKey::AutocastCPU,
                                    DispatchKey::AutocastCUDA};
// Thread-local included keys in plain eager mode: any others mean tracing, dispatch modes or torch.func transforms.
constexpr c10::DispatchKeySet QUIET{DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView};

std::atomic<bool> enabled{true};  // false: every call goes through Python

bool no_active_modes() {
  return enabled && QUIET.has_all(c10::impl::tls_local_dispatch_key_set().included_) && !at::impl::torch_function_mode_enabled() &&
         !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

bool dense(const Tensor& x, int64_t most = 4) { return DENSE.has_all(x.key_set()) && x.dim() <= most; }

// Releases the GIL, if this thread has it (an operator is called without), at half the cost of pybind11's gil_scoped_release.
struct GilReleased {
  PyThreadState* const thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~GilReleased() {
    if (thread != nullptr) PyEval_RestoreThread(thread);
  }
};

// A new tensor with the device and dtype of x, without going through the dispatcher. On a GPU from torch's current allocator: a
// process that has changed it (`torch.cuda.memory.change_current_allocator`) never starts the one that is registered.
Tensor empty(const Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype = {}) {
  const DispatchKey key = x.is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA;
  c10::Allocator* const allocator =
      x.is_cpu() ? c10::GetAllocator(c10::kCPU) : at::detail::getCUDAHooks().getCUDADeviceAllocator();
  return at::detail::empty_strided_generic(sizes, strides, allocator, c10::DispatchKeySet(key), dtype.value_or(x.scalar_type()));
}

// The current stream of a GPU; null for a CPU.
void* stream_on(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  const auto* impl = c10::impl::getDeviceGuardImpl(device.type());
  return impl->getStreamNativeHandle(impl->getStream(device));
}

// Device guard: makes the device of a call the current one. c10::DeviceGuard would query the current device twice.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device) {
    if (device.is_cpu()) return;
    const auto* const impl = c10::impl::getDeviceGuardImpl(device.type());
    before = impl->getDevice();
    if (before == device) return;
    impl->setDevice(device);
    changed = impl;
  }
  ~OnDevice() {
    if (changed != nullptr) changed->uncheckedSetDevice(before);
  }
  OnDevice(const OnDevice&) = delete;

 private:
  const c10::impl::DeviceGuardImplInterface* changed = nullptr;
  c10::Device before{c10::DeviceType::CPU};
};

// quick(on): enable the fast path, or leave all calls to Python.
PyObject* quick(PyObject*, PyObject* on) {
  enabled = on == Py_True;
  Py_RETURN_NONE;
}

}  // namespace
