// Arguments of a call, the cache key made from them, and the cache entry: see host.cpp.

#pragma once

#include <c10/core/InferenceMode.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "../../_shared/host.h"
#include "../qk_norm_rope/plan.h"
#include "../rope_and_cache/plan.h"

namespace {

int64_t distance(const Tensor& x, const Tensor& y) {
  return static_cast<const char*>(y.const_data_ptr()) - static_cast<const char*>(x.const_data_ptr());
}

// --- The arguments of a call and its key -----------------------------------------------------------------------------

struct Key {
  static constexpr size_t MOST = 384;
  int64_t words[MOST];
  size_t count = 0;

  void add(int64_t word) { words[count++] = word; }

  void add(const Tensor& x) {
    const int64_t kind = static_cast<int64_t>(x.scalar_type());
    add(static_cast<int64_t>(x.key_set().raw_repr()));
    add(kind | (x.dim() << 8) | (int64_t(x.device().index()) << 16) | (int64_t(1) << 40));
    for (const int64_t size : x.sizes()) add(size);
    for (const int64_t stride : x.strides()) add(stride);
  }

  // An option: None, a bool, an int, a float, a short string or a tuple of up to three ints. Returns false for anything else.
  bool add(PyObject* x) {
    if (x == Py_None || x == Py_True || x == Py_False) {
      add(x == Py_None ? 1 : x == Py_True ? 2 : 3);
    } else if (PyLong_CheckExact(x)) {
      int overflow = 0;
      add(4);
      add(PyLong_AsLongLongAndOverflow(x, &overflow));
      return overflow == 0;
    } else if (PyUnicode_CheckExact(x)) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(x, &size);
      if (text == nullptr) PyErr_Clear();  // not encodable, so not a valid option: validation reports it
      if (text == nullptr || size > 24) return false;
      int64_t padded[3] = {};
      std::memcpy(padded, text, size);
      add(5 + (size << 8));
      for (const int64_t word : padded) add(word);
    } else if (PyFloat_CheckExact(x)) {
      const double value = PyFloat_AS_DOUBLE(x);
      int64_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      add(6);
      add(bits);
    } else if (PyTuple_CheckExact(x) && PyTuple_GET_SIZE(x) <= 3) {
      add(7 + (PyTuple_GET_SIZE(x) << 8));
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(x); ++i)
        if (!PyLong_CheckExact(PyTuple_GET_ITEM(x, i)) || !add(PyTuple_GET_ITEM(x, i))) return false;
    } else {
      return false;
    }
    return true;
  }

  // A string; returns false if it is too long for a key.
  bool add(const std::string& text) {
    if (text.size() > 240) return false;
    add(static_cast<int64_t>(text.size()));
    const size_t whole = (text.size() + 7) / 8;
    if (whole > 0) words[count + whole - 1] = 0;
    std::memcpy(words + count, text.data(), text.size());
    count += whole;
    return true;
  }

  size_t hash() const {
    uint64_t h = count;
    for (size_t i = 0; i < count; ++i) {
      h = (h ^ static_cast<uint64_t>(words[i])) * 0x9e3779b97f4a7c15u;
      h ^= h >> 32;
    }
    return h;
  }
};

// Where the output goes: new tensors, `out`, in place; CACHED is `rope_and_cache_`, NORMED `qk_norm_rope`, NORM_GRAD the operator of its
// gradients. The first word of a key, plus OPERATOR in keys of operator calls.
enum Form : int64_t { NEW, GIVEN, IN_PLACE, CACHED, NORMED, NORM_GRAD, OPERATOR = 8 };

// The arguments of `fusewise.rope` in order; then OUT in form GIVEN, or the additional arguments of `rope_and_cache_` in CACHED, of
// `qk_norm_rope` in NORMED.
enum Argument {
  Q, K, COS, SIN, COS_SIN_, ANGLES_, INV_FREQ_, POSITIONS, OFFSET, BOUNDS, FIRST_OPTION, OUT = 20,
  V = OUT, KEY_CACHE, VALUE_CACHE, SLOTS, BLOCK_TABLE, CACHE_LAYOUT, WRITE_K, ALL_CACHED,
  Q_WEIGHT = OUT, K_WEIGHT, EPS, WEIGHT_OFFSET, OVER, ALL_NORMED
};

