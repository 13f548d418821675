// Strided N-d copies on the host.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ckpt/box_copy.h"
#include "ckpt/check.h"
#include "ckpt/parallel.h"
#include "ckpt/stream.h"
#include "ckpt/transpose.h"

namespace ckpt {
namespace {

constexpr int64_t kStreamBytes = 32 << 20;  // a call that copies more than caches hold writes past them
constexpr int64_t kRowBytes = 512;          // runs of this length are copied one by one
constexpr int64_t kAhead = 4096;            // bytes from what is copied to what is asked for

// Runs of one size on a grid of two axes: along `line`, where the output lies densest, and along the axis before it.
struct Plane {
  unsigned char* to;
  const unsigned char* from;
  int64_t rows, to_row, from_row;
  int64_t line, to_step, from_step;
};

// A known size lets the compiler use its widest loads.
template <int64_t Size>
void copy_lines(const Plane& p) {
  for (int64_t r = 0; r < p.rows; ++r) {
    unsigned char* to = p.to + r * p.to_row;
    const unsigned char* from = p.from + r * p.from_row;
    for (int64_t i = 0; i < p.line; ++i) std::memcpy(to + i * p.to_step, from + i * p.from_step, Size);
  }
}

void copy_lines(const Plane& p, int64_t size) {
  for (int64_t r = 0; r < p.rows; ++r) {
    unsigned char* to = p.to + r * p.to_row;
    const unsigned char* from = p.from + r * p.from_row;
    for (int64_t i = 0; i < p.line; ++i)
      std::memcpy(to + i * p.to_step, from + i * p.from_step, static_cast<size_t>(size));
  }
}

// For an input that lies densest along the rows: tiles of one cache line each way, so that every line of the input is
// used up while it is in the cache.
template <int64_t Size>
void copy_tiles(const Plane& p, bool streaming) {
  constexpr int64_t kTile = kCacheLine / Size;
  const bool dense = p.to_step == Size && p.from_row == Size;
  for (int64_t i = 0; i < p.line; i += kTile)
    for (int64_t r = 0; r < p.rows; r += kTile) {
      unsigned char* to = p.to + r * p.to_row + i * p.to_step;
      const unsigned char* from = p.from + r * p.from_row + i * p.from_step;
      const int64_t rows = std::min(kTile, p.rows - r), line = std::min(kTile, p.line - i);
      if constexpr (Size <= 8) {
        if (dense && rows == kTile && line == kTile) {
          transpose_tile<Size>(to, p.to_row, from, p.from_step, streaming);
          continue;
        }
      }
      copy_lines<Size>({to, from, rows, p.to_row, p.from_row, line, p.to_step, p.from_step});
    }
}

// A run of a streaming copy whose next runs lie `step` bytes apart: asks for what comes kAhead bytes later.
void stream_run(unsigned char* to, const unsigned char* from, int64_t n, int64_t step) {
  const auto at = reinterpret_cast<uintptr_t>(from);
  if (n <= kAhead) return stream(to, from, n, at + kAhead / n * step);
  const int64_t most = n - kAhead;
  stream(to, from, most, at + kAhead);
  stream(to + most, from + most, kAhead, at + step);
}

// Whether all runs are whole cache lines of the output.
bool is_lines(const Plane& p, int64_t size) {
  return ((reinterpret_cast<uintptr_t>(p.to) | p.to_row | p.to_step | size) & (kCacheLine - 1)) == 0;
}

void stream_lines(const Plane& p, int64_t size) {
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t i = 0; i < p.line; ++i)
      stream_run(p.to + r * p.to_row + i * p.to_step, p.from + r * p.from_row + i * p.from_step, size, p.from_step);
}

void copy_plane(const Plane& p, int64_t size, bool streaming) {
  if (streaming && is_lines(p, size)) return stream_lines(p, size);
  const bool across = p.rows > 1 && std::abs(p.from_row) < std::abs(p.from_step);
  switch (size) {
    case 1: return across ? copy_tiles<1>(p, streaming) : copy_lines<1>(p);
    case 2: return across ? copy_tiles<2>(p, streaming) : copy_lines<2>(p);
    case 4: return across ? copy_tiles<4>(p, streaming) : copy_lines<4>(p);
    case 8: return across ? copy_tiles<8>(p, streaming) : copy_lines<8>(p);
    case 16: return across ? copy_tiles<16>(p, streaming) : copy_lines<16>(p);
    case 32: return copy_lines<32>(p);
    case 64: return copy_lines<64>(p);
    case 128: return copy_lines<128>(p);
    case 256: return copy_lines<256>(p);
    default: return copy_lines(p, size);
  }
}

// Bytes first..last of a copy, counted run after run.
void copy_rows(const Runs& r, int64_t first, int64_t last, bool streaming) {
  const int inner = r.ndim - 1;
  const int64_t line = r.ndim == 0 ? 1 : r.extent[inner];
  const int64_t to_step = r.ndim == 0 ? 0 : r.dst_stride[inner], from_step = r.ndim == 0 ? 0 : r.src_stride[inner];
  while (first < last) {
    const int64_t index = first / r.run;
    int64_t skip = first % r.run;
    unsigned char* to;
    const unsigned char* from;
    r.locate(index, &to, &from);
    for (int64_t i = index % line; i < line && first < last; ++i, to += to_step, from += from_step, skip = 0) {
      const int64_t n = std::min(last - first, r.run - skip);
      if (streaming) {
        stream_run(to + skip, from + skip, n, from_step);
      } else {
        std::memcpy(to + skip, from + skip, static_cast<size_t>(n));
      }
      first += n;
    }
  }
}

// The axis along which the input lies densest comes second to last, so that a plane has both it and the last one.
void bring_inward(Runs& r) {
  int densest = r.ndim - 1;
  for (int i = 0; i < r.ndim; ++i)
    if (std::abs(r.src_stride[i]) < std::abs(r.src_stride[densest])) densest = i;
  for (auto* axis : {r.extent, r.dst_stride, r.src_stride})
    if (densest < r.ndim - 2) std::rotate(axis + densest, axis + densest + 1, axis + r.ndim - 1);
}

// Runs first..last of a copy of short runs: planes of whole lines (a line is the last axis), and parts of lines at the
// ends of the range.
void copy_planes(const Runs& r, int64_t first, int64_t last, bool streaming) {
  const int inner = r.ndim - 1, outer = r.ndim - 2;
  const int64_t line = r.extent[inner], rows = outer < 0 ? 1 : r.extent[outer];
  while (first < last) {
    Plane p{};
    if (outer >= 0) p.to_row = r.dst_stride[outer], p.from_row = r.src_stride[outer];
    p.to_step = r.dst_stride[inner], p.from_step = r.src_stride[inner];
    p.line = std::min(last - first, line - first % line);
    p.rows = p.line < line ? 1 : std::min((last - first) / line, rows - first / line % rows);
    r.locate(first, &p.to, &p.from);
    copy_plane(p, r.run, streaming);
    first += p.rows * p.line;
  }
}

// Bytes first..last of all the bytes of a copy, counted run after run. Short runs are not cut: the range has those that
// start in it.
void copy_share(const ckpt_copy& copy, int64_t first, int64_t last, bool streaming) {
  Runs r = simplify(copy);
  if (r.ndim == 0 || r.run >= kRowBytes) return copy_rows(r, first, last, streaming);
  bring_inward(r);
  copy_planes(r, (first + r.run - 1) / r.run, (last + r.run - 1) / r.run, streaming);
}

}  // namespace
}  // namespace ckpt

