// The operators of `_op.py` in C++ for CPU and CUDA tensors: see host.cpp.
//
// Calls arrive through torch's dispatcher, below autograd and transforms, so tensors are plain. A cached call is launched
// directly. Any other call is forwarded to the Python operator, which plans and raises, and is cached afterwards with the plan
// that Python makes.

#pragma once

#include "../../_shared/operators.h"
#include "host_backward.h"

namespace {

PyObject* planned = nullptr;  // `_host._planned`

// The arguments of an operator: its tensors, the COMMON ones, and depending on the form output strides, output tensors or nothing.
enum Common { OP_TABLE, OP_SIN, OP_POSITIONS, OP_OFFSETS, OP_BOUNDS, OP_OFFSET, OP_SPEC, OP_IMPL, COMMON };

// Add a tensor argument, which may be missing, to a key; returns false for a tensor that no key describes. Graphs pass tensors that
// are written to with one more dimension (`with_tail` of `_register.py`): plans, made by Python, are without it.
bool read_tensor(const IValue& value, Key& key, const Tensor*& to, int64_t most = 4) {
  if (value.isNone()) {
    key.add(int64_t(0));
    return true;
  }
  to = &value.toTensor();
  if (!to->defined() || !dense(*to, most)) return false;
  key.add(*to);
  return true;
}

// The tensors among the common arguments, of which `a` is the first.
bool read_common(const IValue* a, Key& key, Tensors& to) {
  const Tensor** const common[] = {&to.table, &to.sin, &to.positions, &to.offsets, &to.bounds};
  for (int i = OP_TABLE; i <= OP_BOUNDS; ++i)
    if (!read_tensor(a[i], key, *common[i])) return false;
  return a[OP_OFFSET].isInt();
}

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
    key.add(int64_t(OPERATOR + FORM)), key.add(int64_t(N));
    for (int i = 0; i < OWN; ++i)
      if (!read_tensor(a[i], key, *own[i], FORM == NEW ? 4 : 5)) return false;
    if (!read_common(a + OWN, key, *this)) return false;
    for (int o = 0; o < N; ++o) {
      y[o] = x[o];
      if (FORM != GIVEN) continue;
      if (!read_tensor(a[OWN + COMMON + o], key, y[o], 5)) return false;
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
    return true;
  }
};

// The arguments of `qk_norm_rope`: q and k, and their weights, in lists; the common ones, with eps, weight_offset and what is normalized
// together before the last. NORM_GRAD: first the gradients of the outputs, and last whether those of the weights are wanted.
template <Form FORM>
struct NormOperands : Tensors {
  static constexpr bool GRAD = FORM == NORM_GRAD;
  static constexpr int OWN = GRAD ? 3 : 2, ALL = OWN + COMMON + 3, COUNT = ALL + GRAD;
  const IValue* a;
  Key key;
  std::vector<Tensor> lists[OWN];
  const Tensor* dys[2] = {};

  const std::vector<Tensor>& xs() const { return lists[GRAD]; }
  const std::vector<Tensor>& given_weights() const { return lists[GRAD + 1]; }

  // Read the arguments; returns false for a call that cannot be cached.
  bool read() {
    const Tensor** const into[] = {dys, x, weights};
    key.add(int64_t(OPERATOR + FORM));
    for (int i = 0; i < OWN; ++i) {
      lists[i] = a[i].toTensorVector();
      if (lists[i].size() > 2) return false;
      key.add(static_cast<int64_t>(lists[i].size()));
      for (size_t o = 0; o < lists[i].size(); ++o) {
        into[i + !GRAD][o] = &lists[i][o];
        if (!lists[i][o].defined() || !dense(lists[i][o])) return false;
        key.add(lists[i][o]);
      }
    }
    if (xs().empty() || (GRAD && lists[0].size() != xs().size()) || !read_common(a + OWN, key, *this)) return false;
    for (int i = OWN + OP_SPEC; i < ALL; ++i) {
      if (a[i].isString()) {
        if (!key.add(a[i].toStringRef())) return false;
      } else {
        const double value = a[i].toDouble();
        int64_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        key.add(bits);
      }
    }
    return true;
  }

  // The arguments without lists and without the last of NORM_GRAD: the tensors come first, two or None of each list.
  std::vector<IValue> flat() const {
    std::vector<IValue> found;
    for (const auto& list : lists)
      for (size_t o = 0; o < 2; ++o) found.push_back(o < list.size() ? IValue(list[o]) : IValue());
    found.insert(found.end(), a + OWN, a + ALL);
    return found;
  }
};

PyObject* wrapped(const IValue& value) {
  if (value.isTensor()) return THPVariable_Wrap(value.toTensor());
  if (value.isInt()) return PyLong_FromLongLong(value.toInt());
  if (value.isDouble()) return PyFloat_FromDouble(value.toDouble());
  if (value.isString()) return PyUnicode_FromString(value.toStringRef().c_str());
  return Py_NewRef(Py_None);
}

