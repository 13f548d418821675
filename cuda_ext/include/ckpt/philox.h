// Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).
#pragma once

#include "ckpt/common.h"

namespace ckpt {

struct Words {
  uint32_t w[4];
};

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;  // multipliers
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;  // steps of the key

CKPT_HD Words philox(Words counter, uint32_t k0, uint32_t k1) {
  uint32_t x0 = counter.w[0], x1 = counter.w[1], x2 = counter.w[2], x3 = counter.w[3];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxM0} * x0, b = uint64_t{kPhiloxM1} * x2;
    x0 = static_cast<uint32_t>(b >> 32) ^ x1 ^ k0;
    x1 = static_cast<uint32_t>(b);
    x2 = static_cast<uint32_t>(a >> 32) ^ x3 ^ k1;
    x3 = static_cast<uint32_t>(a);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{x0, x1, x2, x3}};
}

// Words 4 * block .. 4 * block + 3 of a stream.
CKPT_HD Words philox_block(uint64_t block, uint64_t stream, uint64_t key) {
  return philox({{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), static_cast<uint32_t>(stream),
                  static_cast<uint32_t>(stream >> 32)}},
                static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

// A word as a number in [0, 1): exact, so that host and device agree.
CKPT_HD float uniform(uint32_t word) { return static_cast<float>(word >> 8) * 5.9604644775390625e-8f; }

}  // namespace ckpt
