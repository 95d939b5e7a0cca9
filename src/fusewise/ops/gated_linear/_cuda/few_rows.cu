// The part of the library for few rows, compiled in parallel; without FUSEWISE_PARTS, gated_linear.cu alone is the whole library.

#ifdef FUSEWISE_PARTS
#include "few_rows.cuh"

cudaError_t fusewise_few_rows(const Plan& plan, const Call& call, int processors, cudaStream_t stream) {
  return launch_few_rows<FUSEWISE_BFLOAT16, FUSEWISE_ACTIVATION>(plan, call, processors, stream);
}
#endif
