// The fixed binary tree over leaves on a device.
//
// Eight neighbouring leaves, from a multiple of eight on, are a subtree of their own, and are added in registers. Sums
// of such groups wait until their right neighbour is as large; for up to kFewGroups groups that is in registers too.
#pragma once

#include "ckpt/device/launch.h"
#include "ckpt/tree_sum.h"

namespace ckpt {

constexpr int kGroupLeaves = 8;
constexpr int kFewLevels = 4, kFewGroups = (1 << kFewLevels) - 1;
constexpr int kManyLevels = 45;  // up to 2^48 leaves

struct Fp16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

CKPT_DEVICE uint32_t float_to_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
#endif
}

// Without branches: as the bits of an fp32 number, exponent and fraction are too small by a factor of 2^112. Exact, as
// denormals are kept.
CKPT_DEVICE float widen(Fp16 x) {
  const uint32_t sign = uint32_t{x.bits} >> 15 << 31, special = (x.bits & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0;
  const float magnitude = bits_to_float((x.bits & 0x7FFFu) << 13) * 0x1p112f;
  return bits_to_float(float_to_bits(magnitude) | sign | special);
}
CKPT_DEVICE float widen(Bf16 x) { return from_bf16(x.bits); }
CKPT_DEVICE float widen(float x) { return x; }
CKPT_DEVICE double widen(double x) { return x; }

template <typename In>
struct Widened {
  using Type = float;
};
template <>
struct Widened<double> {
  using Type = double;
};

// Some elements that a thread sums side by side, so that enough loads are under way also for few leaves.
template <typename T>
struct Lanes {
  static constexpr int kCount = 16 / sizeof(T);
  T v[kCount];
};

template <typename T>
CKPT_DEVICE Lanes<T> operator+(const Lanes<T>& a, const Lanes<T>& b) {
  Lanes<T> sum;
  CKPT_UNROLL(4)
  for (int i = 0; i < Lanes<T>::kCount; ++i) sum.v[i] = add_exact(a.v[i], b.v[i]);
  return sum;
}

// The tree over x[0..N).
template <int N, typename T>
CKPT_DEVICE Lanes<T> sum_of(const Lanes<T>* x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    constexpr int kLeft = N > 4 ? 4 : N > 2 ? 2 : 1;
    return sum_of<kLeft>(x) + sum_of<N - kLeft>(x + kLeft);
  }
}

template <typename T, int N, typename Leaf>
CKPT_DEVICE Lanes<T> sum_of_leaves(Leaf leaf, int64_t first) {
  Lanes<T> x[N];  // all are loaded before any is added
  CKPT_UNROLL(8)
  for (int i = 0; i < N; ++i) x[i] = leaf(first + i);
  return sum_of<N>(x);
}

template <typename T, typename Leaf>
CKPT_DEVICE Lanes<T> sum_of_group(Leaf leaf, int64_t first, int64_t leaves) {
  switch (least(kGroupLeaves, leaves - first)) {
    case 1: return sum_of_leaves<T, 1>(leaf, first);
    case 2: return sum_of_leaves<T, 2>(leaf, first);
    case 3: return sum_of_leaves<T, 3>(leaf, first);
    case 4: return sum_of_leaves<T, 4>(leaf, first);
    case 5: return sum_of_leaves<T, 5>(leaf, first);
    case 6: return sum_of_leaves<T, 6>(leaf, first);
    case 7: return sum_of_leaves<T, 7>(leaf, first);
    default: return sum_of_leaves<T, 8>(leaf, first);
  }
}

// A sum of 2^k groups waits in place k, as the binary digits of the number of groups so far say.
template <int kLevels, typename T, typename Leaf>
CKPT_DEVICE Lanes<T> sum_of_groups(Leaf leaf, int64_t leaves) {
  [[maybe_unused]] constexpr int kUnroll = kLevels <= kFewLevels ? kLevels : 1;  // unrolled, all places are registers
  Lanes<T> waiting[kLevels];
  const int64_t groups = (leaves + kGroupLeaves - 1) / kGroupLeaves;
  for (int64_t g = 0; g < groups; ++g) {
    Lanes<T> sum = sum_of_group<T>(leaf, g * kGroupLeaves, leaves);
    bool moving = true;
    CKPT_UNROLL(kUnroll)
    for (int k = 0; k < kLevels; ++k) {
      if (!moving) continue;
      moving = (g >> k & 1) != 0;
      if (moving) {
        sum = waiting[k] + sum;
      } else {
        waiting[k] = sum;
      }
    }
  }
  Lanes<T> sum;
  bool begun = false;
  CKPT_UNROLL(kUnroll)
  for (int k = 0; k < kLevels; ++k) {
    if ((groups >> k & 1) == 0) continue;
    sum = begun ? waiting[k] + sum : waiting[k];
    begun = true;
  }
  return sum;
}

template <typename In, int kLevels>
struct TreeSumKernel {
  static constexpr int kThreads = 256, kBlocks = 3;
  using T = typename Widened<In>::Type;
  static constexpr int kLanes = Lanes<T>::kCount;

  struct Shared {};

  const unsigned char* in;
  int64_t leaves, n, stride;
  T* out;

  int64_t tasks() const { return (n + kThreads * kLanes - 1) / (kThreads * kLanes); }

  CKPT_DEVICE void run(Block<kThreads> block, Shared&) const {
    block.each([&](int t) {
      const int64_t step = block.count * (kThreads * kLanes);
      for (int64_t at = block.index * (kThreads * kLanes) + t; at < n; at += step) store(at, sum_at(at));
    });
  }

 private:
  // Elements at, at + kThreads, ...; in place of those past the end, the last one.
  CKPT_DEVICE Lanes<T> sum_at(int64_t at) const {
    const auto leaf = [&](int64_t i) {
      const In* row = reinterpret_cast<const In*>(in + i * stride);
      Lanes<T> found;
      CKPT_UNROLL(4)
      for (int lane = 0; lane < kLanes; ++lane) found.v[lane] = widen(row[least(at + lane * kThreads, n - 1)]);
      return found;
    };
    if (leaves <= kGroupLeaves) return sum_of_group<T>(leaf, 0, leaves);
    return sum_of_groups<kLevels, T>(leaf, leaves);
  }

  CKPT_DEVICE void store(int64_t at, const Lanes<T>& sum) const {
    CKPT_UNROLL(4)
    for (int lane = 0; lane < kLanes; ++lane)
      if (at + lane * kThreads < n) out[at + lane * kThreads] = canonical(sum.v[lane]);
  }
};

}  // namespace ckpt
