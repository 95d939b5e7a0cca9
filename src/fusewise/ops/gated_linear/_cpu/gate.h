// A call of the gate as native code receives it; `_cpu/__init__.py` and `host.cpp` pack the fields in this order.

#pragma once

#include <cstdint>

enum Kind : int64_t { FLOAT32, BFLOAT16, FLOAT16 };
enum Activation : int64_t { GELU_TANH, GELU, SILU, RELU, SIGMOID, IDENTITY };

// Row strides in elements; absent tensors are null.
struct Call {
  const void *u, *g, *dy;
  void *y, *du, *dg;
  float* sums;  // (blocks of rows, 2, columns), value first
  int64_t stride_preact, stride_dy, stride_y, stride_dpreact;
  int64_t rows, columns, kind, activation, threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel, or null
};
