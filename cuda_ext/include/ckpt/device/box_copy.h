// Strided copies on a device, all of a call in one launch.
//
// A copy is cut into items on a grid of axes, in one of three forms. Vectors: the widest loads that addresses, strides
// and runs allow. Pieces: what one aligned vector of the output holds of a run, for runs that lie differently on both
// sides. Tiles: squares, through shared memory, where the input lies densest along another axis than the output. A
// block takes a range of consecutive items: where it starts is divided out once, and from there every item has its
// place by additions with carry.
#pragma once

#include <utility>
#include <vector>

#include "ckpt/box_copy.h"
#include "ckpt/device/launch.h"

namespace ckpt {

constexpr int kTaskItems = 4096;   // vectors or pieces of a task
constexpr int kTaskTiles = 4;      // tiles of a task
constexpr int kCopyAxes = CKPT_MAX_NDIM + 1;
constexpr int64_t kPieceRun = 64;  // bytes of a run from which on pieces are better than small vectors
constexpr int64_t kTileExtent = 16, kTileStride = 32;  // least extent of both axes, most bytes of the input's stride

enum CopyForm : int32_t { kVectors, kPieces, kTiles };

struct CopyAxis {
  int64_t extent, dst_stride, src_stride;
  uint32_t inverse;  // ceil(2^32 / extent) for extents of 2 to kTaskItems, else 0
};

struct CopyJob {
  unsigned char* dst;
  const unsigned char* src;
  int64_t items, run;
  int64_t first_axis;  // among the axes of all jobs
  int32_t axes;
  CopyForm form;
  int32_t vector;  // bytes of one load, or of an element of a tile

  int64_t tasks() const {
    const int64_t each = form == kTiles ? kTaskTiles : kTaskItems;
    return (items + each - 1) / each;
  }
};

// Elements of one side of a tile, by their size; bytes from one row to the next, so that columns spread over all banks
// of shared memory; bytes of a tile.
CKPT_HD constexpr int tile_side(int size) { return size <= 4 ? 64 : 32; }
CKPT_HD constexpr int tile_row(int size) { return tile_side(size) * size + (size < 4 ? 4 : size); }
CKPT_HD constexpr int tile_bytes(int size) { return tile_side(size) * tile_row(size); }
constexpr int kMostTileBytes = tile_bytes(16);
static_assert(tile_bytes(4) <= kMostTileBytes && tile_bytes(8) <= kMostTileBytes, "room for a tile of any size");

// ---- what to do, on the host ----

// The largest power of two up to 16 that divides all addresses, strides and the run.
inline int widest_vector(const Runs& r) {
  uint64_t bits = reinterpret_cast<uintptr_t>(r.dst) | reinterpret_cast<uintptr_t>(r.src) | 16;
  bits |= static_cast<uint64_t>(r.run);
  for (int i = 0; i < r.ndim; ++i)
    bits |= static_cast<uint64_t>(r.dst_stride[i]) | static_cast<uint64_t>(r.src_stride[i]);
  return static_cast<int>(bits & (~bits + 1));
}

inline int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

// The axis along which the input lies densest, if tiles of it and the last axis are worth while; else -1.
inline int axis_for_tiles(const Runs& r, int vector) {
  const int last = r.ndim - 1;
  if (r.ndim < 2 || r.run != vector || r.extent[last] < kTileExtent) return -1;
  int densest = last;
  for (int i = 0; i < last; ++i)
    if (r.extent[i] >= kTileExtent && magnitude(r.src_stride[i]) < magnitude(r.src_stride[densest])) densest = i;
  return densest < last && magnitude(r.src_stride[densest]) <= kTileStride ? densest : -1;
}

// Describes a copy that is not empty; its axes are appended to those of all jobs, the innermost last. For tiles the
// last two axes are the input's densest and the output's densest.
inline CopyJob make_copy_job(const ckpt_copy& copy, std::vector<CopyAxis>& axes) {
  const Runs r = simplify(copy);
  CopyJob job{r.dst, r.src, r.count, r.run, static_cast<int64_t>(axes.size()), 0, kVectors, widest_vector(r)};
  const auto add_axis = [&](int64_t extent, int64_t dst_stride, int64_t src_stride) {
    const uint64_t inverse = extent <= kTaskItems ? ((uint64_t{1} << 32) + extent - 1) / extent : 0;
    axes.push_back({extent, dst_stride, src_stride, static_cast<uint32_t>(inverse)});
    ++job.axes;
  };
  const int densest = axis_for_tiles(r, job.vector);
  for (int i = 0; i < r.ndim; ++i)
    if (densest < 0 || (i != densest && i != r.ndim - 1)) add_axis(r.extent[i], r.dst_stride[i], r.src_stride[i]);
  if (densest >= 0) {
    job.form = kTiles;
    const int side = tile_side(job.vector);
    for (const int i : {densest, r.ndim - 1}) {
      add_axis(r.extent[i], r.dst_stride[i], r.src_stride[i]);
      job.items = job.items / r.extent[i] * ((r.extent[i] + side - 1) / side);
    }
  } else if (job.vector <= 4 && r.run >= kPieceRun) {
    job.form = kPieces;
    const int64_t pieces = (r.run + 14) / 16 + 1;  // that a run can touch, wherever it starts
    add_axis(pieces, 0, 0);
    job.items *= pieces;
  } else if (r.run > job.vector) {
    add_axis(r.run / job.vector, job.vector, job.vector);
    job.items *= r.run / job.vector;
  }
  return job;
}

// ---- doing it ----

// Where an item begins, and its index along the innermost axis.
struct Place {
  unsigned char* to;
  const unsigned char* from;
  int64_t last;
};

// The first item of a task: its index along each axis, and where the axes before that one lead.
struct CopyStart {
  CopyAxis axis[kCopyAxes];
  int64_t index[kCopyAxes];
  unsigned char* to[kCopyAxes + 1];
  const unsigned char* from[kCopyAxes + 1];

