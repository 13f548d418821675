// Fingerprint of boxes on the host. The inner loop has three forms, chosen at run time, with the same result.
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "ckpt/abi.h"
#include "ckpt/check.h"
#include "ckpt/fingerprint.h"
#include "ckpt/geometry.h"

namespace ckpt {
namespace {

using Wide = unsigned __int128;

constexpr int kRows = 4;              // rows that share one load of the coefficients
constexpr int64_t kSegment = 8192;    // words of a row in one call; bounds every accumulator below

uint64_t fold(Wide x) { return reduce(static_cast<uint64_t>(x & kP) + reduce(static_cast<uint64_t>(x >> 61))); }

// out[i] = sum over j of rows[i][j] * (c0[j], c1[j]) for `count` rows of n words.
using Dot = void (*)(const uint32_t* const* rows, int count, const uint64_t* c0, const uint64_t* c1, int64_t n,
                     Pair* out);

void dot_scalar(const uint32_t* const* rows, int count, const uint64_t* c0, const uint64_t* c1, int64_t n, Pair* out) {
  for (int i = 0; i < count; ++i) {
    Wide a = 0, b = 0;
    for (int64_t j = 0; j < n; ++j) {
      uint32_t w;
      std::memcpy(&w, rows[i] + j, 4);
      a += static_cast<Wide>(c0[j]) * w;
      b += static_cast<Wide>(c1[j]) * w;
    }
    out[i] = {{fold(a), fold(b)}};
  }
}

void add_tail(const uint32_t* const* rows, int count, const uint64_t* c0, const uint64_t* c1, int64_t from, int64_t n,
              Pair* out) {
  if (from == n) return;
  const uint32_t* rest[kRows];
  Pair more[kRows];
  for (int i = 0; i < count; ++i) rest[i] = rows[i] + from;
  dot_scalar(rest, count, c0 + from, c1 + from, n - from, more);
  for (int i = 0; i < count; ++i) out[i] = out[i] + more[i];
}

#if defined(__x86_64__)

// c = low 20 bits + 2^20 * high 41 bits: w * low stays below 2^52, w * high has 52 low bits and the rest.
template <int N>
__attribute__((target("avx512f,avx512ifma"))) void ifma_rows(const uint32_t* const* rows, const uint64_t* c0,
                                                             const uint64_t* c1, int64_t n, Pair* out) {
  __m512i acc[N][6];
  for (auto& row : acc)
    for (auto& a : row) a = _mm512_setzero_si512();
  const __m512i low20 = _mm512_set1_epi64((1 << 20) - 1);
  for (int64_t j = 0; j < n; j += 8) {
    const __m512i x = _mm512_loadu_si512(c0 + j), y = _mm512_loadu_si512(c1 + j);
    const __m512i xl = _mm512_and_si512(x, low20), xh = _mm512_srli_epi64(x, 20);
    const __m512i yl = _mm512_and_si512(y, low20), yh = _mm512_srli_epi64(y, 20);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const __m512i w = _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + j)));
      acc[i][0] = _mm512_madd52lo_epu64(acc[i][0], w, xl);
      acc[i][1] = _mm512_madd52lo_epu64(acc[i][1], w, xh);
      acc[i][2] = _mm512_madd52hi_epu64(acc[i][2], w, xh);
      acc[i][3] = _mm512_madd52lo_epu64(acc[i][3], w, yl);
      acc[i][4] = _mm512_madd52lo_epu64(acc[i][4], w, yh);
      acc[i][5] = _mm512_madd52hi_epu64(acc[i][5], w, yh);
    }
  }
  for (int i = 0; i < N; ++i) {
    for (int k = 0; k < 2; ++k) {
      uint64_t part[3];
      for (int l = 0; l < 3; ++l) {
        alignas(64) uint64_t lane[8];
        _mm512_store_si512(lane, acc[i][3 * k + l]);
        Wide sum = 0;
        for (uint64_t x : lane) sum += x;
        part[l] = fold(sum);
      }
      out[i].v[k] = add(add(part[0], shifted(part[1], 20)), shifted(part[2], 72 - 61));
    }
  }
}

void dot_ifma(const uint32_t* const* rows, int count, const uint64_t* c0, const uint64_t* c1, int64_t n, Pair* out) {
  const int64_t whole = n & ~int64_t{7};
  if (count == kRows) {
    ifma_rows<kRows>(rows, c0, c1, whole, out);
  } else {
    for (int i = 0; i < count; ++i) ifma_rows<1>(rows + i, c0, c1, whole, out + i);
  }
  add_tail(rows, count, c0, c1, whole, n, out);
}

