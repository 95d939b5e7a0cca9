// The part of the library for y of a few hundred rows, compiled in parallel; without FUSEWISE_PARTS, gated_linear.cu alone is the whole
// library.

#ifdef FUSEWISE_PARTS
#include "products.cuh"

Product fusewise_sideways(int64_t epilogue) { return sideways<FUSEWISE_BFLOAT16, FUSEWISE_ACTIVATION>(epilogue); }
#endif
