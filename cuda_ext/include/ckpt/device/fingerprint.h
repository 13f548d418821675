// Fingerprints of boxes on a device, all of a call in one launch.
//
// The digest of a box is a sum over its words of the word times one coefficient per axis, and the axes may be taken in
// any order. Some that lie densest in memory become the columns of a matrix, all others its rows. A block takes a tile:
// it makes the weight of every row once, in shared memory, and each thread sums its columns over the rows, word times
// weight of the row, before it multiplies with the weights of the columns.
#pragma once

#include <cstdlib>
#include <vector>

#include "ckpt/device/launch.h"
#include "ckpt/fingerprint.h"

#if defined(__CUDACC__)
#pragma nv_diag_suppress unrecognized_gcc_pragma  // of the host's loops
#include "ckpt/words.h"
#pragma nv_diag_default unrecognized_gcc_pragma
#else
#include "ckpt/words.h"
#endif

namespace ckpt {

constexpr int kSumThreads = 128;
constexpr int kThreadColumns = 2;
constexpr int kBatchRows = 128;  // rows whose weights are in shared memory at a time, and that a thread sums of a tile

// How a thread loads the words of its columns.
enum WordForm : int32_t {
  kPairs,  // two neighbouring columns in one load
  kWords,  // aligned words
  kHalves, // words of aligned units of two bytes
  kBytes,  // anything else
};

// Indices start..start + extent of one digit of one axis, `stride` bytes apart in memory.
struct FpRun {
  int32_t axis, digit;
  int64_t start, extent, stride;

  CKPT_HD Pair at(int64_t i) const { return coefficient(axis, digit, start + i); }
};

// Words at all combinations of the runs' indices. Rows and columns are counted in the order of their runs, the last
// one fastest.
struct FpJob {
  const unsigned char* data;
  Units units;
  WordForm form;
  int32_t row_runs, column_runs;
  int32_t column_threads;  // a power of two; the other threads of a block take other rows
  int64_t first_run;       // among the runs of all jobs: those of the rows, then those of the columns
  int64_t rows, columns;

