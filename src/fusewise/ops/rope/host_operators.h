// The operators of `_op.py` in C++, for the tensors of CPUs and GPUs: see host.cpp.
//
// What reaches a kernel here has been through torch's dispatcher: tensors are plain, autograd and transforms are outside.
// A call that has been before is launched. Any other goes on to the operator in Python, which plans and raises, and is then
// kept, with the plan that Python makes of its tensors.

#pragma once

#include <torch/csrc/jit/runtime/operator.h>
#include <torch/library.h>

#include "host_backward.h"

namespace {

using c10::IValue;
using torch::jit::Stack;

PyObject* planned = nullptr;  // `_host._planned`

// The arguments of an operator: its N tensors, COMMON, and by form N lists of strides, N tensors to write to, or nothing.
enum Common { OP_TABLE, OP_SIN, OP_POSITIONS, OP_OFFSETS, OP_BOUNDS, OP_OFFSET, OP_SPEC, OP_IMPL, COMMON };

template <Form FORM, int N>
struct Operands {
  static constexpr int COUNT = N + COMMON + (FORM == IN_PLACE ? 0 : N);
  const Tensor *x[2] = {}, *y[2] = {}, *given[5] = {};  // given: table, sin, positions, offsets, bounds
  Key key;

  // Whether this is a call that can be kept.
  bool read(const IValue* a) {
    key.add(int64_t(OPERATOR + FORM)), key.add(int64_t(N));
    for (int o = 0; o < N; ++o) {
      if (!add(a[o], x[o])) return false;
      y[o] = x[o];
      if (FORM != GIVEN) continue;
      if (!add(a[N + COMMON + o], y[o])) return false;
      key.add(int64_t(distance(*x[o], *y[o]) == 0));
    }
    for (int i = OP_TABLE; i <= OP_BOUNDS; ++i) {
      if (a[N + i].isNone()) key.add(int64_t(0));
      else if (!add(a[N + i], given[i])) return false;
    }
    for (int i = OP_SPEC; i <= OP_IMPL; ++i)
      if (!key.add(a[N + i].toStringRef())) return false;
    for (int o = 0; FORM == NEW && o < N; ++o) {
      if (!a[N + COMMON + o].isIntList()) return false;
      const auto strides = a[N + COMMON + o].toIntList();
      if (strides.size() > 4) return false;
      key.add(static_cast<int64_t>(strides.size()));
      for (const int64_t stride : strides) key.add(stride);
    }
    return a[N + OP_OFFSET].isInt();
  }

