// A strided copy between two places in memory, made simple: what host and device code both walk over.
#pragma once

#include "ckpt/abi.h"
#include "ckpt/common.h"

namespace ckpt {

// A copy whose adjacent axes are merged where memory allows. `run` bytes are contiguous on both sides; `ndim` axes
// lead from one run to the next, the outermost first.
struct Runs {
  unsigned char* dst;
  const unsigned char* src;
  int64_t run;
  int64_t count;  // runs
  int ndim;
  int64_t extent[CKPT_MAX_NDIM];
  int64_t dst_stride[CKPT_MAX_NDIM];
  int64_t src_stride[CKPT_MAX_NDIM];

  // First bytes of run number `index`.
  CKPT_HD void locate(int64_t index, unsigned char** to, const unsigned char** from) const {
    *to = dst;
    *from = src;
    for (int i = ndim - 1; i >= 0; --i) {
      const int64_t at = index % extent[i];
      index /= extent[i];
      *to += at * dst_stride[i];
      *from += at * src_stride[i];
    }
  }
};

// Axes of more than one index, in the order of the output in memory (widest stride first), merged with the next one
// where they can be.
inline Runs simplify(const ckpt_copy& copy) {
  Runs r{static_cast<unsigned char*>(copy.dst),
         static_cast<const unsigned char*>(copy.src),
         copy.itemsize,
         1,
         0,
         {},
         {},
         {}};
  int order[CKPT_MAX_NDIM], axes = 0;
  const auto step = [&](int i) { return copy.dst_stride[i] < 0 ? -copy.dst_stride[i] : copy.dst_stride[i]; };
  for (int i = 0; i < copy.ndim; ++i) {
    if (copy.extent[i] == 1) continue;
    int at = axes++;
    for (; at > 0 && step(order[at - 1]) < step(i); --at) order[at] = order[at - 1];
    order[at] = i;
  }
  for (int at = 0; at < axes; ++at) {
    const int i = order[at], last = r.ndim - 1;
    const int64_t n = copy.extent[i], d = copy.dst_stride[i], s = copy.src_stride[i];
    if (r.ndim > 0 && r.dst_stride[last] == n * d && r.src_stride[last] == n * s) {
      r.extent[last] *= n;
      r.dst_stride[last] = d;
      r.src_stride[last] = s;
    } else {
      r.extent[r.ndim] = n;
      r.dst_stride[r.ndim] = d;
      r.src_stride[r.ndim] = s;
      ++r.ndim;
    }
  }
  if (r.ndim > 0 && r.dst_stride[r.ndim - 1] == r.run && r.src_stride[r.ndim - 1] == r.run) r.run *= r.extent[--r.ndim];
  for (int i = 0; i < r.ndim; ++i) r.count *= r.extent[i];
  return r;
}

}  // namespace ckpt
