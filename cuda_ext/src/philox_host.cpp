// Logical random numbers on the host.
#include "ckpt/philox.h"

#include "ckpt/check.h"

namespace ckpt {
namespace {

template <typename T, typename Make>
int generate(T* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key, Make make) {
  if (n < 0) return CKPT_BAD_EXTENT;
  if (static_cast<uint64_t>(n) > UINT64_MAX - first) return CKPT_TOO_LARGE;
  if (n != 0 && out == nullptr) return CKPT_BAD_POINTER;
  for (int64_t i = 0; i < n;) {
    const uint64_t element = first + static_cast<uint64_t>(i);
    const Words block = philox_block(element / 4, stream, key);
    for (uint64_t q = element % 4; q < 4 && i < n; ++q) out[i++] = make(block.w[q]);
  }
  return CKPT_OK;
}

}  // namespace
}  // namespace ckpt

extern "C" int ckpt_philox(uint32_t* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key) {
  return ckpt::generate(out, n, first, stream, key, [](uint32_t w) { return w; });
}

extern "C" int ckpt_philox_uniform(float* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key) {
  return ckpt::generate(out, n, first, stream, key, ckpt::uniform);
}

extern "C" int ckpt_philox_mask(uint8_t* out, int64_t n, uint64_t first, uint64_t stream, uint64_t key,
                                uint64_t threshold) {
  if (threshold > uint64_t{1} << 32) return CKPT_TOO_LARGE;
  return ckpt::generate(out, n, first, stream, key, [=](uint32_t w) { return static_cast<uint8_t>(w < threshold); });
}
