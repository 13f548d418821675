// Inner products of rows of words with coefficients modulo p: the inner loop of the fingerprint on the host.
#pragma once

#include "ckpt/fingerprint.h"

namespace ckpt {

constexpr int kMaxRows = 4;
constexpr int64_t kSegment = 2048;  // words of a row in one call: the bound of every accumulator; four rows fit L1

struct Dot {
  int rows;  // that it takes together best, so that they share one load of the coefficients

  // out[i] = sum over j of rows[i][j] * (c0[j], c1[j]) modulo p, for `count` rows (at most kMaxRows) of n words (at
  // most kSegment), at any alignment.
  void (*call)(const unsigned char* const* rows, int count, const uint64_t* c0, const uint64_t* c1, int64_t n,
               Pair* out);
};

// The form for the instruction set in use. All forms give the same result.
Dot chosen_dot();

}  // namespace ckpt
