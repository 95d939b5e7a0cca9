// The part of the library for float16; without FUSEWISE_PARTS, rope.cu alone is the whole library.

#ifdef FUSEWISE_PARTS
#define FUSEWISE_DTYPE __half
#define FUSEWISE_ENTRY fusewise_rope_half
#include "rope.cu"
#endif
