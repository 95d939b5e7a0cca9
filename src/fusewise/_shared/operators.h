// Shared by the host fast paths: registered operators in C++, for calls by torch.compile's graphs and through torch.ops.

#pragma once

#include <torch/csrc/jit/runtime/operator.h>
#include <torch/library.h>

#include "host.h"

namespace {

using c10::IValue;
using torch::jit::Stack;

// Autograd kernel: a call that records no gradient redispatches without Python; others go to the autograd function in Python.
void at_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const auto records = [](const Tensor& x) { return x.requires_grad(); };
  const auto wanted = [&](const IValue& value) {
    if (value.isTensor()) return records(value.toTensor());
    const auto list = value.isTensorList() ? value.toTensorVector() : std::vector<Tensor>();
    return std::any_of(list.begin(), list.end(), records);
  };
  if (c10::GradMode::is_enabled() && std::any_of(arguments.begin(), arguments.end(), wanted))
    op.callBoxedForDispatchKey(DispatchKey::Autograd, *stack);
  else
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Takes kernels of our operators for tensors with this key, for the lifetime of the process; they override Python's.
torch::Library& kernels_for(DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, "fusewise", key, __FILE__, __LINE__);
}

// Register `at_autograd` for operators.
void register_at_autograd(std::initializer_list<const char*> names) {
  for (const DispatchKey key : {DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA}) {
    torch::Library& library = kernels_for(key);
    for (const char* const name : names) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&at_autograd>());
  }
}

}  // namespace