extern "C" int ckpt_box_copy(const ckpt_copy* copies, int64_t count, int threads) {
  using namespace ckpt;
  std::vector<int64_t> start(1, 0);  // of each copy among the bytes of all
  for (int64_t i = 0; i < count; ++i) {
    if (const int fault = check_copy(copies[i])) return fault;
    int64_t bytes = copies[i].itemsize;
    for (int a = 0; a < copies[i].ndim; ++a) bytes *= copies[i].extent[a];
    if (bytes > kMaxProduct - start.back()) return CKPT_TOO_LARGE;
    start.push_back(start.back() + bytes);
  }
  const int64_t all = start.back(), useful = useful_threads(threads, static_cast<double>(all));
  const bool streaming = all >= kStreamBytes;
  std::atomic<int64_t> next{0};
  on_threads(useful, [&] {
    for (int64_t t = next++; t < useful; t = next++) {
      const int64_t a = all / useful * t, b = t + 1 == useful ? all : all / useful * (t + 1);
      int64_t i = std::upper_bound(start.begin(), start.end(), a) - start.begin() - 1;
      for (; i < count && start[i] < b; ++i)
        if (start[i] < start[i + 1])
          copy_share(copies[i], std::max(a, start[i]) - start[i], std::min(b, start[i + 1]) - start[i], streaming);
    }
    if (streaming) end_of_stream();
  });
  return CKPT_OK;
}