// Cache a call that Python has just served: `arguments` are all but those that describe outputs, `ys` its outputs for q and k.
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

// The runtime of an AOTInductor package passes None for a list without entries (seen with torch 2.13 and 2.14).
template <typename T>
void none_to_empty(IValue* lists, int count) {
  for (int i = 0; i < count; ++i)
    if (lists[i].isNone()) lists[i] = c10::List<T>();
}

template <Form FORM, int N>
void operate(const c10::OperatorHandle& op, Stack* stack) {
  using Read = Operands<FORM, N>;
  Read read;
  IValue* const given = stack->data() + stack->size() - Read::COUNT;
  if constexpr (FORM == NEW) none_to_empty<int64_t>(given + Read::OWN + COMMON, N);
  read.a = given;
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

// Launch a cached call of `qk_norm_rope` or its gradients. Returns false if no kernel serves it.
template <Form FORM>
bool run_norm(const Entry& entry, NormOperands<FORM>& read, c10::List<Tensor>& results) {
  const int64_t offset = read.a[read.OWN + OP_OFFSET].toInt();
  if constexpr (FORM == NORMED) {
    Tensor made[2];
    run<NORMED>(entry, read, offset, made, [](const auto& launch) { launch(); });
    for (size_t o = 0; o < read.xs().size(); ++o) results.push_back(std::move(made[o]));
  } else {
    const bool of_weights = read.a[read.ALL].toBool();
    NormGradCall call{{call_on(entry, read, offset)}};
    for (size_t o = 0; o < read.xs().size(); ++o) {
      results.push_back(empty(*read.x[o], read.x[o]->sizes(), entry.dense[o]));
      call.norm.rotation.y[o] = results.get(o).mutable_data_ptr();
      call.norm.weights[o] = address(read.weights[o]), call.dy[o] = address(read.dys[o]);
    }
    for (size_t o = 0; of_weights && o < read.given_weights().size(); ++o) {
      const Tensor& weight = *read.weights[o];
      results.push_back(empty(weight, weight.sizes(), weight.strides()));
      call.dweights[o] = results.get(results.size() - 1).mutable_data_ptr();
    }
    return launch_norm_backward(entry.norm_grad, call, *read.x[0]);
  }
  return true;
}

template <Form FORM>
void operate_norm(const c10::OperatorHandle& op, Stack* stack) {
  using Read = NormOperands<FORM>;
  Read read;
  IValue* const given = stack->data() + stack->size() - Read::COUNT;
  none_to_empty<Tensor>(given, Read::OWN);
  read.a = given;
  const bool readable = enabled && read.read();
  const Remembered entry = readable ? cache.find(read.key) : nullptr;
  c10::List<Tensor> results;
  if (entry != nullptr && entry->native && run_norm(*entry, read, results)) {
    torch::jit::drop(*stack, Read::COUNT);
    stack->emplace_back(std::move(results));
    return;
  }
  const std::vector<IValue> arguments = readable ? read.flat() : std::vector<IValue>();
  op.callBoxedForDispatchKey(DispatchKey::CompositeExplicitAutograd, *stack);
  if (!readable || entry != nullptr) return;
  variable_list ys = torch::jit::peek(*stack, 0, 1).toTensorVector();
  ys.resize(read.xs().size());  // without gradients of weights
  learn(read.key, FORM, arguments, ys);
}

// Override the Python kernels of the operators for the lifetime of the process.
void register_operators() {
  for (const DispatchKey key : {DispatchKey::CPU, DispatchKey::CUDA}) {
    torch::Library& library = kernels_for(key);
    library.impl("rope", torch::CppFunction::makeFromBoxedFunction<&operate<NEW, 1>>());
    library.impl("rope_qk", torch::CppFunction::makeFromBoxedFunction<&operate<NEW, 2>>());
    library.impl("rope_out", torch::CppFunction::makeFromBoxedFunction<&operate<GIVEN, 1>>());
    library.impl("rope_qk_out", torch::CppFunction::makeFromBoxedFunction<&operate<GIVEN, 2>>());
    library.impl("rope_", torch::CppFunction::makeFromBoxedFunction<&operate<IN_PLACE, 1>>());
    library.impl("rope_qk_", torch::CppFunction::makeFromBoxedFunction<&operate<IN_PLACE, 2>>());
    library.impl("rope_and_cache_keep_k_", torch::CppFunction::makeFromBoxedFunction<&operate<CACHED, 1>>());
    library.impl("rope_and_cache_", torch::CppFunction::makeFromBoxedFunction<&operate<CACHED, 2>>());
    library.impl("qk_norm_rope", torch::CppFunction::makeFromBoxedFunction<&operate_norm<NORMED>>());
    library.impl("qk_norm_rope_grad", torch::CppFunction::makeFromBoxedFunction<&operate_norm<NORM_GRAD>>());
  }
  register_at_autograd({"rope", "rope_qk", "qk_norm_rope"});
}

}  // namespace