  CKPT_DEVICE void set(const CopyJob& job, int64_t item) {
    CKPT_UNROLL(1)
    for (int a = job.axes - 1; a >= 0; --a) {
      index[a] = item % axis[a].extent;
      item /= axis[a].extent;
    }
    to[0] = job.dst;
    from[0] = job.src;
    CKPT_UNROLL(1)
    for (int a = 0; a < job.axes; ++a) {
      to[a + 1] = to[a] + index[a] * axis[a].dst_stride;
      from[a + 1] = from[a] + index[a] * axis[a].src_stride;
    }
  }

  // Item number i from the first one on, i below kTaskItems.
  CKPT_DEVICE Place at(int axes, int i) const {
    int64_t to_offset = 0, from_offset = 0, carry = i, last = axes == 0 ? 0 : index[axes - 1];
    int a = axes;
    CKPT_UNROLL(1)
    while (carry != 0 && a > 0) {
      const CopyAxis along = axis[--a];
      int64_t x = index[a] + carry;
      if (along.inverse != 0) {  // then x is below 2 * kTaskItems, and the product with the inverse exact enough
        carry = static_cast<int64_t>((static_cast<uint64_t>(x) & 0xFFFFFFFFu) * along.inverse >> 32);
        x -= carry * along.extent;
      } else {
        carry = x >= along.extent;
        if (carry != 0) x -= along.extent;
      }
      to_offset += x * along.dst_stride;
      from_offset += x * along.src_stride;
      if (a == axes - 1) last = x;
    }
    return {to[a] + to_offset, from[a] + from_offset, last};
  }
};

struct BoxCopyKernel {
  static constexpr int kThreads = 256, kBlocks = 4;
  static constexpr int kAhead = 2;  // items of a thread that are loaded before the first one is stored

  struct Shared {
    CopyStart start;
    alignas(16) unsigned char tile[kMostTileBytes];
  };

  const CopyJob* jobs;
  const CopyAxis* axes;
  const int64_t* first_task;
  int64_t count, tasks;

  CKPT_DEVICE void run(Block<kThreads> block, Shared& shared) const {
    for (int64_t task = block.index; task < tasks; task += block.count) {
      const int64_t number = job_of(first_task, count, task);
      const CopyJob& job = jobs[number];
      if (job.form == kTiles) {
        run_tiles(block, shared, job, (task - first_task[number]) * kTaskTiles);
      } else {
        run_items(block, shared.start, job, (task - first_task[number]) * kTaskItems);
      }
    }
  }

 private:
  CKPT_DEVICE void run_items(Block<kThreads> block, CopyStart& start, const CopyJob& job, int64_t first) const {
    const int items = static_cast<int>(least(kTaskItems, job.items - first));
    block.each([&](int t) {
      if (t < job.axes) start.axis[t] = axes[job.first_axis + t];
    });
    block.each([&](int t) {
      if (t == 0) start.set(job, first);
    });
    block.each([&](int t) {
      if (job.form == kPieces) return copy_pieces(start, job.axes, job.run, items, t);
      switch (job.vector) {
        case 16: return copy_vectors<Vector>(start, job.axes, items, t);
        case 8: return copy_vectors<uint64_t>(start, job.axes, items, t);
        case 4: return copy_vectors<uint32_t>(start, job.axes, items, t);
        case 2: return copy_vectors<uint16_t>(start, job.axes, items, t);
        default: return copy_vectors<uint8_t>(start, job.axes, items, t);
      }
    });
  }

  template <typename V>
  CKPT_DEVICE static void copy_vectors(const CopyStart& start, int axes, int items, int t) {
    CKPT_UNROLL(1)
    for (int first = t; first < items; first += kThreads * kAhead) {
      V value[kAhead];
      unsigned char* to[kAhead];
      CKPT_UNROLL(kAhead)
      for (int u = 0; u < kAhead; ++u) {  // in place of items past the end, the last one
        const Place place = start.at(axes, static_cast<int>(least(first + u * kThreads, items - 1)));
        to[u] = place.to;
        value[u] = load<V>(place.from);
      }
      CKPT_UNROLL(kAhead)
      for (int u = 0; u < kAhead; ++u)
        if (first + u * kThreads < items) store(to[u], value[u]);
    }
  }

