// Shared by host and device code: qualifiers and arithmetic modulo p = 2^61 - 1.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define CKPT_HD __host__ __device__ __forceinline__
#else
#define CKPT_HD inline
#endif

namespace ckpt {

constexpr uint64_t kP = (uint64_t{1} << 61) - 1;

// Any 64-bit number to its value modulo p.
CKPT_HD uint64_t reduce(uint64_t x) {
  x = (x & kP) + (x >> 61);
  return x >= kP ? x - kP : x;
}

CKPT_HD uint64_t add(uint64_t a, uint64_t b) { return reduce(a + b); }

// Product of two numbers below p.
CKPT_HD uint64_t mul(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  const uint64_t low = a * b, high = __umul64hi(a, b);
#else
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  const uint64_t low = static_cast<uint64_t>(product), high = static_cast<uint64_t>(product >> 64);
#endif
  return add(low & kP, (low >> 61) | (high << 3));
}

}  // namespace ckpt
