// The inner loop of the fingerprint in three forms: scalar, AVX2 and AVX-512 IFMA.
//
// A word has 32 bits and a coefficient 61, so that a product has 93. Each form cuts the coefficient (or the product)
// into limbs whose sums over a segment fit an accumulator without any reduction; the bounds stand with each form.
#include <cstring>

#include "ckpt/dot.h"
#include "ckpt/level.h"

#if CKPT_X86
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns falsely inside its own AVX-512 header
#include <immintrin.h>
#endif

namespace ckpt {
namespace {

using Wide = unsigned __int128;

// Modulo p of a number below 2^125.
uint64_t fold(Wide x) { return add(static_cast<uint64_t>(x & kP), reduce(static_cast<uint64_t>(x >> 61))); }

// Each sum stays below 2048 * 2^93 = 2^104.
void dot_scalar(const unsigned char* const* rows, int count, const uint64_t* c0, const uint64_t* c1, int64_t n,
                Pair* out) {
  for (int i = 0; i < count; ++i) {
    Wide a = 0, b = 0;
    for (int64_t j = 0; j < n; ++j) {
      uint32_t w;
      std::memcpy(&w, rows[i] + 4 * j, 4);
      a += static_cast<Wide>(c0[j]) * w;
      b += static_cast<Wide>(c1[j]) * w;
    }
    out[i] = {{fold(a), fold(b)}};
  }
}

#if CKPT_X86

static_assert(kSegment <= 2048, "the bounds below are for 2048 terms");

constexpr int kIfmaRows = 4, kAvx2Rows = 3;  // whose sums fit into registers

constexpr int64_t kAhead = 2048;  // bytes: longer than memory takes, shorter than the L1 cache

#define CKPT_IFMA __attribute__((target("avx512f,avx512ifma")))
#define CKPT_AVX2 __attribute__((target("avx2")))

// Asks for the cache lines `bytes` after these words, once a line. Lines past the end of a row belong to the next one,
// or are not used: a prefetch reads nothing.
template <int N>
inline void prefetch(const unsigned char* const* rows, int64_t word, int64_t bytes) {
  if (word % 16 != 0) return;
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i)
    _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(rows[i]) + 4 * word + bytes), _MM_HINT_T0);
}

// One step of eight words. The multiplier reads the low 52 bits of its operands. With c = l + 2^52 h, l < 2^52 and
// h < 2^9, a product w * c is lo(w * l) + 2^52 * (hi(w * l) + w * h). Sums over all lanes and steps of a segment:
//   sum[.][0] of lo(w * l) < 2^52:                   below 2^11 * 2^52 = 2^63
//   sum[.][1] of hi(w * l) < 2^32 and w * h < 2^41:  below 2^11 * 2^42 = 2^53
template <int N>
CKPT_IFMA inline void ifma_step(const __m512i* w, __m512i x, __m512i y, __m512i (*sum)[4]) {
  const __m512i xh = _mm512_srli_epi64(x, 52), yh = _mm512_srli_epi64(y, 52);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    sum[i][0] = _mm512_madd52lo_epu64(sum[i][0], w[i], x);
    sum[i][1] = _mm512_madd52hi_epu64(sum[i][1], w[i], x);
    sum[i][2] = _mm512_madd52lo_epu64(sum[i][2], w[i], y);
    sum[i][3] = _mm512_madd52hi_epu64(sum[i][3], w[i], y);
    sum[i][1] = _mm512_madd52lo_epu64(sum[i][1], w[i], xh);
    sum[i][3] = _mm512_madd52lo_epu64(sum[i][3], w[i], yh);
  }
}

template <int N>
CKPT_IFMA void ifma_rows(const unsigned char* const* rows, const uint64_t* c0, const uint64_t* c1, int64_t n,
                         Pair* out) {
  __m512i sum[N][4], w[N];
  for (auto& row : sum)
    for (auto& s : row) s = _mm512_setzero_si512();
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    prefetch<N>(rows, j, kAhead);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i)
      w[i] = _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + 4 * j)));
    ifma_step<N>(w, _mm512_loadu_si512(c0 + j), _mm512_loadu_si512(c1 + j), sum);
  }
  if (j < n) {
    const unsigned mask = (1u << (n - j)) - 1;
    for (int i = 0; i < N; ++i)
      w[i] = _mm512_cvtepu32_epi64(
          _mm512_castsi512_si256(_mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), rows[i] + 4 * j)));
    ifma_step<N>(w, _mm512_maskz_loadu_epi64(static_cast<__mmask8>(mask), c0 + j),
                 _mm512_maskz_loadu_epi64(static_cast<__mmask8>(mask), c1 + j), sum);
  }
  for (int i = 0; i < N; ++i)
    for (int k = 0; k < 2; ++k) {
      const auto low = static_cast<uint64_t>(_mm512_reduce_add_epi64(sum[i][2 * k]));
      const auto high = static_cast<uint64_t>(_mm512_reduce_add_epi64(sum[i][2 * k + 1]));
      out[i].v[k] = add(reduce(low), shifted(reduce(high), 52));
    }
}