// The tensors of a call; null if absent.
struct Tensors {
  const Tensor *x[2] = {}, *y[2] = {};  // y: the written tensors, either of x or new ones
  const Tensor *table = nullptr, *sin = nullptr, *positions = nullptr, *offsets = nullptr, *bounds = nullptr;
  const Tensor *v = nullptr, *caches[2] = {}, *slots = nullptr, *block_table = nullptr;
  const Tensor* weights[2] = {};
};

struct Arguments : Tensors {
  int64_t offset = 0;
  int operands = 1;
  Key key;

  static constexpr int count(Form form) {
    return form == CACHED ? ALL_CACHED : form == NORMED ? ALL_NORMED : form == GIVEN ? OUT + 1 : OUT;
  }

  // Read the arguments; returns false for a call that cannot be cached.
  bool read(PyObject* const* given, Form form) {
    if (!no_active_modes()) return false;
    key.add(int64_t(form));
    for (int i = 0; i < count(form); ++i)
      if (!read(given[i], Argument(i), form)) return false;
    if (x[0] == nullptr || table == nullptr) return false;
    operands = x[1] == nullptr ? 1 : 2;
    if (form == NEW || form == NORMED) return true;
    if (form == GIVEN && !read_out(given[OUT])) return false;
    if (form != GIVEN) y[0] = x[0], y[1] = form == CACHED && given[WRITE_K] != Py_True ? nullptr : x[1];
    return !(form != IN_PLACE && records()) && writable();
  }

  bool records() const {
    const auto wanted = [](const Tensor* one) { return one != nullptr && one->requires_grad(); };
    if (!at::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) return false;
    return wanted(x[0]) || wanted(x[1]) || wanted(weights[0]) || wanted(weights[1]);
  }

 private:
  bool read(PyObject* object, Argument i, Form form) {
    if (i >= (form == NORMED ? EPS : CACHE_LAYOUT) || (i >= FIRST_OPTION && i < OUT)) return key.add(object);
    if (i == OUT && form == GIVEN) return true;  // read last, when the number of operands is known
    if (object == Py_None) {
      key.add(int64_t(1));
      return true;
    }
    if (i == OFFSET && PyLong_CheckExact(object)) {  // its value is not in the key
      int overflow = 0;
      offset = PyLong_AsLongLongAndOverflow(object, &overflow);
      key.add(int64_t(4));
      return overflow == 0 && offset >= 0;
    }
    if (!add(object)) return false;
    const Tensor& tensor = THPVariable_Unpack(object);
    const bool weight = form == NORMED && i >= Q_WEIGHT;
    (weight ? weights[i - Q_WEIGHT] : place(i)) = &tensor;
    return i <= K || weight || !tensor.requires_grad();
  }

  bool add(PyObject* object) {
    if (!THPVariable_CheckExact(object) || !dense(THPVariable_Unpack(object))) return false;
    key.add(THPVariable_Unpack(object));
    return true;
  }

  const Tensor*& place(Argument i) {
    switch (i) {
      case Q: return x[0];
      case K: return x[1];
      case SIN: return sin;
      case POSITIONS: return positions;
      case OFFSET: return offsets;
      case BOUNDS: return bounds;
      case V: return v;
      case KEY_CACHE: return caches[0];
      case VALUE_CACHE: return caches[1];
      case SLOTS: return slots;
      case BLOCK_TABLE: return block_table;
      default: return table;
    }
  }

  // `out`: a tuple with one tensor per operand, or a single tensor.
  bool read_out(PyObject* out) {
    const bool several = PyTuple_CheckExact(out);
    if (several ? PyTuple_GET_SIZE(out) != operands : operands != 1) return false;
    for (int o = 0; o < operands; ++o) {
      PyObject* const object = several ? PyTuple_GET_ITEM(out, o) : out;
      if (!add(object)) return false;
      y[o] = &THPVariable_Unpack(object);
      if (y[o]->requires_grad()) return false;
    }
    return true;
  }

