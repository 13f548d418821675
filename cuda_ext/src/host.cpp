// What belongs to no one kernel: the version of the interface, and the instruction set in use.
#include <algorithm>
#include <atomic>

#include "ckpt/abi.h"
#include "ckpt/level.h"

namespace ckpt {
namespace {

std::atomic<int> limit_of_level{kIfma};

int machine_level() {
#if CKPT_X86
  static const int found = []() -> int {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512ifma")) return kIfma;
    return __builtin_cpu_supports("avx2") ? kAvx2 : kScalar;
  }();
  return found;
#else
  return kScalar;
#endif
}

}  // namespace

int host_level() { return std::min(machine_level(), limit_of_level.load(std::memory_order_relaxed)); }

}  // namespace ckpt

extern "C" int ckpt_abi(void) { return CKPT_ABI; }

extern "C" int ckpt_host_level(int limit) {
  if (limit >= 0) ckpt::limit_of_level.store(limit, std::memory_order_relaxed);
  return ckpt::host_level();
}
