// Descriptors of matrices for TMA, with what the driver asks of them, as far as our sources use them.

#pragma once

#include "cuda_runtime.h"

#define CUDART_VERSION 13000
#define __CUDA_ARCH_FEAT_SM90_ALL

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_INVALID_CONTEXT = 201 };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
  CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
};
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_64B = 64, CU_TENSOR_MAP_SWIZZLE_128B = 128 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

// A matrix of elements of `word` bytes in row-major order, moved in boxes; `rounded` to tf32 when it is loaded.
struct CUtensorMap {
  char* matrix;
  int64_t rows, columns, stride;  // from row to row, in bytes
  int box_rows, box_columns, swizzle, word;
  bool rounded;
};

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* matrix, const cuuint64_t* sizes,
                                       const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (!on_cpu::context) return CUDA_ERROR_INVALID_CONTEXT;
  const auto aligned = [](uint64_t bytes) { return bytes % 16 == 0; };
  bool right = rank == 2 && aligned(reinterpret_cast<uintptr_t>(matrix)) && aligned(strides[0]) && strides[0] < uint64_t(1) << 40;
  for (int i = 0; i < 2; ++i) right = right && sizes[i] > 0 && sizes[i] <= uint64_t(1) << 32 && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
  const bool rounded = type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  const int word = rounded || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  if (!right || !aligned(word * box[0]) || word * box[0] > uint32_t(swizzle)) return CUDA_ERROR_INVALID_VALUE;
  *map = {static_cast<char*>(matrix), int64_t(sizes[1]), int64_t(sizes[0]), int64_t(strides[0]), int(box[1]), int(box[0]), swizzle, word, rounded};
  return CUDA_SUCCESS;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum cudaEnableFlags { cudaEnableDefault };
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, cudaEnableFlags, cudaDriverEntryPointQueryResult*) {
  *found = std::strcmp(name, "cuTensorMapEncodeTiled") ? nullptr : reinterpret_cast<void*>(cuTensorMapEncodeTiled);
  return cudaSuccess;
}
