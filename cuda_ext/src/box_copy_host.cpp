// Strided N-d copies on the host.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "ckpt/box_copy.h"
#include "ckpt/check.h"

namespace ckpt {
namespace {

// Copies `n` runs that lie a fixed step apart. A known size lets the compiler use its widest loads.
template <int64_t Size>
void copy_fixed(unsigned char* to, const unsigned char* from, int64_t n, int64_t to_step, int64_t from_step) {
  for (int64_t i = 0; i < n; ++i, to += to_step, from += from_step) std::memcpy(to, from, Size);
}

void copy_any(unsigned char* to, const unsigned char* from, int64_t n, int64_t to_step, int64_t from_step, int64_t size) {
  for (int64_t i = 0; i < n; ++i, to += to_step, from += from_step) std::memcpy(to, from, static_cast<size_t>(size));
}

void copy_line(unsigned char* to, const unsigned char* from, int64_t n, int64_t to_step, int64_t from_step, int64_t size) {
  switch (size) {
    case 1: return copy_fixed<1>(to, from, n, to_step, from_step);
    case 2: return copy_fixed<2>(to, from, n, to_step, from_step);
    case 4: return copy_fixed<4>(to, from, n, to_step, from_step);
    case 8: return copy_fixed<8>(to, from, n, to_step, from_step);
    case 16: return copy_fixed<16>(to, from, n, to_step, from_step);
    case 32: return copy_fixed<32>(to, from, n, to_step, from_step);
    case 64: return copy_fixed<64>(to, from, n, to_step, from_step);
    case 128: return copy_fixed<128>(to, from, n, to_step, from_step);
    case 256: return copy_fixed<256>(to, from, n, to_step, from_step);
    default: return copy_any(to, from, n, to_step, from_step, size);
  }
}

// Runs first..last of a copy, line by line along its innermost axis.
void copy_runs(const Runs& r, int64_t first, int64_t last) {
  const int64_t line = r.ndim == 0 ? 1 : r.extent[r.ndim - 1];
  const int64_t to_step = r.ndim == 0 ? 0 : r.dst_stride[r.ndim - 1], from_step = r.ndim == 0 ? 0 : r.src_stride[r.ndim - 1];
  while (first < last) {
    unsigned char* to;
    const unsigned char* from;
    r.locate(first, &to, &from);
    const int64_t n = std::min(last - first, line - first % line);
    copy_line(to, from, n, to_step, from_step, r.run);
    first += n;
  }
}

// A piece of work for one thread: runs of one copy, or, for a copy that is one run, bytes of it.
void copy_share(const Runs& r, int64_t share, int64_t shares) {
  if (r.count > 1) {
    copy_runs(r, r.count * share / shares, r.count * (share + 1) / shares);
  } else if (r.count == 1) {
    const int64_t a = r.run * share / shares, b = r.run * (share + 1) / shares;
    std::memcpy(r.dst + a, r.src + a, static_cast<size_t>(b - a));
  }
}

}  // namespace
}  // namespace ckpt

extern "C" int ckpt_box_copy(const ckpt_copy* copies, int64_t count, int threads) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (const int fault = ckpt::check_copy(copies[i])) return fault;
    int64_t one = copies[i].itemsize;
    for (int a = 0; a < copies[i].ndim; ++a) one *= copies[i].extent[a];
    bytes += one;
  }
  const int64_t useful = std::max<int64_t>(1, std::min<int64_t>(threads, bytes >> 20));
  const auto share = [&](int64_t t) {
    for (int64_t i = 0; i < count; ++i)
      if (!ckpt::is_empty(copies[i])) ckpt::copy_share(ckpt::simplify(copies[i]), t, useful);
  };
  if (useful == 1) {
    share(0);
    return CKPT_OK;
  }
  std::vector<std::thread> workers;
  for (int64_t t = 0; t < useful; ++t) workers.emplace_back(share, t);
  for (auto& w : workers) w.join();
  return CKPT_OK;
}
