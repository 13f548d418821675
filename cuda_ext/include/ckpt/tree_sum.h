// Arithmetic of the fixed binary tree over leaves, for host and device: the tree itself is in src/tree_sum_host.cpp and
// in device/tree_sum.h.
#pragma once

#include <cstring>

#include "ckpt/common.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

namespace ckpt {

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

}  // namespace ckpt
