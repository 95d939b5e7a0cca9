// The part of the library for bfloat16; without FUSEWISE_PARTS, qk_norm_rope.cu alone is the whole library.

#ifdef FUSEWISE_PARTS
#define FUSEWISE_DTYPE __nv_bfloat16
#define FUSEWISE_ENTRY fusewise_qk_norm_rope_bfloat16
#include "qk_norm_rope.cu"
#endif
