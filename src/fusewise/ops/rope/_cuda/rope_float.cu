// The part of the library for float32; without FUSEWISE_PARTS, rope.cu alone is the whole library.

#ifdef FUSEWISE_PARTS
#define FUSEWISE_DTYPE float
#define FUSEWISE_ENTRY fusewise_rope_float
#include "rope.cu"
#endif
