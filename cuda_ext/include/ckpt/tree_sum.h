// The fixed binary tree over leaves, one element at a time, for host and device.
#pragma once

#include <cstring>

#include "ckpt/common.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

namespace ckpt {

// Bits of an IEEE fp16 or bfloat16 number as the fp32 number of the same value, exactly; denormals included.
CKPT_HD float bits_to_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
#endif
}

CKPT_HD float from_bf16(uint16_t b) { return bits_to_float(uint32_t{b} << 16); }

CKPT_HD float from_fp16(uint16_t h) {
  const uint32_t sign = uint32_t{h} >> 15 << 31, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7F800000u | fraction << 13);
  if (exponent != 0) return bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
  // A denormal is fraction * 2^-24, exact in fp32.
  const float magnitude = static_cast<float>(fraction) * bits_to_float(0x33800000u);
  return sign ? -magnitude : magnitude;
}

CKPT_HD float add_exact(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

CKPT_HD double add_exact(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

CKPT_HD float canonical(float x) { return x != x ? bits_to_float(0x7FC00000u) : x; }

CKPT_HD double canonical(double x) {
  if (x == x) return x;
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(0x7FF8000000000000ll);
#else
  const uint64_t bits = 0x7FF8000000000000ull;
  double d;
  std::memcpy(&d, &bits, 8);
  return d;
#endif
}

constexpr int kTreeDepth = 48;  // up to 2^48 leaves

// Sum over the tree. `leaf(i)` gives leaf i. Finished subtrees of 2^k leaves wait until their right neighbour is as
// large; at the end the smaller ones on the right are folded into the larger ones on their left.
template <typename T, typename Leaf>
CKPT_HD T tree_sum(int64_t leaves, Leaf leaf) {
  T waiting[kTreeDepth];
  int held = 0;
  for (int64_t i = 0; i < leaves; ++i) {
    T sum = leaf(i);
    for (int64_t done = i; done & 1; done >>= 1) sum = add_exact(waiting[--held], sum);
    waiting[held++] = sum;
  }
  T sum = waiting[--held];
  while (held > 0) sum = add_exact(waiting[--held], sum);
  return canonical(sum);
}

}  // namespace ckpt
