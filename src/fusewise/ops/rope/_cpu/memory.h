// Writing large outputs: non-temporal stores to memory in use, huge pages for new memory.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

// Copy with non-temporal stores. The data that a large output would evict is worth more than the output, and lines are not
// read before they are written (no write-allocate), which saves a third of the traffic.
inline void stream(void* to, const void* from, int64_t bytes) {
  auto* y = static_cast<char*>(to);
  auto* x = static_cast<const char*>(from);
#if defined(__SSE2__)
  const int64_t head = std::min<int64_t>(-reinterpret_cast<intptr_t>(y) & 15, bytes);
  std::memcpy(y, x, head);
  int64_t i = head;
#if defined(__AVX__)
  if (i + 16 <= bytes && (reinterpret_cast<intptr_t>(y + i) & 16)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(y + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i)));
    i += 16;
  }
  for (; i + 32 <= bytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(y + i), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)));
#endif
  for (; i + 16 <= bytes; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(y + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i)));
  std::memcpy(y + i, x + i, bytes - i);
#else
  std::memcpy(y, x, bytes);
#endif
}

inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Whether memory is mapped but was never touched, as in a new large tensor. The OS zeroes each page on the first write, twice as
// fast with huge pages, so request those; a page that was just zeroed is in cache, so regular stores are used.
inline bool untouched(const void* y, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t HUGE_PAGE = 2 << 20;
  const auto address = reinterpret_cast<uintptr_t>(y);
  const uintptr_t first = (address + HUGE_PAGE - 1) & -HUGE_PAGE, last = (address + bytes) & -HUGE_PAGE;
  unsigned char resident = 1;
  auto* start = reinterpret_cast<void*>(first);
  if (first >= last || mincore(start, 1, &resident) != 0 || resident & 1) return false;
  madvise(start, last - first, MADV_HUGEPAGE);  // fails harmlessly where huge pages are not available
  return true;
#else
  static_cast<void>(y), static_cast<void>(bytes);
  return false;
#endif
}

}  // namespace
