// GPU calls: from the arguments to the launch of `_cuda`, once Python has selected the kernel for such a call.
//
// Selections are cached under a key of everything they depend on; no tensors are retained.

#pragma once

#include <array>
#include <map>
#include <mutex>

#include "host_call.h"

namespace {

namespace gpu {  // names that `_cpu/gate.h` has as well
#include "_cuda/plan.h"

constexpr int64_t ROWS = 128;  // of a partial sum, if it is not GATE's

struct Choice {
  // `fusewise_gated_linear` of the library for the dtype and activation; null: Python serves the call.
  int (*run)(const Plan*, const Call*, void* stream);
  const char* (*explain)(int);
  int64_t epilogue, width;
};

using Key = std::array<int64_t, 16>;
std::map<Key, Choice>& choices = *new std::map<Key, Choice>;  // never destroyed: threads may still run at exit
std::mutex lock;  // of the choices: operators are called without the GIL
constexpr size_t MOST = 4096;  // only guards against a leak

// The operands as the kernels take them: addresses and row strides in elements.
struct Operands {
  const char *x, *value, *gate, *value_bias, *gate_bias;
  int64_t x_stride, value_stride, gate_stride;
  // Of a backward; else 0. Columns, besides F, are those of the matrices that BLAS multiplies.
  const char *upstream = nullptr, *preact = nullptr, *down = nullptr;
  int64_t upstream_stride = 0, down_stride = 0, columns_in = 0, columns_out = 0;

  Operands(const Arguments& a, const Wanted& wanted) {
    const auto address = [](const Tensor* t) { return t == nullptr ? nullptr : static_cast<const char*>(t->const_data_ptr()); };
    x = address(a.x), value = address(a.weight), gate = address(a.w_gate), value_bias = address(a.bias), gate_bias = address(a.b_gate);
    x_stride = a.x->dim() == 2 ? a.x->stride(0) : a.x->size(-1);
    if (a.weight == nullptr) {  // `gated_linear_grad`
      preact = address(wanted.preact), value_stride = gate_stride = 0;
      return;
    }
    value_stride = gate_stride = a.weight->stride(0);
    if (wanted.upstream != nullptr) {
      upstream = address(wanted.upstream), upstream_stride = wanted.upstream->stride(0), preact = address(wanted.preact);
      columns_in = a.x->size(-1);
    }
    if (wanted.w_down != nullptr) {
      down = address(wanted.w_down), down_stride = wanted.w_down->stride(0), columns_out = wanted.w_down->size(0);
    }
    if (a.w_gate != nullptr) {
      gate_stride = a.w_gate->stride(0);
      return;
    }
    gate = value + a.hidden * value_stride * 2;
    if (value_bias != nullptr) gate_bias = value_bias + a.hidden * 2;
    if (a.gate_first) std::swap(value, gate), std::swap(value_bias, gate_bias);
  }

  // Whether TMA supports the operands and results, and products of a backward need no padding; for others Python makes copies.
  bool describable(const Arguments& a) const {
    uintptr_t bits = (x_stride | value_stride | gate_stride | upstream_stride | down_stride | a.hidden | columns_in | columns_out) * 2;
    for (const char* at : {x, value, gate, upstream, preact, down}) bits |= reinterpret_cast<uintptr_t>(at);
    return bits % 16 == 0 && x_stride > 0 && (value == nullptr || (value_stride > 0 && gate_stride > 0)) &&
           (upstream == nullptr || upstream_stride > 0) && (down == nullptr || down_stride > 0);
  }

