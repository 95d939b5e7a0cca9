// GPU calls: from the arguments to the launch of `_cuda`, once Python has selected the kernel for such a call.
//
// Selections are cached under a key of everything they depend on; no tensors are retained. The GIL protects the cache.

#pragma once

#include <array>
#include <map>

#include "host_call.h"

namespace {

namespace gpu {  // names that `_cpu/gate.h` has as well
#include "_cuda/plan.h"

struct Choice {
  // `fusewise_gated_linear` of the library for the dtype and activation; null: Python serves the call.
  int (*run)(const Plan*, const Call*, void* stream);
  const char* (*explain)(int);
  int64_t epilogue, width;
};

using Key = std::array<int64_t, 12>;
std::map<Key, Choice>& choices = *new std::map<Key, Choice>;  // never destroyed: threads may still run at exit
constexpr size_t MOST = 4096;  // only guards against a leak

// The operands as the kernels take them: addresses and row strides in elements.
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

  // Whether TMA supports the operands and y; for others Python makes copies.
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

// The kernel for a call, or null if Python has to select one; `operands` are those of `a`.
const Choice* find(const Arguments& a, const Operands& operands) {
  if (!operands.describable(a)) return nullptr;
  const auto found = choices.find(operands.key(a));
  return found == choices.end() ? nullptr : &found->second;
}

// Launch the kernel on the current stream of the tensors' device; returns y.
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
