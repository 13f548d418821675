// Copies past the caches on the host, for outputs larger than these.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ckpt/level.h"

#if CKPT_X86
#include <emmintrin.h>
#endif

namespace ckpt {

constexpr int64_t kCacheLine = 64;

// Asks for the cache line at an address, to be used once: it does not enter the larger caches, where the machine can do
// that. The address may be any.
inline void prefetch_line(uintptr_t address) {
#if CKPT_X86
  _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_NTA);
#else
  (void)address;
#endif
}

// Copies one cache line of the output, aligned, without reading it first.
inline void stream_line(unsigned char* to, const unsigned char* from) {
#if CKPT_X86
  const auto* source = reinterpret_cast<const __m128i*>(from);
  auto* target = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
  const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
  _mm_stream_si128(target, a);
  _mm_stream_si128(target + 1, b);
  _mm_stream_si128(target + 2, c);
  _mm_stream_si128(target + 3, d);
#else
  std::memcpy(to, from, kCacheLine);
#endif
}

// Copies n bytes and asks for the n bytes at `next`, which will be read soon.
inline void stream(unsigned char* to, const unsigned char* from, int64_t n, uintptr_t next) {
  const int64_t head = std::min<int64_t>(n, -reinterpret_cast<uintptr_t>(to) & (kCacheLine - 1));
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t i = head;
  for (; i + kCacheLine <= n; i += kCacheLine) {
    prefetch_line(next + i);
    stream_line(to + i, from + i);
  }
  std::memcpy(to + i, from + i, static_cast<size_t>(n - i));
}

// To be called once after the last of such copies of a thread: other threads see all of them.
inline void end_of_stream() {
#if CKPT_X86
  _mm_sfence();
#endif
}

}  // namespace ckpt