  CKPT_HD int64_t tile_rows() const { return int64_t{kBatchRows} * (kSumThreads / column_threads); }
  CKPT_HD int64_t tile_columns() const { return int64_t{kThreadColumns} * column_threads; }
  CKPT_HD int64_t tiles_across() const { return (columns + tile_columns() - 1) / tile_columns(); }
  CKPT_HD int64_t tasks() const { return (rows + tile_rows() - 1) / tile_rows() * tiles_across(); }
};

// ---- what to do, on the host ----

// Axes of two digits fall into parts in which each digit has a run of its own: what comes before the first multiple of
// 2^16, the whole multiples, the rest.
inline std::vector<Product<FpRun>> parts_of(const WordBox& box) {
  std::vector<Product<FpRun>> parts{{box.data, {{1, 1}}, {}}};
  for (const WordAxis& axis : box.axes) {
    std::vector<Product<FpRun>> longer;
    for (int64_t at = axis.first, stop = at + axis.extent; at < stop;) {
      const bool two_digits = axis.count > kDigit;
      const int64_t low = two_digits ? at % kDigit : at, digit = at / kDigit;
      const int64_t digits = two_digits && low == 0 ? std::max<int64_t>((stop - at) / kDigit, 1) : 1;
      const int64_t extent = !two_digits ? stop - at : digits > 1 ? kDigit : std::min(kDigit - low, stop - at);
      for (Product<FpRun> part : parts) {
        part.data += (at - axis.first) * axis.stride;
        if (two_digits) part.add({axis.number, 1, digit, digits, kDigit * axis.stride});
        part.add({axis.number, 0, low, extent, axis.stride});
        longer.push_back(std::move(part));
      }
      at += digits * extent;
    }
    parts = std::move(longer);
  }
  for (Product<FpRun>& part : parts)
    std::stable_sort(part.runs.begin(), part.runs.end(),
                     [](const FpRun& a, const FpRun& b) { return std::abs(a.stride) > std::abs(b.stride); });
  return parts;
}

// The first run of the columns. Each coefficient costs about as much as ten words: those of a row are made once for
// its words in a tile, those of a column once for its rows.
inline size_t first_column_run(const Product<FpRun>& part) {
  const size_t count = part.runs.size();
  size_t best = count;
  double least_cost = 0;
  for (size_t first = 0; first < count; ++first) {
    const auto rows = std::min<double>(kBatchRows, static_cast<double>(part.words(0, first)));
    const auto columns = std::min<double>(kThreadColumns * kSumThreads, static_cast<double>(part.words(first, count)));
    const double cost = static_cast<double>(first) / columns + static_cast<double>(count - first) / rows;
    if (best == count || cost < least_cost) best = first, least_cost = cost;
  }
  return best;
}

inline WordForm form_of(const Product<FpRun>& part, const Units& units) {
  auto bits = reinterpret_cast<uint64_t>(part.data);
  for (const FpRun& run : part.runs) bits |= static_cast<uint64_t>(run.stride);
  if (units.is_plain() && bits % 4 == 0) {
    if (part.runs.empty() || part.runs.back().stride != 4 || part.runs.back().extent % kThreadColumns != 0) return kWords;
    bits = reinterpret_cast<uint64_t>(part.data);
    for (size_t i = 0; i + 1 < part.runs.size(); ++i) bits |= static_cast<uint64_t>(part.runs[i].stride);
    return bits % 8 == 0 ? kPairs : kWords;
  }
  return units.size == 2 && (bits | static_cast<uint64_t>(units.step)) % 2 == 0 ? kHalves : kBytes;
}

// Describes a part; its runs are appended to those of all jobs.
inline FpJob make_fp_job(const Product<FpRun>& part, Units units, std::vector<FpRun>& runs) {
  const size_t count = part.runs.size(), first = first_column_run(part);
  FpJob job{};
  job.data = part.data;
  job.form = form_of(part, units);
  if (units.size == 4) units = {1, 0, 4, 1};  // for words that are not aligned
  job.units = units;
  job.row_runs = static_cast<int32_t>(first);
  job.column_runs = static_cast<int32_t>(count - first);
  job.first_run = static_cast<int64_t>(runs.size());
  job.rows = part.words(0, first);
  job.columns = part.words(first, count);
  job.column_threads = 1;
  while (job.column_threads < kSumThreads && job.tile_columns() < job.columns) job.column_threads *= 2;
  runs.insert(runs.end(), part.runs.begin(), part.runs.end());
  return job;
}

// ---- doing it ----

// A coefficient c = l[0] + 2^21 l[1] + 2^41 l[2] of limbs below 2^21, 2^20 and 2^20. Products of a word with a limb
// stay below 2^53, so that sums of up to 2^11 of them fit 64 bits, and each costs one instruction.
struct Limbs {
  uint32_t l[3];
};

CKPT_DEVICE Limbs limbs_of(uint64_t c) {
  return {{static_cast<uint32_t>(c) & ((1u << 21) - 1), static_cast<uint32_t>(c >> 21) & ((1u << 20) - 1),
           static_cast<uint32_t>(c >> 41)}};
}

struct LimbSum {
  uint64_t l[3];

  CKPT_DEVICE void add_product(uint32_t word, const Limbs& c) {
    CKPT_UNROLL(3)
    for (int i = 0; i < 3; ++i) l[i] += uint64_t{word} * c.l[i];
  }

