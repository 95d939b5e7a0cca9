// A call of tensors on a GPU: from its arguments to the launch of `_cuda`, once Python has chosen the kernel for a call like it.
//
// What Python's choice depends on is the key under which it is kept; tensors are held by nobody. The lock of Python's interpreter
// is held where choices are read and written.

#pragma once

#include <array>
#include <map>

#include "host_call.h"

namespace {

namespace gpu {  // names that `_cpu/gate.h` has as well
#include "_cuda/plan.h"

struct Choice {
  int (*run)(const Plan*, const Call*, void* stream);  // `fusewise_gated_linear` of the library for the dtype and activation; null: Python's
  const char* (*explain)(int);
  int64_t epilogue, width;
};

using Key = std::array<int64_t, 12>;
std::map<Key, Choice>& choices = *new std::map<Key, Choice>;  // never destroyed: threads may outlive the exit
constexpr size_t MOST = 4096;  // against a leak alone

// The operands as the kernels have them: matrices by address and distance of rows, in elements.
struct Operands {
  const char *x, *value, *gate, *value_bias, *gate_bias;
  int64_t x_stride, value_stride, gate_stride;

  explicit Operands(const Arguments& a) {
    const auto address = [](const Tensor* t) { return t == nullptr ? nullptr : static_cast<const char*>(t->const_data_ptr()); };
    x = address(a.x), value = address(a.weight), gate = address(a.w_gate), value_bias = address(a.bias), gate_bias = address(a.b_gate);
    x_stride = a.x->dim() == 2 ? a.x->stride(0) : a.x->size(-1);
    value_stride = gate_stride = a.weight->stride(0);
    if (a.w_gate != nullptr) {
      gate_stride = a.w_gate->stride(0);
      return;
    }
    gate = value + a.hidden * value_stride * 2;
    if (value_bias != nullptr) gate_bias = value_bias + a.hidden * 2;
    if (a.gate_first) std::swap(value, gate), std::swap(value_bias, gate_bias);
  }

  // Whether TMA can describe them, and y: others are copied, which Python sees to.
  bool describable(const Arguments& a) const {
    const auto bits = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(value) | reinterpret_cast<uintptr_t>(gate) |
                      uintptr_t(x_stride | value_stride | gate_stride | a.hidden) * 2;
    return bits % 16 == 0 && x_stride > 0 && value_stride > 0 && gate_stride > 0;
  }

  Key key(const Arguments& a) const {
    return {a.x->device().index(), a.kind, a.activation, a.by_choice, a.gate_first, a.w_gate != nullptr,
            a.rows(), a.x->size(-1), a.hidden, x_stride, value_stride, gate_stride};
  }
};

// The kernel for a call, or null if Python has to be asked; `operands` are those of `a`.
const Choice* find(const Arguments& a, const Operands& operands) {
  if (!operands.describable(a)) return nullptr;
  const auto found = choices.find(operands.key(a));
  return found == choices.end() ? nullptr : &found->second;
}

// y, which the kernel makes on the current stream of the tensors' device.
Tensor launched(const Arguments& a, const Operands& operands, const Choice& choice) {
  const int64_t rows = a.rows(), depth = a.x->size(-1), biased = a.bias != nullptr;
  const OnDevice on_device(a.x->device());
  std::array<int64_t, 4> sizes{}, strides{};  // as many as `dense` allows
  const auto dims = a.x->dim();
  std::copy_n(a.x->sizes().begin(), dims, sizes.begin());
  sizes[dims - 1] = a.hidden;
  for (int64_t i = dims - 1, step = 1; i >= 0; step *= sizes[i--]) strides[i] = step;
  const GilReleased no_gil;
  Tensor y = empty(*a.x, {sizes.data(), size_t(dims)}, {strides.data(), size_t(dims)});
  Plan plan{rows, a.hidden, depth, operands.x_stride, operands.value_stride, operands.gate_stride, a.hidden};
  plan.value_bias_stride = plan.gate_bias_stride = biased;
  plan.bfloat16 = a.kind == BFLOAT16, plan.activation = a.activation, plan.epilogue = choice.epilogue, plan.width = choice.width;
  Call call{operands.x, operands.value, operands.gate, y.mutable_data_ptr()};
  call.value_bias = operands.value_bias, call.gate_bias = operands.gate_bias;
  const int code = choice.run(&plan, &call, stream_on(a.x->device()));
  TORCH_CHECK(code == 0, "gated_linear: the CUDA launch must succeed, got ", choice.explain(code), "; use impl=\"triton\"");
  return y;
}

}  // namespace gpu
}  // namespace