  CKPT_DEVICE static void copy_pieces(const CopyStart& start, int axes, int64_t run, int items, int t) {
    CKPT_UNROLL(1)
    for (int i = t; i < items; i += kThreads) {
      const Place place = start.at(axes, i);
      copy_piece(place.to, place.from, run, place.last);
    }
  }

  // Part of a run of bytes: what piece number `piece` of 16 aligned bytes of the output holds of it. The input is read
  // by aligned words as far as these belong to the run.
  CKPT_DEVICE static void copy_piece(unsigned char* to, const unsigned char* from, int64_t run, int64_t piece) {
    const int64_t skip = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) & 15);
    const int64_t a = piece * 16 - skip < 0 ? 0 : piece * 16 - skip, b = least(run, (piece + 1) * 16 - skip);
    if (a >= b) return;
    const int64_t shift = static_cast<int64_t>(reinterpret_cast<uintptr_t>(from + a) & 3);
    const int words = shift == 0 ? 4 : 5;
    if (b - a == 16 && a >= shift && a - shift + 4 * words <= run) {
      uint32_t w[5];
      CKPT_UNROLL(5)
      for (int i = 0; i < 5; ++i) w[i] = i < words ? load<uint32_t>(from + a - shift + 4 * i) : 0;
      Vector value;
      CKPT_UNROLL(4)
      for (int i = 0; i < 4; ++i)
        value.w[i] = static_cast<uint32_t>((uint64_t{w[i + 1]} << 32 | w[i]) >> (8 * shift));
      store(to + a, value);
      return;
    }
    unsigned char byte[16];
    CKPT_UNROLL(16)
    for (int i = 0; i < 16; ++i)
      byte[i] = i < b - a ? load<unsigned char>(from + a + i) : 0;
    CKPT_UNROLL(16)
    for (int i = 0; i < 16; ++i)
      if (i < b - a) store(to + a + i, byte[i]);
  }

  CKPT_DEVICE void run_tiles(Block<kThreads> block, Shared& shared, const CopyJob& job, int64_t first) const {
    const int64_t last = least(job.items, first + kTaskTiles);
    for (int64_t tile = first; tile < last; ++tile) {
      switch (job.vector) {
        case 16: copy_tile<Vector>(block, shared.tile, job, tile); break;
        case 8: copy_tile<uint64_t>(block, shared.tile, job, tile); break;
        case 4: copy_tile<uint32_t>(block, shared.tile, job, tile); break;
        case 2: copy_tile<uint16_t>(block, shared.tile, job, tile); break;
        default: copy_tile<uint8_t>(block, shared.tile, job, tile); break;
      }
    }
  }

  // Reads along the input's densest axis, writes along the output's.
  template <typename V>
  CKPT_DEVICE void copy_tile(Block<kThreads> block, unsigned char* shared, const CopyJob& job, int64_t tile) const {
    constexpr int kSide = tile_side(sizeof(V)), kRow = tile_row(sizeof(V)), kStep = kThreads / kSide;
    constexpr int kLoops = kSide / kStep;
    [[maybe_unused]] constexpr int kUnroll = kLoops < 8 ? kLoops : 8;
    const CopyAxis* axis = axes + job.first_axis;
    const CopyAxis in = axis[job.axes - 2], out = axis[job.axes - 1];
    const int64_t across = (out.extent + kSide - 1) / kSide, down = (in.extent + kSide - 1) / kSide;
    const int64_t i0 = tile / across % down * kSide, o0 = tile % across * kSide;
    unsigned char* to = job.dst + i0 * in.dst_stride + o0 * out.dst_stride;
    const unsigned char* from = job.src + i0 * in.src_stride + o0 * out.src_stride;
    int64_t rest = tile / across / down;
    CKPT_UNROLL(1)
    for (int a = job.axes - 3; a >= 0; --a) {
      to += rest % axis[a].extent * axis[a].dst_stride;
      from += rest % axis[a].extent * axis[a].src_stride;
      rest /= axis[a].extent;
    }
    const int ins = static_cast<int>(least(kSide, in.extent - i0));
    const int outs = static_cast<int>(least(kSide, out.extent - o0));
    block.each([&](int t) {
      const int i = t % kSide, o = t / kSide;
      const unsigned char* at = from + i * in.src_stride + o * out.src_stride;
      CKPT_UNROLL(kUnroll)
      for (int u = 0; u < kLoops; ++u, at += kStep * out.src_stride)
        if (i < ins && o + u * kStep < outs)
          *reinterpret_cast<V*>(shared + (o + u * kStep) * kRow + i * sizeof(V)) = load<V>(at);
    });
    block.each([&](int t) {
      const int o = t % kSide, i = t / kSide;
      unsigned char* at = to + i * in.dst_stride + o * out.dst_stride;
      CKPT_UNROLL(kUnroll)
      for (int u = 0; u < kLoops; ++u, at += kStep * in.dst_stride)
        if (i + u * kStep < ins && o < outs)
          store(at, *reinterpret_cast<const V*>(shared + o * kRow + (i + u * kStep) * sizeof(V)));
    });
  }
};

}  // namespace ckpt
