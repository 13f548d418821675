// Logical random numbers on the host.
#include <algorithm>

#include "ckpt/check.h"
#include "ckpt/level.h"
#include "ckpt/philox.h"

#if CKPT_X86
#include <immintrin.h>
#endif

namespace ckpt {
namespace {

constexpr int kBlocks = 64;  // that are made at a time

// Words of kBlocks blocks of a stream.
using Fill = void (*)(uint64_t block, uint64_t stream, uint64_t key, uint32_t* words);

void fill_scalar(uint64_t block, uint64_t stream, uint64_t key, uint32_t* words) {
  for (int i = 0; i < kBlocks; ++i) {
    const Words made = philox_block(block + i, stream, key);
    for (int q = 0; q < 4; ++q) words[4 * i + q] = made.w[q];
  }
}

#if CKPT_X86

#define CKPT_AVX2 __attribute__((target("avx2")))

// Both halves of the products of eight words with a constant.
CKPT_AVX2 inline void multiply(__m256i x, uint32_t by, __m256i* low, __m256i* high) {
  const __m256i factor = _mm256_set1_epi64x(by);
  const __m256i even = _mm256_mul_epu32(x, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
  *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

CKPT_AVX2 inline __m256i repeated(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }

// Eight blocks side by side, one in each lane.
CKPT_AVX2 void eight_blocks(uint64_t block, uint64_t stream, uint64_t key, uint32_t* words) {
  alignas(32) uint32_t low[8], high[8];
  for (uint64_t i = 0; i < 8; ++i) {
    low[i] = static_cast<uint32_t>(block + i);
    high[i] = static_cast<uint32_t>((block + i) >> 32);
  }
  __m256i x0 = _mm256_load_si256(reinterpret_cast<const __m256i*>(low));
  __m256i x1 = _mm256_load_si256(reinterpret_cast<const __m256i*>(high));
  __m256i x2 = repeated(static_cast<uint32_t>(stream)), x3 = repeated(static_cast<uint32_t>(stream >> 32));
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    __m256i a_low, a_high, b_low, b_high;
    multiply(x0, kPhiloxM0, &a_low, &a_high);
    multiply(x2, kPhiloxM1, &b_low, &b_high);
    x0 = _mm256_xor_si256(_mm256_xor_si256(b_high, x1), repeated(k0));
    x1 = b_low;
    x2 = _mm256_xor_si256(_mm256_xor_si256(a_high, x3), repeated(k1));
    x3 = a_low;
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  const __m256i p = _mm256_unpacklo_epi32(x0, x1), q = _mm256_unpackhi_epi32(x0, x1);
  const __m256i r = _mm256_unpacklo_epi32(x2, x3), s = _mm256_unpackhi_epi32(x2, x3);
  const __m256i b04 = _mm256_unpacklo_epi64(p, r), b15 = _mm256_unpackhi_epi64(p, r);
  const __m256i b26 = _mm256_unpacklo_epi64(q, s), b37 = _mm256_unpackhi_epi64(q, s);
  auto* to = reinterpret_cast<__m256i*>(words);
  _mm256_storeu_si256(to, _mm256_permute2x128_si256(b04, b15, 0x20));
  _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(b26, b37, 0x20));
  _mm256_storeu_si256(to + 2, _mm256_permute2x128_si256(b04, b15, 0x31));
  _mm256_storeu_si256(to + 3, _mm256_permute2x128_si256(b26, b37, 0x31));
}

void fill_avx2(uint64_t block, uint64_t stream, uint64_t key, uint32_t* words) {
  for (int i = 0; i < kBlocks; i += 8) eight_blocks(block + i, stream, key, words + 4 * i);
}

#endif

Fill chosen_fill() {
#if CKPT_X86
  if (host_level() >= kAvx2) return fill_avx2;
#endif
  return fill_scalar;
}

template <typename T, typename Make>
int generate(T* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, Make make) {
  if (n < 0) return CKPT_BAD_EXTENT;
  if (static_cast<uint64_t>(n) > UINT64_MAX - first) return CKPT_TOO_LARGE;
  if (n != 0 && out == nullptr) return CKPT_BAD_POINTER;
  const Fill fill = chosen_fill();
  alignas(64) uint32_t words[4 * kBlocks];
  auto skip = static_cast<int64_t>(first % 4);  // words of the first block that come before the first element
  uint64_t block = first / 4;
  for (int64_t done = 0; done < n; block += kBlocks, skip = 0) {
    const int64_t take = std::min<int64_t>(4 * kBlocks - skip, n - done);
    fill(block, stream, key, words);
    for (int64_t i = 0; i < take; ++i) out[done + i] = make(words[skip + i]);
    done += take;
  }
  return CKPT_OK;
}

}  // namespace
}  // namespace ckpt

extern "C" int ckpt_philox(uint32_t* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key) {
  return ckpt::generate(out, n, first, stream, key, [](uint32_t w) { return w; });
}

extern "C" int ckpt_philox_uniform(float* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key) {
  return ckpt::generate(out, n, first, stream, key, ckpt::uniform);
}

extern "C" int ckpt_philox_mask(uint8_t* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key,
                                uint64_t threshold) {
  if (threshold > uint64_t{1} << 32) return CKPT_TOO_LARGE;
  return ckpt::generate(out, n, first, stream, key, [=](uint32_t w) { return static_cast<uint8_t>(w < threshold); });
}