  Key key(Job job, const Arguments& a) const {
    return {job, a.x->device().index(), a.kind, a.activation, a.by_choice, a.gate_first, a.apart,
            a.rows(), a.x->size(-1), a.hidden, x_stride, value_stride, gate_stride, upstream_stride, columns_out, down_stride};
  }
};

// The kernel for a call, or none if Python has to select one; `operands` are those of `a`.
std::optional<Choice> find(Job job, const Arguments& a, const Operands& operands) {
  if (!operands.describable(a)) return {};
  const Key key = operands.key(job, a);
  const std::lock_guard guard(lock);
  const auto found = choices.find(key);
  return found == choices.end() ? std::nullopt : std::optional(found->second);
}

void remember(Job job, const Arguments& a, const Operands& operands, const Choice& choice) {
  const Key key = operands.key(job, a);
  const std::lock_guard guard(lock);
  if (choices.size() >= MOST) choices.clear();
  choices[key] = choice;
}

// Launches the kernel on the current stream of the tensors' device, which is the current one.
void launch(const Arguments& a, const Choice& choice, Plan plan, const Call& call) {
  plan.bfloat16 = a.kind == BFLOAT16, plan.activation = a.activation, plan.epilogue = choice.epilogue, plan.width = choice.width;
  const int code = choice.run(&plan, &call, stream_on(a.x->device()));
  TORCH_CHECK(code == 0, "gated_linear: the CUDA launch must succeed, got ", choice.explain(code), "; use impl=\"triton\"");
}

// Writes y, which is contiguous, and both pre-activations u and g (M, F) if they are given.
void forward(const Arguments& a, const Operands& of, const Choice& choice, const Tensor& y, const Tensor& u = {}, const Tensor& g = {}) {
  Plan plan{.rows = a.rows(), .hidden = a.hidden, .depth = a.x->size(-1), .x_stride = of.x_stride, .value_stride = of.value_stride,
            .gate_stride = of.gate_stride, .y_stride = a.hidden};
  plan.value_bias_stride = plan.gate_bias_stride = a.bias != nullptr;
  Call call{.x = of.x, .value = of.value, .gate = of.gate, .y = y.mutable_data_ptr()};
  call.value_bias = of.value_bias, call.gate_bias = of.gate_bias;
  if (u.defined()) {
    plan.u_stride = u.stride(0), plan.g_stride = g.stride(0);
    call.u = u.mutable_data_ptr(), call.g = g.mutable_data_ptr();
  }
  launch(a, choice, plan, call);
}

// A new y.
Tensor computed(const Arguments& a, const Operands& operands, const Choice& choice) {
  const OnDevice on_device(a.x->device());
  std::array<int64_t, 4> sizes{}, strides{};  // as many as `dense` allows
  const auto dims = a.x->dim();
  std::copy_n(a.x->sizes().begin(), dims, sizes.begin());
  sizes[dims - 1] = a.hidden;
  for (int64_t i = dims - 1, step = 1; i >= 0; step *= sizes[i--]) strides[i] = step;
  const GilReleased no_gil;
  Tensor y = empty(*a.x, {sizes.data(), size_t(dims)}, {strides.data(), size_t(dims)});
  forward(a, operands, choice, y);
  return y;
}

using Pair = std::pair<Tensor, Tensor>;  // (M, F) each, of value and gate

// Writes the gradient of the pre-activations, which may be in the same memory, from dy; or from dz, and then y as well. Returns the
// sums of its columns (2, F), value first, if they are wanted.
Tensor gate_gradient(const Arguments& a, const Wanted& wanted, const Choice& choice, const Pair& preact, const Pair& dpreact,
                     const Tensor& y) {
  const auto& [u, g] = preact;
  const auto& [du, dg] = dpreact;
  const Tensor &from = *wanted.upstream, *const down = wanted.w_down;
  const int64_t rows = a.rows(), hidden = a.hidden;
  Plan plan{.rows = rows, .hidden = hidden, .depth = from.size(1), .x_stride = from.stride(0)};
  plan.u_stride = du.stride(0), plan.g_stride = dg.stride(0), plan.first_stride = u.stride(0), plan.second_stride = g.stride(0);
  Call call{.x = from.const_data_ptr(), .u = du.mutable_data_ptr(), .g = dg.mutable_data_ptr(), .first = u.const_data_ptr(),
            .second = g.const_data_ptr()};
  if (down != nullptr) {
    plan.value_stride = down->stride(0), plan.y_stride = y.stride(0);
    call.value = down->const_data_ptr(), call.y = y.mutable_data_ptr();
  }
  Tensor dbias, sums;
  if (wanted.bias) {
    const int64_t each = down == nullptr ? GATE_ROWS : ROWS;
    dbias = empty(*a.x, {2, hidden}, {hidden, 1}, at::kFloat);
    sums = empty(*a.x, {(rows + each - 1) / each, 2, hidden}, {2 * hidden, hidden, 1}, at::kFloat);
    call.sums = sums.mutable_data_ptr<float>(), call.dbias = dbias.mutable_data_ptr<float>();
  }
  launch(a, choice, plan, call);
  return dbias;
}

}  // namespace gpu
}  // namespace