 private:
  bool add(const IValue& value, const Tensor*& to) {
    to = &value.toTensor();
    if (!to->defined() || !dense(*to)) return false;
    key.add(*to);
    return true;
  }
};

// Keep a call that Python has just served: `arguments` are what it was given, `ys` what it wrote.
void learn(const Key& key, const IValue* arguments, int count, const Tensor (&ys)[2]) {
  const pybind11::gil_scoped_acquire gil;
  const IValue* const common = arguments + count;
  const auto tensors = [count](const auto& at) {
    return count == 1 ? Py_BuildValue("(N)", THPVariable_Wrap(at(0)))
                      : Py_BuildValue("(NN)", THPVariable_Wrap(at(0)), THPVariable_Wrap(at(1)));
  };
  const auto optional = [common](int i) {
    return common[i].isNone() ? Py_NewRef(Py_None) : THPVariable_Wrap(common[i].toTensor());
  };
  const auto result = pybind11::reinterpret_steal<pybind11::object>(PyObject_CallFunction(
      planned, "NNNNNNNLss", tensors([&](int o) { return arguments[o].toTensor(); }), tensors([&](int o) { return ys[o]; }),
      optional(OP_TABLE), optional(OP_SIN), optional(OP_POSITIONS), optional(OP_OFFSETS), optional(OP_BOUNDS),
      static_cast<long long>(common[OP_OFFSET].toInt()), common[OP_SPEC].toStringRef().c_str(),
      common[OP_IMPL].toStringRef().c_str()));
  if (!result) {
    python_error error;
    error.persist();
    throw std::move(error);
  }
  auto entry = std::make_shared<Entry>();
  entry->key.assign(key.words, key.words + key.count);
  entry->native = !result.is_none();
  if (entry->native) {
    const auto [plan, sin_distance] = result.cast<std::pair<std::string, int64_t>>();
    TORCH_CHECK_TYPE(plan.size() == sizeof(Plan), "rope: a plan has ", sizeof(Plan), " bytes, got ", plan.size());
    std::memcpy(&entry->plan, plan.data(), sizeof(Plan));
    entry->sin_distance = sin_distance;
    for (int o = 0; o < count; ++o) entry->dense[o] = ys[o].strides().vec();
  }
  cache.keep(key, std::move(entry));
}

template <Form FORM, int N>
void operate(const c10::OperatorHandle& op, Stack* stack) {
  using Read = Operands<FORM, N>;
  const IValue* const a = stack->data() + stack->size() - Read::COUNT;
  Read read;
  const bool readable = enabled && read.read(a);
  const Remembered entry = readable ? cache.find(read.key) : nullptr;
  if (!readable || (entry != nullptr && !entry->native))
    return op.callBoxedForDispatchKey(DispatchKey::CompositeExplicitAutograd, *stack);
  if (entry == nullptr) {
    const std::vector<IValue> arguments(a, a + Read::COUNT);
    op.callBoxedForDispatchKey(DispatchKey::CompositeExplicitAutograd, *stack);
    Tensor ys[2];
    for (int o = 0; o < N; ++o)
      ys[o] = FORM == NEW ? torch::jit::peek(*stack, o, N).toTensor() : arguments[FORM == GIVEN ? N + COMMON + o : o].toTensor();
    learn(read.key, arguments.data(), N, ys);
    return;
  }
  const c10::Device device = read.x[0]->device();
  const There there(device);
  Call call = call_on(*entry, read.x[0], read.x[N - 1], read.given[OP_TABLE], read.given[OP_SIN], read.given[OP_POSITIONS],
                      read.given[OP_OFFSETS], read.given[OP_BOUNDS], a[N + OP_OFFSET].toInt());
  Tensor made[2];
  for (int o = 0; FORM == NEW && o < N; ++o) read.y[o] = &(made[o] = empty(*read.x[o], entry->dense[o]));
  for (int o = 0; o < 2; ++o) call.y[o] = read.y[N == 2 ? o : 0]->mutable_data_ptr();
  launch(entry->plan, call, device);
  for (int o = 0; FORM != NEW && o < N; ++o)
    if (!read.y[o]->is_inference()) read.y[o]->unsafeGetTensorImpl()->bump_version();
  torch::jit::drop(*stack, Read::COUNT);
  for (int o = 0; FORM == NEW && o < N; ++o) stack->emplace_back(std::move(made[o]));
}

// Take the operators over from Python, for as long as the process lives.
void register_operators() {
  for (const DispatchKey key : {DispatchKey::CPU, DispatchKey::CUDA}) {
    auto& library = *new torch::Library(torch::Library::IMPL, "fusewise", key, __FILE__, __LINE__);
    library.impl("rope", torch::CppFunction::makeFromBoxedFunction<&operate<NEW, 1>>());
    library.impl("rope_qk", torch::CppFunction::makeFromBoxedFunction<&operate<NEW, 2>>());
    library.impl("rope_out", torch::CppFunction::makeFromBoxedFunction<&operate<GIVEN, 1>>());
    library.impl("rope_qk_out", torch::CppFunction::makeFromBoxedFunction<&operate<GIVEN, 2>>());
    library.impl("rope_", torch::CppFunction::makeFromBoxedFunction<&operate<IN_PLACE, 1>>());
    library.impl("rope_qk_", torch::CppFunction::makeFromBoxedFunction<&operate<IN_PLACE, 2>>());
  }
}

}  // namespace