  CKPT_DEVICE uint64_t value() const {
    return add(add(reduce(l[0]), shifted(reduce(l[1]), 21)), shifted(reduce(l[2]), 41));
  }
};
static_assert(kBatchRows <= 1 << 11, "rows that a thread sums of a tile");

// A row of a tile: 32 bytes, two loads.
struct alignas(16) FpRow {
  Limbs weight[2];
  const unsigned char* at;
};

CKPT_DEVICE int64_t offset_of(const FpRun* runs, int count, int64_t index) {
  int64_t offset = 0;
  CKPT_UNROLL(1)
  for (int i = count - 1; i >= 0; --i) {
    offset += index % runs[i].extent * runs[i].stride;
    index /= runs[i].extent;
  }
  return offset;
}

CKPT_DEVICE Pair weight_of(const FpRun* runs, int count, int64_t index) {
  Pair weight{{1, 1}};
  CKPT_UNROLL(1)
  for (int i = count - 1; i >= 0; --i) {
    weight = weight * runs[i].at(index % runs[i].extent);
    index /= runs[i].extent;
  }
  return weight;
}

// The words of a thread's columns in one row.
struct alignas(8) ColumnWords {
  uint32_t w[kThreadColumns];
};

// Columns of one thread: where they are, and their sums over the rows so far. Past the end of a row they are its last
// one, whose sum is then not used.
struct FpColumns {
  int64_t index[kThreadColumns], offset[kThreadColumns];
  LimbSum sum[kThreadColumns][2];

  CKPT_DEVICE void set(const FpJob& job, const FpRun* runs, int64_t first, int lane) {
    CKPT_UNROLL(2)
    for (int q = 0; q < kThreadColumns; ++q) {
      index[q] = first + (job.form == kPairs ? kThreadColumns * lane + q : lane + q * job.column_threads);
      const int64_t held = least(index[q], job.columns - (job.form == kPairs ? kThreadColumns - q : 1));
      offset[q] = offset_of(runs + job.row_runs, job.column_runs, held);
      sum[q][0] = sum[q][1] = LimbSum{{0, 0, 0}};
    }
  }

  // Rows first, first + step, ... of n.
  template <typename Load>
  CKPT_DEVICE void add_rows(const FpRow* rows, int n, int first, int step, Load load) {
    constexpr int kAhead = Load::kRowsAhead;
    int i = first;
    for (; i + (kAhead - 1) * step < n; i += kAhead * step) {
      ColumnWords words[kAhead];
      CKPT_UNROLL(kAhead)
      for (int u = 0; u < kAhead; ++u) words[u] = load(rows[i + u * step].at, offset);
      CKPT_UNROLL(kAhead)
      for (int u = 0; u < kAhead; ++u) add_row(rows[i + u * step], words[u]);
    }
    for (; i < n; i += step) add_row(rows[i], load(rows[i].at, offset));
  }

  CKPT_DEVICE void add_row(const FpRow& row, const ColumnWords& words) {
    CKPT_UNROLL(2)
    for (int q = 0; q < kThreadColumns; ++q) {
      sum[q][0].add_product(words.w[q], row.weight[0]);
      sum[q][1].add_product(words.w[q], row.weight[1]);
    }
  }

  CKPT_DEVICE Pair total(const FpJob& job, const FpRun* runs) const {
    Pair all{{0, 0}};
    CKPT_UNROLL(2)
    for (int q = 0; q < kThreadColumns; ++q)
      if (index[q] < job.columns)
        all = all + Pair{{sum[q][0].value(), sum[q][1].value()}} *
                        weight_of(runs + job.row_runs, job.column_runs, index[q]);
    return all;
  }
};

struct LoadPairs {
  static constexpr int kRowsAhead = 4;  // loaded before the first one is summed

  CKPT_DEVICE ColumnWords operator()(const unsigned char* row, const int64_t* offset) const {
    return load<ColumnWords>(row + offset[0]);
  }
};

struct LoadWords {
  static constexpr int kRowsAhead = 4;

  CKPT_DEVICE ColumnWords operator()(const unsigned char* row, const int64_t* offset) const {
    ColumnWords words;
    CKPT_UNROLL(2)
    for (int q = 0; q < kThreadColumns; ++q) words.w[q] = load<uint32_t>(row + offset[q]);
    return words;
  }
};

// Words that are made of units, by loads of the type `Part`: whole units, or their bytes where they are not aligned.
template <typename Part>
struct LoadParts {
  static constexpr int kRowsAhead = 2;
  static constexpr int kParts = 4 / sizeof(Part);
  Units units;

