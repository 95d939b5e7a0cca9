// The interface of `fusewise_gated_linear` (gated_linear.cu): sizes, strides in elements and kinds; and addresses. `_cuda/__init__.py`
// packs both in this order. Matrices are row-major with 16-byte-aligned starts and rows.

#pragma once

#include <cstdint>

// What a kernel computes. From the product of x with both weights: Y: y; PREACT: y, u and g; GRADIENT: du and dg, from dy. From the
// product dy = dz W_down: DOWN: y, du and dg, from u and g. Without a product: GATE: du and dg, from dy, u and g. SIDE_n: y, with the
// weights as left operand, in tiles of n rows (tiles.cuh). FEW: y of up to 208 rows, of up to 128 with u and g if given (few_rows.cuh).
// TF32_*: of float32 matrices, whose products round their operands to tf32.
enum Epilogue { Y, PREACT, GRADIENT, DOWN, SIDE_208, SIDE_192, SIDE_160, SIDE_144, SIDE_128, GATE, FEW, TF32_Y, TF32_PREACT };
constexpr int GATE_ROWS = 32;  // GATE: rows of a partial sum, at least

struct Plan {
  int64_t rows, hidden, depth;
  int64_t x_stride, value_stride, gate_stride, y_stride, u_stride, g_stride, first_stride, second_stride;  // of rows
  int64_t value_bias_stride, gate_bias_stride;
  int64_t bfloat16;  // else float16, or by the epilogue float32
  int64_t activation;  // as in `_problem.ACTIVATIONS`
  int64_t epilogue;
  int64_t width;  // FEW: features of a tile
};

struct Call {
  const void *x, *value, *gate;        // (rows, depth), (hidden, depth) twice; DOWN: W_down (depth, hidden), null; GATE: dy alone
  const void *y, *u, *g;               // (rows, hidden), written: u and g or their gradients; null what is not made
  const void *first, *second;          // (rows, hidden), read: dy and null, or u and g; or null
  const void *value_bias, *gate_bias;  // (hidden), or null
  float *sums, *dbias;                 // (⌈rows / 128⌉, 2, hidden) to work in, GATE: / GATE_ROWS, and (2, hidden), or null: none
};