// c = low 32 bits + 2^32 * high 29 bits; w * high stays below 2^61 and is split every eighth step.
template <int N>
__attribute__((target("avx2"))) void avx2_rows(const uint32_t* const* rows, const uint64_t* c0, const uint64_t* c1,
                                               int64_t n, Pair* out) {
  __m256i low[N][2], mid[N][2], high[N][2], top[N][2];
  for (int i = 0; i < N; ++i)
    for (int k = 0; k < 2; ++k) low[i][k] = mid[i][k] = high[i][k] = top[i][k] = _mm256_setzero_si256();
  const __m256i mask = _mm256_set1_epi64x(0xFFFFFFFF);
  for (int64_t start = 0; start < n; start += 32) {
    const int64_t stop = std::min(n, start + 32);
    for (int64_t j = start; j < stop; j += 4) {
      const __m256i c[2] = {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(c0 + j)),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c1 + j))};
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k) {
        const __m256i upper = _mm256_srli_epi64(c[k], 32);
#pragma GCC unroll 2
        for (int i = 0; i < N; ++i) {
          const __m256i w = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + j)));
          const __m256i p = _mm256_mul_epu32(w, c[k]);
          low[i][k] = _mm256_add_epi64(low[i][k], _mm256_and_si256(p, mask));
          mid[i][k] = _mm256_add_epi64(mid[i][k], _mm256_srli_epi64(p, 32));
          high[i][k] = _mm256_add_epi64(high[i][k], _mm256_mul_epu32(w, upper));
        }
      }
    }
    for (int i = 0; i < N; ++i)
      for (int k = 0; k < 2; ++k) {
        mid[i][k] = _mm256_add_epi64(mid[i][k], _mm256_and_si256(high[i][k], mask));
        top[i][k] = _mm256_add_epi64(top[i][k], _mm256_srli_epi64(high[i][k], 32));
        high[i][k] = _mm256_setzero_si256();
      }
  }
  for (int i = 0; i < N; ++i)
    for (int k = 0; k < 2; ++k) {
      const __m256i parts[3] = {low[i][k], mid[i][k], top[i][k]};
      uint64_t part[3];
      for (int l = 0; l < 3; ++l) {
        alignas(32) uint64_t lane[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lane), parts[l]);
        part[l] = fold(static_cast<Wide>(lane[0]) + lane[1] + lane[2] + lane[3]);
      }
      out[i].v[k] = add(add(part[0], shifted(part[1], 32)), shifted(part[2], 64 - 61));
    }
}

void dot_avx2(const uint32_t* const* rows, int count, const uint64_t* c0, const uint64_t* c1, int64_t n, Pair* out) {
  const int64_t whole = n & ~int64_t{3};
  for (int i = 0; i + 2 <= count; i += 2) avx2_rows<2>(rows + i, c0, c1, whole, out + i);
  if (count % 2) avx2_rows<1>(rows + count - 1, c0, c1, whole, out + count - 1);
  add_tail(rows, count, c0, c1, whole, n, out);
}

#endif

std::atomic<int> level_limit{2};

int machine_level() {
#if defined(__x86_64__)
  static const int found = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512ifma")) return 2;
    return __builtin_cpu_supports("avx2") ? 1 : 0;
  }();
  return found;
#else
  return 0;
#endif
}

Dot chosen_dot() {
#if defined(__x86_64__)
  const int level = std::min(machine_level(), level_limit.load());
  if (level == 2) return dot_ifma;
  if (level == 1) return dot_avx2;
#endif
  return dot_scalar;
}

// Words first..last of a row as an array: in place where they lie so in memory, else gathered into `scratch`.
const uint32_t* words_of(const Rows& rows, const unsigned char* row, int64_t first, int64_t last, uint32_t* scratch) {
  const int64_t a = std::max(rows.from, first * rows.per_word), b = std::min(rows.to, last * rows.per_word);
  const bool whole = a == first * rows.per_word && b == last * rows.per_word;
  const unsigned char* at = row + (a - rows.from) * rows.step;
  if (whole && rows.step == rows.unit) return reinterpret_cast<const uint32_t*>(at);
  std::memset(scratch, 0, 4 * static_cast<size_t>(last - first));
  auto* bytes = reinterpret_cast<unsigned char*>(scratch) + (a - first * rows.per_word) * rows.unit;
  for (int64_t u = a; u < b; ++u, at += rows.step, bytes += rows.unit) std::memcpy(bytes, at, rows.unit);
  return scratch;
}

// Rows row..stop of a box, the values alone.
Pair values_of(const Rows& rows, int64_t row, int64_t stop, Dot dot) {
  Pair total{{0, 0}};
  std::vector<uint32_t> scratch(kRows * kSegment);
  const int64_t w0 = rows.from / rows.per_word, w1 = (rows.to + rows.per_word - 1) / rows.per_word;
  const Table& low = rows.last.low();
  for (; row < stop; row += kRows) {
    const int count = static_cast<int>(std::min<int64_t>(kRows, stop - row));
    const unsigned char* start[kRows];
    Pair weight[kRows], sum[kRows];
    for (int i = 0; i < count; ++i) {
      weight[i] = rows.weight(row + i, &start[i]);
      sum[i] = {{0, 0}};
    }
    for (int64_t w = w0; w < w1;) {
      const int64_t end = std::min({w1, w + kSegment, (w / kDigit + 1) * kDigit});
      const uint32_t* words[kRows];
      for (int i = 0; i < count; ++i) words[i] = words_of(rows, start[i], w, end, scratch.data() + i * kSegment);
      Pair found[kRows];
      const int64_t at = w % kDigit;
      dot(words, count, low.c[0].data() + at, low.c[1].data() + at, end - w, found);
      const Pair high = rows.last.high(w / kDigit);
      for (int i = 0; i < count; ++i) sum[i] = sum[i] + found[i] * high;
      w = end;
    }
    for (int i = 0; i < count; ++i) total = total + sum[i] * weight[i];
  }
  return total;
}

Pair units_digest(const ckpt_box& box, int threads) {
  const Rows rows(box);
  const Dot dot = chosen_dot();
  const int64_t count = rows.count();
  const int64_t bytes = count * (rows.to - rows.from) * rows.unit;
  const int64_t useful = std::min<int64_t>({threads, (count + kRows - 1) / kRows, 1 + bytes / (1 << 20)});
  if (useful <= 1) return values_of(rows, 0, count, dot) + ones_of(rows);
  std::vector<Pair> part(useful);
  std::vector<std::thread> workers;
  const int64_t share = ((count + useful - 1) / useful + kRows - 1) / kRows * kRows;
  for (int64_t t = 0; t < useful; ++t)
    workers.emplace_back([&, t] {
      const int64_t a = std::min(count, t * share), b = std::min(count, a + share);
      part[t] = values_of(rows, a, b, dot);
    });
  for (auto& w : workers) w.join();
  Pair total = ones_of(rows);
  for (const Pair& p : part) total = total + p;
  return total;
}

Pair scalar_digest(const ckpt_box& box) {
  const auto* at = static_cast<const unsigned char*>(box.data);
  if (box.itemsize <= 4) {
    const uint64_t v = uint64_t{load_bytes(at, static_cast<int>(box.itemsize))} + 1;
    return {{v, v}};
  }
  Pair total{{0, 0}};
  for (int64_t w = 0; 4 * w < box.itemsize; ++w) {
    const uint64_t v = uint64_t{load_bytes(at + 4 * w, 4)} + 1;
    total = total + coefficient(0, 0, w) * Pair{{v, v}};
  }
  return total;
}

Pair digest(const ckpt_box& box, int threads) {
  for (int i = 0; i < box.ndim; ++i)
    if (box.extent[i] == 0) return {{0, 0}};
  if (box.ndim == 0) return scalar_digest(box);
  if (box.itemsize <= 4) return units_digest(box, threads);
  Pair total{{0, 0}};
  for (int64_t w = 0; 4 * w < box.itemsize; ++w) {
    ckpt_box plane = box;
    plane.data = static_cast<const unsigned char*>(box.data) + 4 * w;
    plane.itemsize = 4;
    total = total + units_digest(plane, threads) * coefficient(box.ndim, 0, w);
  }
  return total;
}

}  // namespace
}  // namespace ckpt

extern "C" int ckpt_fingerprint(const ckpt_box* boxes, int64_t count, int threads, uint64_t* out) {
  for (int64_t i = 0; i < count; ++i)
    if (const int fault = ckpt::check_box(boxes[i])) return fault;
  for (int64_t i = 0; i < count; ++i) {
    const ckpt::Pair found = ckpt::digest(boxes[i], threads);
    out[2 * i] = found.v[0];
    out[2 * i + 1] = found.v[1];
  }
  return CKPT_OK;
}

extern "C" int ckpt_host_level(int limit) {
  if (limit >= 0) ckpt::level_limit.store(limit);
  return std::min(ckpt::machine_level(), ckpt::level_limit.load());
}