  // Whether the call may write without asking Python, which requires that nothing outside the key matters. Python rejects
  // overlapping tensors; overlap depends on their distance, which is added to the key if their storages intersect.
  bool writable() {
    const Tensor* all[16];
    int count = 0;
    for (const Tensor* one : {y[0], y[1], caches[0], caches[1]})
      if (one != nullptr) all[count++] = one;
    const int written = count;
    for (const Tensor* one : {x[0], x[1], table, sin, positions, offsets, bounds, v, slots, block_table})
      if (one != nullptr && one != y[0] && one != y[1]) all[count++] = one;
    const char *first[16], *last[16];
    for (int i = 0; i < count; ++i) {
      const c10::Storage& storage = all[i]->storage();
      first[i] = static_cast<const char*>(storage.data()), last[i] = first[i] + storage.nbytes();
    }
    for (int i = 0; i < written; ++i) {
      if (all[i]->is_inference() && !c10::InferenceMode::is_enabled()) return false;
      for (int j = i + 1; j < count; ++j)
        if (first[i] < last[j] && first[j] < last[i]) key.add(int64_t(i * 16 + j)), key.add(distance(*all[i], *all[j]));
    }
    return true;
  }
};

// --- The cache -------------------------------------------------------------------------------------------------------

struct Entry {
  std::vector<int64_t> key;
  Form form;
  bool native = true;  // false: Python launches it, and the other fields are unset
  union {  // all begin with the plan of the rotation
    Plan rotation;
    CachePlan cached;
    NormPlan normed;
    NormGradPlan norm_grad;
  };
  int64_t sin_distance = 0;  // bytes from cos to sin if both are in one tensor
  int64_t most_offset = 0;   // the largest offset for which validation holds
  // For the backward: the dimensions of q that are batch (-1: none), token and head; the strides of new tensors like q and k;
  // and arguments of the Python operators.
  int64_t dims[3];
  std::vector<int64_t> dense[2];
  std::string spec, impl;

  Entry(const Key& of, Form form) : key(of.words, of.words + of.count), form(form), norm_grad{} {}

  // Unpack the plan that Python packed.
  void take(const char* packed, size_t size) {
    const size_t wanted = form == CACHED      ? sizeof(CachePlan)
                          : form == NORMED    ? sizeof(NormPlan)
                          : form == NORM_GRAD ? sizeof(NormGradPlan)
                                              : sizeof(Plan);
    TORCH_CHECK_TYPE(size == wanted, "rope: a plan has ", wanted, " bytes, got ", size);
    std::memcpy(&rotation, packed, size);
  }

  // The (batch, token, head) strides of x, as stored in a plan.
  void strides(at::IntArrayRef of, int64_t (&to)[3]) const {
    for (int i = 0; i < 3; ++i) to[i] = dims[i] < 0 ? 0 : of[dims[i]];
  }
};
using Remembered = std::shared_ptr<const Entry>;

// Training uses a few keys, serving some hundred; the bound only guards against a leak.
class Cache {
 public:
  Remembered find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (latest != nullptr && same(latest->key, key)) return latest;  // all layers of a model make the same call
    const auto [first, last] = entries.equal_range(key.hash());
    for (auto i = first; i != last; ++i)
      if (same(i->second->key, key)) return latest = i->second;
    return nullptr;
  }
  void keep(const Key& key, Remembered entry) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (entries.size() >= 4096) entries.clear();
    entries.emplace(key.hash(), std::move(entry));
  }
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex);
    entries.clear();
    latest = nullptr;
  }
  std::mutex mutex;

 private:
  static bool same(const std::vector<int64_t>& words, const Key& key) {
    return words.size() == key.count && std::memcmp(words.data(), key.words, key.count * sizeof(int64_t)) == 0;
  }
  std::unordered_multimap<size_t, Remembered> entries;
  Remembered latest;
};
Cache& cache = *new Cache;  // never destroyed: threads may still run at exit

}  // namespace
