// The fixed binary tree over leaves on the host, block by block, so that the waiting subtrees stay in cache.
#include "ckpt/tree_sum.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "ckpt/check.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ckpt {
namespace {

constexpr int64_t kBlock = 1024;  // elements summed at a time

// Round to nearest, denormals kept, whatever the caller's thread has set.
class ExactFloats {
 public:
#if defined(__x86_64__)
  ExactFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~ExactFloats() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  ExactFloats() {}
#endif
};

// left = left + right
template <typename T>
void add_block(T* left, const T* right, int64_t n) {
  for (int64_t j = 0; j < n; ++j) left[j] = left[j] + right[j];
}

void load(const float* from, float* to, int64_t n) { std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float)); }
void load(const double* from, double* to, int64_t n) { std::memcpy(to, from, static_cast<size_t>(n) * sizeof(double)); }

struct Fp16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

void load(const Bf16* from, float* to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) to[j] = from_bf16(from[j].bits);
}

void load(const Fp16* from, float* to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) to[j] = from_fp16(from[j].bits);
}

// Elements first..last of the result.
template <typename In, typename T>
void sum_elements(const unsigned char* in, int64_t leaves, int64_t stride, T* out, int64_t first, int64_t last) {
  const ExactFloats exact;
  std::vector<T> waiting(kBlock * 8);
  for (int64_t a = first; a < last; a += kBlock) {
    const int64_t n = std::min(kBlock, last - a);
    int64_t held = 0;
    for (int64_t i = 0; i < leaves; ++i) {
      if (static_cast<int64_t>(waiting.size()) < (held + 1) * kBlock) waiting.resize((held + 1) * kBlock);
      load(reinterpret_cast<const In*>(in + i * stride) + a, &waiting[held++ * kBlock], n);
      for (int64_t done = i; done & 1; done >>= 1) --held, add_block(&waiting[(held - 1) * kBlock], &waiting[held * kBlock], n);
    }
    while (held > 1) --held, add_block(&waiting[(held - 1) * kBlock], &waiting[held * kBlock], n);
    for (int64_t j = 0; j < n; ++j) out[a + j] = canonical(waiting[j]);
  }
}

template <typename In, typename T>
void sum_all(const void* in, int64_t leaves, int64_t n, int64_t stride, void* out, int threads) {
  const auto* from = static_cast<const unsigned char*>(in);
  auto* to = static_cast<T*>(out);
  const int64_t useful = std::max<int64_t>(1, std::min<int64_t>(threads, leaves * n * sizeof(In) >> 20));
  const int64_t share = ((n + useful - 1) / useful + kBlock - 1) / kBlock * kBlock;
  if (useful == 1) return sum_elements<In, T>(from, leaves, stride, to, 0, n);
  std::vector<std::thread> workers;
  for (int64_t t = 0; t < useful; ++t)
    workers.emplace_back([=] {
      sum_elements<In, T>(from, leaves, stride, to, std::min(n, t * share), std::min(n, (t + 1) * share));
    });
  for (auto& w : workers) w.join();
}

}  // namespace
}  // namespace ckpt

extern "C" int ckpt_tree_sum(const void* in, int dtype, int64_t leaves, int64_t n, int64_t leaf_stride, void* out,
                             int threads) {
  if (const int fault = ckpt::check_tree_sum(in, dtype, leaves, n, leaf_stride, out)) return fault;
  if (n == 0) return CKPT_OK;
  switch (dtype) {
    case CKPT_FP16: ckpt::sum_all<ckpt::Fp16, float>(in, leaves, n, leaf_stride, out, threads); break;
    case CKPT_BF16: ckpt::sum_all<ckpt::Bf16, float>(in, leaves, n, leaf_stride, out, threads); break;
    case CKPT_FP32: ckpt::sum_all<float, float>(in, leaves, n, leaf_stride, out, threads); break;
    default: ckpt::sum_all<double, double>(in, leaves, n, leaf_stride, out, threads); break;
  }
  return CKPT_OK;
}
