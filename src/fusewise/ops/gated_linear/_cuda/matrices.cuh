// TMA descriptors (tensor maps), encoded on the host by the driver.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "plan.h"

inline decltype(&cuTensorMapEncodeTiled) fusewise_encode = nullptr;  // one for all sources of the library

namespace {

// Looks up the driver's cuTensorMapEncodeTiled by name, so that the library does not link to libcuda.
cudaError_t find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const char* name = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
  const auto error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const auto error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error) return error;
  fusewise_encode = reinterpret_cast<decltype(fusewise_encode)>(found);
  return found == nullptr ? cudaErrorNotSupported : cudaSuccess;
}

// The type of 16-bit matrices.
CUtensorMapDataType half_type(const Plan& plan) {
  return plan.bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Encodes the descriptor of a row-major matrix with its box; nothing to do for null. False if the driver refuses.
bool describe(CUtensorMap* map, CUtensorMapDataType type, const void* matrix, int64_t stride, int64_t rows, int64_t columns, int box_rows,
              int box_columns, CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  if (matrix == nullptr) return true;
  const int word = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 || type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 ? 4 : 2;
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[] = {cuuint64_t(stride * word)};
  const cuuint32_t box[] = {cuuint32_t(box_columns), cuuint32_t(box_rows)}, steps[] = {1, 1};
  const auto swizzle = box_columns * word == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return fusewise_encode(map, type, 2, const_cast<void*>(matrix), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace
