// Matrix products of a warpgroup (wgmma): 64 rows by N columns, both operands in shared memory.

#pragma once

#include <cstdint>

namespace {

// wgmma matrix descriptors: K-major rows of 128 bytes in the 128-byte swizzle, in groups of eight; or, transposed, MN-major, with `next`
// bytes between neighbouring blocks of 64 columns.
__device__ inline uint64_t matrix_descriptor(uint32_t address, int next = 16) {
  constexpr uint64_t EIGHT_ROWS = 1024 >> 4, SWIZZLE_128 = 1;
  return SWIZZLE_128 << 62 | EIGHT_ROWS << 32 | uint64_t(next >> 4) << 16 | (address & 0x3ffff) >> 4;
}
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Lists of the first n accumulators: their places in the instruction (L) and the operands (C).
#define Q0 "%0,%1,%2,%3"
#define Q1 ",%4,%5,%6,%7"
#define Q2 ",%8,%9,%10,%11"
#define Q3 ",%12,%13,%14,%15"
#define Q4 ",%16,%17,%18,%19"
#define Q5 ",%20,%21,%22,%23"
#define Q6 ",%24,%25,%26,%27"
#define Q7 ",%28,%29,%30,%31"
#define Q8 ",%32,%33,%34,%35"
#define Q9 ",%36,%37,%38,%39"
#define Q10 ",%40,%41,%42,%43"
#define Q11 ",%44,%45,%46,%47"
#define Q12 ",%48,%49,%50,%51"
#define Q13 ",%52,%53,%54,%55"
#define Q14 ",%56,%57,%58,%59"
#define Q15 ",%60,%61,%62,%63"
#define Q16 ",%64,%65,%66,%67"
#define Q17 ",%68,%69,%70,%71"
#define Q18 ",%72,%73,%74,%75"
#define Q19 ",%76,%77,%78,%79"
#define Q20 ",%80,%81,%82,%83"
#define Q21 ",%84,%85,%86,%87"
#define Q22 ",%88,%89,%90,%91"
#define Q23 ",%92,%93,%94,%95"
#define Q24 ",%96,%97,%98,%99"
#define Q25 ",%100,%101,%102,%103"
#define L8 Q0 Q1
#define L16 L8 Q2 Q3
#define L32 L16 Q4 Q5 Q6 Q7
#define L36 L32 Q8
#define L40 L36 Q9
#define L48 L40 Q10 Q11
#define L52 L48 Q12
#define L64 L52 Q13 Q14 Q15
#define L72 L64 Q16 Q17
#define L80 L72 Q18 Q19
#define L96 L80 Q20 Q21 Q22 Q23
#define L104 L96 Q24 Q25
#define R4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define C8 R4(0), R4(4)
#define C16 C8, R4(8), R4(12)
#define C32 C16, R4(16), R4(20), R4(24), R4(28)
#define C36 C32, R4(32)
#define C40 C36, R4(36)
#define C48 C40, R4(40), R4(44)
#define C52 C48, R4(48)
#define C64 C52, R4(52), R4(56), R4(60)
#define C72 C64, R4(64), R4(68)
#define C80 C72, R4(72), R4(76)
#define C96 C80, R4(80), R4(84), R4(88), R4(92)
#define C104 C96, R4(96), R4(100)
#define WGMMA(N, SUMS, A, B, ADD, TYPE, TRANSPOSED)                                                                                \
  asm volatile(                                                                                                                  \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %" ADD ", 0;\n"                                                                      \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" L##SUMS "}, %" A ", %" B ", add, 1, 1, 0, " TRANSPOSED ";\n}" \
      : C##SUMS                                                                                                                  \
      : "l"(a), "l"(b), "r"(add))

// c = a b + c, or a b where `add` is 0: (64, 16) by (16, N), with N / 2 accumulators c per thread. c[4 j], c[4 j + 1] are columns
// 8 j + 2 (lane % 4) + {0, 1} of row lane / 4 of the warp's sixteen; c[4 j + 2], c[4 j + 3] those of the row eight below.
#define PRODUCT_OF(N, SUMS, A, B, ADD)                                                \
  template <bool BFLOAT16, bool TRANSPOSED>                                           \
  __device__ inline void wgmma(float (&c)[SUMS], uint64_t a, uint64_t b, int add) {   \
    static_assert(2 * SUMS == N && !TRANSPOSED);                                      \
    if constexpr (BFLOAT16) WGMMA(N, SUMS, A, B, ADD, "bf16", "0");                   \
    else WGMMA(N, SUMS, A, B, ADD, "f16", "0");                                       \
  }
PRODUCT_OF(208, 104, "104", "105", "106")
PRODUCT_OF(160, 80, "80", "81", "82")
PRODUCT_OF(144, 72, "72", "73", "74")
PRODUCT_OF(128, 64, "64", "65", "66")
PRODUCT_OF(104, 52, "52", "53", "54")
PRODUCT_OF(96, 48, "48", "49", "50")
PRODUCT_OF(80, 40, "40", "41", "42")
PRODUCT_OF(72, 36, "36", "37", "38")
PRODUCT_OF(64, 32, "32", "33", "34")
PRODUCT_OF(32, 16, "16", "17", "18")
PRODUCT_OF(16, 8, "8", "9", "10")
template <bool BFLOAT16, bool TRANSPOSED>
__device__ inline void wgmma(float (&c)[96], uint64_t a, uint64_t b, int add) {
  if constexpr (BFLOAT16 && TRANSPOSED) WGMMA(192, 96, "96", "97", "98", "bf16", "1");
  else if constexpr (BFLOAT16) WGMMA(192, 96, "96", "97", "98", "bf16", "0");
  else if constexpr (TRANSPOSED) WGMMA(192, 96, "96", "97", "98", "f16", "1");
  else WGMMA(192, 96, "96", "97", "98", "f16", "0");
}
// The same of float32 operands, of which it reads the bits of tf32: (64, 8) by (8, 192).
__device__ inline void wgmma_tf32(float (&c)[96], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k8.f32.tf32.tf32 {" L96 "}, %96, %97, add, 1, 1;\n}"
      : C96
      : "l"(a), "l"(b), "r"(add));
}
#undef PRODUCT_OF
#undef WGMMA

// Orders uses of the accumulators after the wait: the compiler may not move them across.
template <int N>
__device__ inline void wgmma_fence_operand(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) asm volatile("" : R4(i)::"memory");
}
#undef Q0
#undef Q1
#undef Q2
#undef Q3
#undef Q4
#undef Q5
#undef Q6
#undef Q7
#undef Q8
#undef Q9
#undef Q10
#undef Q11
#undef Q12
#undef Q13
#undef Q14
#undef Q15
#undef Q16
#undef Q17
#undef Q18
#undef Q19
#undef Q20
#undef Q21
#undef Q22
#undef Q23
#undef Q24
#undef Q25
#undef L8
#undef C8
#undef L16
#undef C16
#undef L32
#undef C32
#undef L36
#undef C36
#undef L40
#undef C40
#undef L48
#undef C48
#undef L52
#undef C52
#undef L64
#undef C64
#undef L72
#undef C72
#undef L80
#undef C80
#undef L96
#undef C96
#undef L104
#undef C104
#undef R4

}  // namespace
