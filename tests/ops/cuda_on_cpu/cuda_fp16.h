// The 16-bit floats of CUDA, as far as the sources of RoPE use them.

#pragma once

#include "cuda_runtime.h"

struct __half { _Float16 value; };
struct __half2 { __half x, y; };

inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __low2float(__half2 x) { return __half2float(x.x); }
inline float __high2float(__half2 x) { return __half2float(x.y); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