  CKPT_DEVICE ColumnWords operator()(const unsigned char* row, const int64_t* offset) const {
    ColumnWords words;
    CKPT_UNROLL(2)
    for (int q = 0; q < kThreadColumns; ++q) {
      words.w[q] = 0;
      CKPT_UNROLL(4)
      for (int i = 0; i < kParts; ++i) {
        const int byte = i * static_cast<int>(sizeof(Part));
        const int size = sizeof(Part) == 1 ? units.size : static_cast<int>(sizeof(Part)), u = byte / size;
        const unsigned char* at = row + offset[q] + (u - units.first) * units.step + byte % size;
        if (u >= units.first && u < units.last) words.w[q] |= uint32_t{load<Part>(at)} << 8 * byte;
      }
    }
    return words;
  }
};

struct FingerprintKernel {
  static constexpr int kThreads = kSumThreads, kBlocks = 6;

  struct Shared {
    FpRow rows[kBatchRows];
    Pair parts[kThreads];
  };

  const FpJob* jobs;
  const FpRun* runs;
  const int64_t* first_task;
  int64_t count, tasks;
  Pair* out;  // of each task

  CKPT_DEVICE void run(Block<kThreads> block, Shared& shared) const {
    for (int64_t task = block.index; task < tasks; task += block.count) {
      const int64_t number = job_of(first_task, count, task), tile = task - first_task[number];
      const Pair sum = sum_of_tile(block, shared, jobs[number], runs + jobs[number].first_run, tile);
      block.each([&](int t) {
        if (t == 0) out[task] = sum;
      });
    }
  }

 private:
  CKPT_DEVICE static Pair sum_of_tile(Block<kThreads> block, Shared& shared, const FpJob& job, const FpRun* runs,
                                      int64_t tile) {
    const int64_t across = job.tiles_across();
    const int64_t begin = tile / across * job.tile_rows(), end = least(job.rows, begin + job.tile_rows());
    PerThread<FpColumns, kThreads> columns;
    block.each([&](int t) {
      columns[t].set(job, runs, tile % across * job.tile_columns(), t & (job.column_threads - 1));
    });
    for (int64_t row = begin; row < end; row += kBatchRows) {
      const int n = static_cast<int>(least(kBatchRows, end - row));
      block.each([&](int t) {
        if (t < n) shared.rows[t] = row_of(job, runs, row + t);
      });
      block.each([&](int t) {
        const int first = t / job.column_threads, step = kThreads / job.column_threads;
        FpColumns& mine = columns[t];
        switch (job.form) {
          case kPairs: return mine.add_rows(shared.rows, n, first, step, LoadPairs{});
          case kWords: return mine.add_rows(shared.rows, n, first, step, LoadWords{});
          case kHalves: return mine.add_rows(shared.rows, n, first, step, LoadParts<uint16_t>{job.units});
          default: return mine.add_rows(shared.rows, n, first, step, LoadParts<uint8_t>{job.units});
        }
      });
    }
    block.each([&](int t) { shared.parts[t] = columns[t].total(job, runs); });
    for (int half = kThreads / 2; half > 0; half /= 2)
      block.each([&](int t) {
        if (t < half) shared.parts[t] = shared.parts[t] + shared.parts[t + half];
      });
    return shared.parts[0];
  }

  CKPT_DEVICE static FpRow row_of(const FpJob& job, const FpRun* runs, int64_t row) {
    const Pair weight = weight_of(runs, job.row_runs, row);
    return {{limbs_of(weight.v[0]), limbs_of(weight.v[1])}, job.data + offset_of(runs, job.row_runs, row)};
  }
};
static_assert(kBatchRows == kSumThreads, "a thread makes one row of a batch");

}  // namespace ckpt
