// The fixed binary tree over leaves on the host, block by block.
//
// Eight neighbouring leaves, from a multiple of eight on, are a subtree of their own: they are added in registers, each
// leaf read once. Sums of such groups wait in a buffer that stays in cache until their right neighbour is as large.
#include <algorithm>
#include <atomic>
#include <vector>

#include "ckpt/check.h"
#include "ckpt/parallel.h"
#include "ckpt/stream.h"
#include "ckpt/tree_sum.h"

#if CKPT_X86
#include <xmmintrin.h>
#endif

namespace ckpt {
namespace {

constexpr int kGroup = 8;                  // leaves
constexpr int64_t kBlock = 512;            // elements summed at a time
constexpr int64_t kTask = 64 * kBlock;     // elements that a thread takes at a time
constexpr double kStreamBytes = 32 << 20;  // inputs longer than this leave no room in caches for the output
constexpr int64_t kAhead = 8192;           // bytes of all leaves from what is added to what is asked for

// Round to nearest, denormals kept, whatever the caller's thread has set.
class ExactFloats {
 public:
#if CKPT_X86
  ExactFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~ExactFloats() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  ExactFloats() {}
#endif
};

using Leaves = const unsigned char* const*;

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

float widen(float x) { return x; }
double widen(double x) { return x; }
float widen(Bf16 x) { return from_bf16(x.bits); }

// Without branches and without fp32 denormals, which are slow: compilers use vector instructions. A denormal of fp16
// becomes the fraction of a number whose leading one is then subtracted, exactly.
float widen(Fp16 x) {
  constexpr uint32_t kBias = uint32_t{127 - 15} << 23, kOne = uint32_t{1} << 23;
  const uint32_t sign = uint32_t{x.bits} >> 15 << 31, exponent = x.bits & 0x7C00u;
  const uint32_t normal = ((x.bits & 0x7FFFu) << 13) + kBias;  // also of a denormal, but for its leading one
  const float denormal = bits_to_float(normal + kOne) - bits_to_float(kBias + kOne);
  uint32_t bits;
  std::memcpy(&bits, &denormal, 4);
  const uint32_t is_denormal = 0u - ((exponent - 0x0400u) >> 31), is_special = 0u - ((exponent + 0x0400u) >> 15);
  return bits_to_float((bits & is_denormal) | ((normal + (kBias & is_special)) & ~is_denormal) | sign);
}

template <typename In>
using Sum = decltype(widen(In{}));

// Element j of the tree over N leaves.
template <typename In, int N>
Sum<In> tree_at(Leaves leaves, int64_t j) {
  if constexpr (N == 1) {
    In x;
    std::memcpy(&x, leaves[0] + j * static_cast<int64_t>(sizeof(In)), sizeof(In));
    return widen(x);
  } else {
    constexpr int kLeft = N > 4 ? 4 : N > 2 ? 2 : 1;
    return tree_at<In, kLeft>(leaves, j) + tree_at<In, N - kLeft>(leaves + kLeft, j);
  }
}

// out[j] = element j of the tree, for n of them; `last` when nothing is added to them later.
template <typename In, int N>
void add_leaves(Leaves leaves, int64_t n, Sum<In>* out, bool last, bool streaming) {
  using T = Sum<In>;
  constexpr int64_t kLine = kCacheLine / sizeof(T);
  const bool aligned = (reinterpret_cast<uintptr_t>(out) & (kCacheLine - 1)) == 0;
  int64_t j = 0;
  for (; j + kLine <= n; j += kLine) {
    for (int i = 0; i < N; ++i) prefetch_line(reinterpret_cast<uintptr_t>(leaves[i]) + j * sizeof(In) + kAhead / N);
    alignas(kCacheLine) T line[kLine];
    for (int64_t q = 0; q < kLine; ++q) line[q] = tree_at<In, N>(leaves, j + q);
    if (last)
      for (auto& x : line) x = canonical(x);
    if (streaming && aligned) {
      stream_line(reinterpret_cast<unsigned char*>(out + j), reinterpret_cast<const unsigned char*>(line));
    } else {
      std::memcpy(out + j, line, sizeof(line));
    }
  }
  for (; j < n; ++j) {
    const T x = tree_at<In, N>(leaves, j);
    out[j] = last ? canonical(x) : x;
  }
}

template <typename In>
void add_group(Leaves leaves, int count, int64_t n, Sum<In>* out, bool last, bool streaming) {
  static constexpr void (*kForms[])(Leaves, int64_t, Sum<In>*, bool, bool) = {
      add_leaves<In, 1>, add_leaves<In, 2>, add_leaves<In, 3>, add_leaves<In, 4>,
      add_leaves<In, 5>, add_leaves<In, 6>, add_leaves<In, 7>, add_leaves<In, 8>};
  kForms[count - 1](leaves, n, out, last, streaming);
}

// Sums blocks of elements; one for each thread.
template <typename In>
class Adder {
  using T = Sum<In>;