CKPT_IFMA void dot_ifma(const unsigned char* const* rows, int count, const uint64_t* c0, const uint64_t* c1, int64_t n,
                        Pair* out) {
  if (count == kIfmaRows) return ifma_rows<kIfmaRows>(rows, c0, c1, n, out);
  for (int i = 0; i < count; ++i) ifma_rows<1>(rows + i, c0, c1, n, out + i);
}

// One step of four words. With c = a + 2^21 b + 2^41 d, a < 2^21 and b, d < 2^20, the three products with a word stay
// below 2^53, and their sums over all lanes and steps of a segment below 2^11 * 2^53 = 2^64.
template <int N>
CKPT_AVX2 inline void avx2_step(const __m256i* w, __m256i c, __m256i (*sum)[3]) {
  const __m256i limb[3] = {_mm256_and_si256(c, _mm256_set1_epi64x((1 << 21) - 1)),
                           _mm256_and_si256(_mm256_srli_epi64(c, 21), _mm256_set1_epi64x((1 << 20) - 1)),
                           _mm256_srli_epi64(c, 41)};
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 3
    for (int l = 0; l < 3; ++l) sum[i][l] = _mm256_add_epi64(sum[i][l], _mm256_mul_epu32(w[i], limb[l]));
}

CKPT_AVX2 inline uint64_t sum_of_lanes(__m256i x) {
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(two)) + static_cast<uint64_t>(_mm_extract_epi64(two, 1));
}

// Half K of the sums of N rows with the coefficients c. One half at a time, so that the sums of three rows fit into
// registers; the second half finds the words in the L1 cache and leaves the memory free to bring the next ones.
template <int N, int K>
CKPT_AVX2 void avx2_rows(const unsigned char* const* rows, const uint64_t* c, int64_t n, Pair* out) {
  __m256i sum[N][3], w[N];
  for (auto& row : sum)
    for (auto& s : row) s = _mm256_setzero_si256();
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) {
    if (K == 1) prefetch<N>(rows, j, 4 * n);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i)
      w[i] = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + 4 * j)));
    avx2_step<N>(w, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c + j)), sum);
  }
  if (j < n) {
    const __m128i left = _mm_cmplt_epi32(_mm_setr_epi32(0, 1, 2, 3), _mm_set1_epi32(static_cast<int>(n - j)));
    for (int i = 0; i < N; ++i)
      w[i] = _mm256_cvtepu32_epi64(_mm_maskload_epi32(reinterpret_cast<const int*>(rows[i] + 4 * j), left));
    avx2_step<N>(w, _mm256_maskload_epi64(reinterpret_cast<const long long*>(c + j), _mm256_cvtepi32_epi64(left)), sum);
  }
  for (int i = 0; i < N; ++i) {
    const uint64_t low = reduce(sum_of_lanes(sum[i][0])), middle = reduce(sum_of_lanes(sum[i][1]));
    out[i].v[K] = add(add(low, shifted(middle, 21)), shifted(reduce(sum_of_lanes(sum[i][2])), 41));
  }
}

CKPT_AVX2 void dot_avx2(const unsigned char* const* rows, int count, const uint64_t* c0, const uint64_t* c1, int64_t n,
                        Pair* out) {
  if (count == kAvx2Rows) {
    avx2_rows<kAvx2Rows, 0>(rows, c0, n, out);
    avx2_rows<kAvx2Rows, 1>(rows, c1, n, out);
    return;
  }
  for (int i = 0; i < count; ++i) {
    avx2_rows<1, 0>(rows + i, c0, n, out + i);
    avx2_rows<1, 1>(rows + i, c1, n, out + i);
  }
}

#endif

}  // namespace

Dot chosen_dot() {
#if CKPT_X86
  switch (host_level()) {
    case kIfma: return {kIfmaRows, dot_ifma};
    case kAvx2: return {kAvx2Rows, dot_avx2};
  }
#endif
  return {1, dot_scalar};
}

}  // namespace ckpt
