// A RoPE call as native code receives it; `_native.py` packs the fields in this order.
//
// Shape legend: B batch, T tokens, H heads, D features of a head, P rotated pairs, R table rows.

#pragma once

#include <cstdint>

enum Kind : int64_t { FLOAT32, BFLOAT16, FLOAT16 };
enum Table : int64_t { COS_SIN, ANGLES, INV_FREQ };

// Everything that is fixed by the call signature. Strides in elements, flags 0 or 1.
struct Plan {
  int64_t operands, batch, tokens, pairs;
  int64_t heads[2], head_dim[2], start[2];   // of q and k; start is the first rotated feature
  int64_t x_strides[2][3], y_strides[2][3];  // batch, token, head
  int64_t kind, table_kind;                  // Kind of x and y, Kind of the table
  int64_t interleaved_in, interleaved_out, inverse, in_place;
  int64_t table, table_strides[3], rows;  // batch, row, pair
  int64_t position_strides[3];            // axis, batch, token
  int64_t wide_positions, wide_offsets, wide_bounds;  // int64 rather than int32
  int64_t sequences;                                  // bounds has sequences + 1 entries
  int64_t has_sections, sections[3], sections_interleaved, cp_rank, cp_size;
  double scale;
};

// Everything that changes from call to call. Absent tensors are null.
struct Call {
  const void* x[2];
  void* y[2];
  const void *cos, *sin, *positions, *offsets, *bounds;
  int64_t offset;
};
