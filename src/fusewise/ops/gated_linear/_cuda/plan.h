// Arguments of `fusewise_gated_linear` (gated_linear.cu): sizes, strides in elements and kinds, and addresses. `_cuda/__init__.py`
// packs both structs in this order. Matrices have contiguous columns, and starts and rows aligned to 16 bytes.

#pragma once

#include <cstdint>

// Epilogues. Y, PREACT and GRADIENT take u and g from the product and write y; y, u and g; or du and dg, reading dy. DOWN takes dy from
// the product, reads u and g, and writes y, du and dg. GATE has no product: it reads dy, u and g, and writes du and dg. SIDE_n: Y with
// sideways tiles of n rows (tiles.cuh). FEW: Y for up to 160 rows (few_rows.cuh).
enum Epilogue { Y, PREACT, GRADIENT, DOWN, SIDE_192, SIDE_160, SIDE_128, GATE, FEW };
constexpr int GATE_ROWS = 32;  // minimum rows of a partial sum without a product

struct Plan {
  int64_t rows, hidden, depth;
  int64_t x_stride, value_stride, gate_stride, y_stride, u_stride, g_stride, first_stride, second_stride;  // row strides
  int64_t value_bias_stride, gate_bias_stride;
  int64_t bfloat16;  // 1: bfloat16, 0: float16
  int64_t activation;  // as in `_problem.ACTIVATIONS`
  int64_t epilogue;
  int64_t width;  // FEW: features of a tile
};

struct Call {
  const void *x, *value, *gate;        // (rows, depth), (hidden, depth) twice; DOWN: W_down (depth, hidden), null; GATE: only dy
  const void *y, *u, *g;               // (rows, hidden), outputs: u and g or their gradients; null if not written
  const void *first, *second;          // (rows, hidden), inputs: dy and null, or u and g; or null
  const void *value_bias, *gate_bias;  // (hidden), or null
  float *sums, *dbias;                 // workspace (⌈rows / 128⌉, 2, hidden), GATE: / GATE_ROWS, and (2, hidden); null if not wanted
};