 public:
  Adder(const void* in, int64_t leaves, int64_t stride, T* out, bool streaming)
      : in_(static_cast<const unsigned char*>(in)),
        leaves_(leaves),
        stride_(stride),
        out_(out),
        streaming_(streaming) {}

  void block(int64_t first, int64_t n) {
    if (leaves_ <= kGroup) return group(0, first, n, out_ + first, true, streaming_);
    int64_t held = 0;
    for (int64_t g = 0; g * kGroup < leaves_; ++g) {
      if (static_cast<int64_t>(waiting_.size()) < (held + 1) * kBlock) waiting_.resize((held + 1) * kBlock);
      group(g * kGroup, first, n, waiting(held++), false, false);
      for (int64_t done = g; done & 1; done >>= 1) held = fold(held, n);
    }
    while (held > 1) held = fold(held, n);
    for (int64_t j = 0; j < n; ++j) out_[first + j] = canonical(waiting_[j]);
  }

 private:
  T* waiting(int64_t slot) { return waiting_.data() + slot * kBlock; }

  // Adds the newest waiting sum to the one before it; returns how many are left.
  int64_t fold(int64_t held, int64_t n) {
    T* left = waiting(held - 2);
    const T* right = waiting(held - 1);
    for (int64_t j = 0; j < n; ++j) left[j] = left[j] + right[j];
    return held - 1;
  }

  // Leaves from..from + 8, as far as there are, elements first..first + n.
  void group(int64_t from, int64_t first, int64_t n, T* out, bool last, bool streaming) {
    const int count = static_cast<int>(std::min<int64_t>(kGroup, leaves_ - from));
    const unsigned char* leaves[kGroup];
    for (int i = 0; i < count; ++i) leaves[i] = in_ + (from + i) * stride_ + first * static_cast<int64_t>(sizeof(In));
    add_group<In>(leaves, count, n, out, last, streaming);
  }

  const unsigned char* in_;
  const int64_t leaves_, stride_;
  T* out_;
  const bool streaming_;
  std::vector<T> waiting_;
};

template <typename In>
void sum_all(const void* in, int64_t leaves, int64_t n, int64_t stride, int threads, void* out) {
  const double bytes = static_cast<double>(leaves) * static_cast<double>(n) * sizeof(In);
  std::atomic<int64_t> next{0};
  on_threads(useful_threads(threads, bytes), [&] {
    const ExactFloats exact;
    const bool streaming = bytes >= kStreamBytes;
    Adder<In> adder(in, leaves, stride, static_cast<Sum<In>*>(out), streaming);
    for (int64_t a = kTask * next++; a < n; a = kTask * next++)
      for (int64_t b = a; b < std::min(n, a + kTask); b += kBlock) adder.block(b, std::min(kBlock, n - b));
    if (streaming) end_of_stream();
  });
}

}  // namespace
}  // namespace ckpt

extern "C" int ckpt_tree_sum(const void* in, int dtype, int64_t leaves, int64_t n, int64_t leaf_stride, int threads,
                             void* out) {
  if (const int fault = ckpt::check_tree_sum(in, dtype, leaves, n, leaf_stride, out)) return fault;
  if (n == 0) return CKPT_OK;
  switch (dtype) {
    case CKPT_FP16: ckpt::sum_all<ckpt::Fp16>(in, leaves, n, leaf_stride, threads, out); break;
    case CKPT_BF16: ckpt::sum_all<ckpt::Bf16>(in, leaves, n, leaf_stride, threads, out); break;
    case CKPT_FP32: ckpt::sum_all<float>(in, leaves, n, leaf_stride, threads, out); break;
    default: ckpt::sum_all<double>(in, leaves, n, leaf_stride, threads, out); break;
  }
  return CKPT_OK;
}
