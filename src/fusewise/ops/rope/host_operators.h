// The operators of `_op.py` in C++ for CPU and CUDA tensors: see host.cpp.
//
// Calls arrive through torch's dispatcher, below autograd and transforms, so tensors are plain. A cached call is launched
// directly. Any other call is forwarded to the Python operator, which plans and raises, and is cached afterwards with the plan
// that Python makes.

#pragma once

#include <torch/csrc/jit/runtime/operator.h>
#include <torch/library.h>

#include "host_backward.h"

namespace {

using c10::IValue;
using torch::jit::Stack;

PyObject* planned = nullptr;  // `_host._planned`

// The arguments of an operator: its tensors, the COMMON ones, and depending on the form output strides, output tensors or nothing.
enum Common { OP_TABLE, OP_SIN, OP_POSITIONS, OP_OFFSETS, OP_BOUNDS, OP_OFFSET, OP_SPEC, OP_IMPL, COMMON };

// N: how many of q and k are written. In form CACHED the tensors are q, k, v, the two caches, slots and block table; the last two
// may be missing.
template <Form FORM, int N>
struct Operands : Tensors {
  static constexpr int OWN = FORM == CACHED ? 7 : N, COUNT = OWN + COMMON + (FORM == NEW || FORM == GIVEN ? N : 0);
  const IValue* a;
  Key key;

  // Read the arguments; returns false for a call that cannot be cached.
  bool read() {
    const Tensor** const own[] = {&x[0], &x[1], &v, &caches[0], &caches[1], &slots, &block_table};
    const Tensor** const common[] = {&table, &sin, &positions, &offsets, &bounds};
    key.add(int64_t(OPERATOR + FORM)), key.add(int64_t(N));
    for (int i = 0; i < OWN; ++i)
      if (!add(a[i], *own[i])) return false;
    for (int i = OP_TABLE; i <= OP_BOUNDS; ++i)
      if (!add(a[OWN + i], *common[i])) return false;
    for (int o = 0; o < N; ++o) {
      y[o] = x[o];
      if (FORM != GIVEN) continue;
      if (!add(a[OWN + COMMON + o], y[o])) return false;
      key.add(int64_t(distance(*x[o], *y[o]) == 0));
    }
    for (int i = OP_SPEC; i <= OP_IMPL; ++i)
      if (!key.add(a[OWN + i].toStringRef())) return false;
    for (int o = 0; FORM == NEW && o < N; ++o) {
      if (!a[OWN + COMMON + o].isIntList()) return false;
      const auto strides = a[OWN + COMMON + o].toIntList();
      if (strides.size() > 4) return false;
      key.add(static_cast<int64_t>(strides.size()));
      for (const int64_t stride : strides) key.add(stride);
    }
    return a[OWN + OP_OFFSET].isInt();
  }

