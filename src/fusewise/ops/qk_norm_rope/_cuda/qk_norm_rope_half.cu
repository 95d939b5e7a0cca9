// The part of the library for float16; without FUSEWISE_PARTS, qk_norm_rope.cu alone is the whole library.

#ifdef FUSEWISE_PARTS
#define FUSEWISE_DTYPE __half
#define FUSEWISE_ENTRY fusewise_qk_norm_rope_half
#include "qk_norm_rope.cu"
#endif
