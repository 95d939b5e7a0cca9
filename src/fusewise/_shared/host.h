// What the quick ways on the host have in common: which calls they take, how they make a tensor, and where it is. Every other
// call is Python's, which validates, plans and raises.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>

namespace {

using at::Tensor;
using c10::DispatchKey;

// Keys of a dense tensor in memory of its own: no wrapper, no subclass, no lazy negation.
constexpr c10::DispatchKeySet DENSE{DispatchKey::CPU,          DispatchKey::CUDA,        DispatchKey::ADInplaceOrView,
                                    DispatchKey::AutogradCPU,  DispatchKey::AutogradCUDA, DispatchKey::AutocastCPU,
                                    DispatchKey::AutocastCUDA};
// Keys that every thread has: more of them are tracing, dispatch modes or torch.func transforms.
constexpr c10::DispatchKeySet QUIET{DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView};

std::atomic<bool> enabled{true};  // else every call goes through Python

bool nobody_watches() {
  return enabled && QUIET.has_all(c10::impl::tls_local_dispatch_key_set().included_) && !at::impl::torch_function_mode_enabled() &&
         !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

bool dense(const Tensor& x) { return DENSE.has_all(x.key_set()) && x.dim() <= 4; }

// Other threads of Python run; half the cost of pybind11's way to say so.
struct OthersGoOn {
  PyThreadState* const thread = PyEval_SaveThread();
  ~OthersGoOn() { PyEval_RestoreThread(thread); }
};

// A new tensor where x is and in its dtype, past the dispatcher.
Tensor empty(const Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const DispatchKey key = x.is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA;
  c10::Allocator* const allocator = c10::GetAllocator(x.device().type());
  return at::detail::empty_strided_generic(sizes, strides, allocator, c10::DispatchKeySet(key), x.scalar_type());
}

// Of the GPU that is the device, the current stream.
void* stream_on(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  const auto* impl = c10::impl::getDeviceGuardImpl(device.type());
  return impl->getStreamNativeHandle(impl->getStream(device));
}

// Makes the device of a call the current one where it is not. c10::DeviceGuard asks for the current one twice.
class There {
 public:
  explicit There(c10::Device device) {
    if (device.is_cpu()) return;
    const auto* const impl = c10::impl::getDeviceGuardImpl(device.type());
    before = impl->getDevice();
    if (before == device) return;
    impl->setDevice(device);
    changed = impl;
  }
  ~There() {
    if (changed != nullptr) changed->uncheckedSetDevice(before);
  }
  There(const There&) = delete;

 private:
  const c10::impl::DeviceGuardImplInterface* changed = nullptr;
  c10::Device before{c10::DeviceType::CPU};
};

// quick(on): whether calls are taken, or all are left to Python.
PyObject* quick(PyObject*, PyObject* on) {
  enabled = on == Py_True;
  Py_RETURN_NONE;
}

}  // namespace
