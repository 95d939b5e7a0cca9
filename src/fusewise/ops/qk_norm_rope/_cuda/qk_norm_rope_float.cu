// The part of the library for float32; without FUSEWISE_PARTS, qk_norm_rope.cu alone is the whole library.

#ifdef FUSEWISE_PARTS
#define FUSEWISE_DTYPE float
#define FUSEWISE_ENTRY fusewise_qk_norm_rope_float
#include "qk_norm_rope.cu"
#endif
