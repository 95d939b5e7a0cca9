// The common case of positions: one row of a cos/sin table per token, with vectorized loads. For kernels that are short of registers.

#pragma once

#include "angles.cuh"

namespace {

struct Rows {
  const char *positions, *cos, *sin;
  int64_t position_strides[2], row, offset;  // strides in bytes; row stride of the table in bytes; row of the first token
  uint32_t rows;
  bool wide_positions;

  // Byte offset of a token's row in the table; 0 and `inside` false if there is no such row.
  __device__ __forceinline__ int64_t of(uint32_t batch, uint32_t token, bool& inside) const {
    int64_t nth = token + offset;
    if (positions) {
      const char* const position = positions + batch * position_strides[0] + token * position_strides[1];
      nth = integer(position, wide_positions, 0);
    }
    inside = nth >= 0 && nth < rows;
    return (inside ? nth : 0) * row;
  }
};

// Whether a call has such rows and allows vector loads of `entries` consecutive entries; if so, sets `rows`. `alone`: as for `set_angles`.
inline bool rows_of(const Plan& plan, const Call& call, int64_t entries, bool alone, Rows& rows) {
  if (plan.rows == 0 || plan.rows > UINT32_MAX) return false;  // without rows there is no row 0 to read instead of a missing one
  Work work{};
  set_angles(work, plan, call, entries, alone);
  const bool one_row = work.axes == ONE && !call.offsets && !call.bounds && plan.cp_size == 1 &&
                       (call.positions || !work.alone) && plan.table_strides[0] == 0;
  const bool of_table = work.read == FLOATS || (work.read <= HALVES && plan.table_kind == plan.kind);
  if (!one_row || !of_table) return false;
  const int64_t table_size = plan.table_kind == FLOAT32 ? 4 : 2, position_size = plan.wide_positions ? 8 : 4;
  rows.rows = static_cast<uint32_t>(plan.rows);
  rows.cos = work.cos, rows.sin = work.sin, rows.row = plan.table_strides[1] * table_size;
  rows.positions = static_cast<const char*>(call.positions), rows.wide_positions = plan.wide_positions, rows.offset = call.offset;
  rows.position_strides[0] = work.position_strides[1] * position_size, rows.position_strides[1] = work.position_strides[2] * position_size;
  return true;
}

}  // namespace
