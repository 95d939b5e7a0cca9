// The part of the library for float16; without FUSEWISE_PARTS, rope_and_cache.cu alone is the whole library.

#ifdef FUSEWISE_PARTS
#define FUSEWISE_DTYPE __half
#define FUSEWISE_ENTRY fusewise_rope_and_cache_half
#include "rope_and_cache.cu"
#endif
