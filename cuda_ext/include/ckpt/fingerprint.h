// The layout-free fingerprint: coefficients, and the digest of one row of words. docs/format.md has the mathematics.
#pragma once

#include "ckpt/common.h"
#include "ckpt/philox.h"

namespace ckpt {

constexpr int64_t kDigit = 65536;  // indices of one digit of an axis

struct Pair {
  uint64_t v[2];
};

CKPT_HD Pair operator+(Pair a, Pair b) { return {{add(a.v[0], b.v[0]), add(a.v[1], b.v[1])}}; }
CKPT_HD Pair operator*(Pair a, Pair b) { return {{mul(a.v[0], b.v[0]), mul(a.v[1], b.v[1])}}; }

// Coefficient of one index of one digit of one axis.
CKPT_HD Pair coefficient(int axis, int digit, int64_t index) {
  const Words w = philox({{static_cast<uint32_t>(index), static_cast<uint32_t>(2 * axis + digit), 0, 0}}, 0x636B7074u,
                         0x66703031u);
  const uint64_t a = (w.w[0] | uint64_t{w.w[1]} << 32) & kP, b = (w.w[2] | uint64_t{w.w[3]} << 32) & kP;
  return {{a == kP ? 0 : a, b == kP ? 0 : b}};
}

// 2^bits times a number below p: a rotation of 61 bits.
CKPT_HD uint64_t shifted(uint64_t x, int bits) {
  return bits == 0 ? x : reduce(((x << bits) & kP) | (x >> (61 - bits)));
}

}  // namespace ckpt