 private:
  bool add(const IValue& value, const Tensor*& to) {
    if (value.isNone()) {
      key.add(int64_t(0));
      return true;
    }
    to = &value.toTensor();
    if (!to->defined() || !dense(*to)) return false;
    key.add(*to);
    return true;
  }
};

PyObject* wrapped(const IValue& value) {
  if (value.isTensor()) return THPVariable_Wrap(value.toTensor());
  if (value.isInt()) return PyLong_FromLongLong(value.toInt());
  if (value.isString()) return PyUnicode_FromString(value.toStringRef().c_str());
  return Py_NewRef(Py_None);
}

// Cache a call that Python has just served: `arguments` are its tensors and the common ones, `ys` its outputs for q and k.
void learn(const Key& key, Form form, const std::vector<IValue>& arguments, const variable_list& ys) {
  const pybind11::gil_scoped_acquire gil;
  const auto tuple = [](const auto& values) {
    pybind11::tuple made(values.size());
    for (size_t i = 0; i < values.size(); ++i) PyTuple_SET_ITEM(made.ptr(), i, wrapped(values[i]));
    return made;
  };
  const auto result = pybind11::reinterpret_steal<pybind11::object>(PyObject_CallFunction(
      planned, "iOO", int(form), tuple(arguments).ptr(), tuple(ys).ptr()));
  if (!result) {
    python_error error;
    error.persist();
    throw std::move(error);
  }
  auto entry = std::make_shared<Entry>(key, form);
  entry->native = !result.is_none();
  if (entry->native) {
    const auto [plan, sin_distance] = result.cast<std::pair<std::string, int64_t>>();
    entry->take(plan.data(), plan.size());
    entry->sin_distance = sin_distance;
    for (size_t o = 0; o < ys.size(); ++o) entry->dense[o] = ys[o].strides().vec();
  }
  cache.keep(key, std::move(entry));
}

template <Form FORM, int N>
void operate(const c10::OperatorHandle& op, Stack* stack) {
  using Read = Operands<FORM, N>;
  Read read;
  read.a = stack->data() + stack->size() - Read::COUNT;
  const bool readable = enabled && read.read();
  const Remembered entry = readable ? cache.find(read.key) : nullptr;
  if (!readable || (entry != nullptr && !entry->native))
    return op.callBoxedForDispatchKey(DispatchKey::CompositeExplicitAutograd, *stack);
  if (entry == nullptr) {
    std::vector<IValue> arguments(read.a, read.a + Read::COUNT);
    op.callBoxedForDispatchKey(DispatchKey::CompositeExplicitAutograd, *stack);
    variable_list ys(N);
    for (int o = 0; o < N; ++o)
      ys[o] = FORM == NEW ? torch::jit::peek(*stack, o, N).toTensor()
                          : arguments[FORM == GIVEN ? Read::OWN + COMMON + o : o].toTensor();
    arguments.resize(Read::OWN + COMMON);
    return learn(read.key, FORM, arguments, ys);
  }
  Tensor made[2];
  run<FORM>(*entry, read, read.a[Read::OWN + OP_OFFSET].toInt(), made, [](const auto& launch) { launch(); });
  torch::jit::drop(*stack, Read::COUNT);
  for (int o = 0; FORM == NEW && o < N; ++o) stack->emplace_back(std::move(made[o]));
}

// Autograd kernel: a call that records no gradient redispatches without Python; others go to the autograd function in Python.
void at_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const auto wanted = [](const IValue& value) { return value.isTensor() && value.toTensor().requires_grad(); };
  if (c10::GradMode::is_enabled() && std::any_of(arguments.begin(), arguments.end(), wanted))
    op.callBoxedForDispatchKey(DispatchKey::Autograd, *stack);
  else
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Override the Python kernels of the operators for the lifetime of the process.
void register_operators() {
  for (const DispatchKey key : {DispatchKey::CPU, DispatchKey::CUDA}) {
    auto& library = *new torch::Library(torch::Library::IMPL, "fusewise", key, __FILE__, __LINE__);
    library.impl("rope", torch::CppFunction::makeFromBoxedFunction<&operate<NEW, 1>>());
    library.impl("rope_qk", torch::CppFunction::makeFromBoxedFunction<&operate<NEW, 2>>());
    library.impl("rope_out", torch::CppFunction::makeFromBoxedFunction<&operate<GIVEN, 1>>());
    library.impl("rope_qk_out", torch::CppFunction::makeFromBoxedFunction<&operate<GIVEN, 2>>());
    library.impl("rope_", torch::CppFunction::makeFromBoxedFunction<&operate<IN_PLACE, 1>>());
    library.impl("rope_qk_", torch::CppFunction::makeFromBoxedFunction<&operate<IN_PLACE, 2>>());
    library.impl("rope_and_cache_keep_k_", torch::CppFunction::makeFromBoxedFunction<&operate<CACHED, 1>>());
    library.impl("rope_and_cache_", torch::CppFunction::makeFromBoxedFunction<&operate<CACHED, 2>>());
  }
  for (const DispatchKey key : {DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA}) {
    auto& library = *new torch::Library(torch::Library::IMPL, "fusewise", key, __FILE__, __LINE__);
    for (const char* const name : {"rope", "rope_qk"}) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&at_autograd>());
  }
}

}  // namespace
