// Logical random numbers on a device.
#pragma once

#include "ckpt/device/launch.h"
#include "ckpt/philox.h"

namespace ckpt {

struct alignas(16) AlignedWords {
  Words words;
};

// out[i] = make(word of element first + i), for i in 0..n, n at least 1. A thread makes the four words of a block of
// the stream; they are written by way of shared memory, because elements `first` and `out` may start anywhere.
template <typename T, typename Make>
struct PhiloxKernel {
  static constexpr int kThreads = 256, kBlocks = 6;

  struct Shared {
    AlignedWords made[kThreads];
  };

  T* out;
  int64_t n;
  uint64_t first, stream, key;
  Make make;

  int64_t tasks() const {
    const uint64_t blocks = (first + (n - 1)) / 4 - first / 4 + 1;
    return static_cast<int64_t>((blocks + kThreads - 1) / kThreads);
  }

  CKPT_DEVICE void run(Block<kThreads> block, Shared& shared) const {
    const uint64_t last = (first + (n - 1)) / 4, step = static_cast<uint64_t>(block.count) * kThreads;
    for (uint64_t at = first / 4 + static_cast<uint64_t>(block.index) * kThreads; at <= last; at += step) {
      block.each([&](int t) { shared.made[t].words = philox_block(at + t, stream, key); });
      // Places of the words in `out`: they wrap around to large numbers for words before the first element.
      const uint64_t begin = 4 * at - first, count = static_cast<uint64_t>(n);
      const bool all = begin < count && count - begin >= 4 * kThreads;
      block.each([&](int t) {
        CKPT_UNROLL(4)
        for (int q = 0; q < 4; ++q) {
          const unsigned i = static_cast<unsigned>(t + q * kThreads);
          if (all || begin + i < count) out[begin + i] = make(shared.made[i / 4].words.w[i % 4]);
        }
      });
    }
  }
};

}  // namespace ckpt
