// Transposition of square tiles of elements on the host.
#pragma once

#include "ckpt/stream.h"

namespace ckpt {

#if CKPT_X86

template <int Size>
__m128i interleave_low(__m128i a, __m128i b) {
  if constexpr (Size == 1) return _mm_unpacklo_epi8(a, b);
  if constexpr (Size == 2) return _mm_unpacklo_epi16(a, b);
  if constexpr (Size == 4) return _mm_unpacklo_epi32(a, b);
  if constexpr (Size == 8) return _mm_unpacklo_epi64(a, b);
}

template <int Size>
__m128i interleave_high(__m128i a, __m128i b) {
  if constexpr (Size == 1) return _mm_unpackhi_epi8(a, b);
  if constexpr (Size == 2) return _mm_unpackhi_epi16(a, b);
  if constexpr (Size == 4) return _mm_unpackhi_epi32(a, b);
  if constexpr (Size == 8) return _mm_unpackhi_epi64(a, b);
}

// A block of 16 bytes each way. Interleaving the upper half of the rows with the lower half (a perfect shuffle of the
// elements) log2(rows) times transposes it.
template <int Size>
void transpose_block(unsigned char* to, const unsigned char* from) {
  constexpr int kSide = 16 / Size;
  __m128i x[kSide], y[kSide];
#pragma GCC unroll 16
  for (int i = 0; i < kSide; ++i) x[i] = _mm_load_si128(reinterpret_cast<const __m128i*>(from + i * kCacheLine));
#pragma GCC unroll 4
  for (int step = 1; step < kSide; step *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kSide / 2; ++i) {
      y[2 * i] = interleave_low<Size>(x[i], x[i + kSide / 2]);
      y[2 * i + 1] = interleave_high<Size>(x[i], x[i + kSide / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) x[i] = y[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSide; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(to + i * kCacheLine), x[i]);
}

#else

template <int Size>
void transpose_block(unsigned char* to, const unsigned char* from) {
  constexpr int kSide = 16 / Size;
  for (int i = 0; i < kSide; ++i)
    for (int j = 0; j < kSide; ++j) std::memcpy(to + j * kCacheLine + i * Size, from + i * kCacheLine + j * Size, Size);
}

#endif

constexpr int kAheadInRow = 4 * kCacheLine;

// A tile of one cache line each way, from rows `from_step` bytes apart to rows `to_step` bytes apart. Every line of
// either side is touched once: lines whose steps are powers of two would push each other out of the cache.
template <int Size>
void transpose_tile(unsigned char* to, int64_t to_step, const unsigned char* from, int64_t from_step, bool streaming) {
  constexpr int kSide = kCacheLine / Size, kBlock = 16 / Size;
  alignas(kCacheLine) unsigned char in[kSide * kCacheLine], out[kSide * kCacheLine];
  for (int i = 0; i < kSide; ++i, from += from_step) {
    std::memcpy(in + i * kCacheLine, from, kCacheLine);
    prefetch_line(reinterpret_cast<uintptr_t>(from) + kAheadInRow);  // the next tiles lie beside this one
  }
  for (int i = 0; i < kSide; i += kBlock)
    for (int j = 0; j < kSide; j += kBlock)
      transpose_block<Size>(out + j * kCacheLine + i * Size, in + i * kCacheLine + j * Size);
  for (int j = 0; j < kSide; ++j, to += to_step) {
    if (streaming && (reinterpret_cast<uintptr_t>(to) & (kCacheLine - 1)) == 0) {
      stream_line(to, out + j * kCacheLine);
    } else {
      std::memcpy(to, out + j * kCacheLine, kCacheLine);
    }
  }
}

}  // namespace ckpt
