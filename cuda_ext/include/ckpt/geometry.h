// What of a fingerprint depends on geometry alone: coefficients by axis, weights of rows, the sum of all weights.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "ckpt/abi.h"
#include "ckpt/fingerprint.h"

namespace ckpt {

// Coefficients of one digit of one axis, and their sums: prefix[k][i] is the sum of c[k][0..i).
struct Table {
  std::array<uint64_t, kDigit> c[2];
  std::array<uint64_t, kDigit + 1> prefix[2];

  Table(int axis, int digit) {
    prefix[0][0] = prefix[1][0] = 0;
    for (int64_t i = 0; i < kDigit; ++i) {
      const Pair found = coefficient(axis, digit, i);
      for (int k = 0; k < 2; ++k) {
        c[k][i] = found.v[k];
        prefix[k][i + 1] = add(prefix[k][i], found.v[k]);
      }
    }
  }

  Pair at(int64_t i) const { return {{c[0][i], c[1][i]}}; }

  Pair sum(int64_t from, int64_t to) const {
    return {{add(prefix[0][to], kP - prefix[0][from]), add(prefix[1][to], kP - prefix[1][from])}};
  }
};

// Made once, kept for the life of the process.
inline const Table& table_of(int axis, int digit) {
  static std::mutex mutex;
  static std::array<std::unique_ptr<const Table>, 2 * (CKPT_MAX_NDIM + 1)> tables;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& table = tables[2 * axis + digit];
  if (!table) table = std::make_unique<const Table>(axis, digit);
  return *table;
}

// Coefficients of one axis of a logical tensor of `count` indices: of one digit, or of two.
class Axis {
 public:
  Axis(int number, int64_t count)
      : number_(number),
        low_(table_of(number, 0)),
        high_(count > kDigit ? &table_of(number, 1) : nullptr) {}

  const Table& low() const { return low_; }

  Pair high(int64_t digit) const {
    if (high_ == nullptr) return {{1, 1}};
    return digit < kDigit ? high_->at(digit) : coefficient(number_, 1, digit);
  }

  Pair at(int64_t index) const {
    return high_ == nullptr ? low_.at(index) : low_.at(index % kDigit) * high(index / kDigit);
  }

  Pair sum(int64_t from, int64_t to) const {
    Pair total{{0, 0}};
    while (from < to) {
      const int64_t digit = from / kDigit, base = digit * kDigit, stop = std::min(to, base + kDigit);
      total = total + low_.sum(from - base, stop - base) * high(digit);
      from = stop;
    }
    return total;
  }

 private:
  int number_;
  const Table& low_;
  const Table* high_;
};

// The elements of a box as rows along the last axis.
struct Rows {
  const ckpt_box& box;
  int unit;             // bytes of a unit: an element of up to 4 bytes, or one word of a wider one
  int per_word;         // units in a word
  Axis last;            // counts words
  std::vector<Axis> lead;
  int64_t from, to;     // units of the last axis
  int64_t step;         // bytes from one unit to the next

  explicit Rows(const ckpt_box& b)
      : box(b),
        unit(static_cast<int>(std::min<int64_t>(b.itemsize, 4))),
        per_word(4 / unit),
        last(b.ndim - 1, (b.shape[b.ndim - 1] + per_word - 1) / per_word),
        from(b.offset[b.ndim - 1]),
        to(from + b.extent[b.ndim - 1]),
        step(b.stride[b.ndim - 1]) {
    for (int i = 0; i + 1 < b.ndim; ++i) lead.emplace_back(i, b.shape[i]);
  }

  int64_t count() const {
    int64_t n = 1;
    for (int i = 0; i + 1 < box.ndim; ++i) n *= box.extent[i];
    return n;
  }

  // Weight and first byte of a row.
  Pair weight(int64_t row, const unsigned char** at) const {
    Pair product{{1, 1}};
    *at = static_cast<const unsigned char*>(box.data);
    for (int i = box.ndim - 2; i >= 0; --i) {
      const int64_t index = row % box.extent[i];
      row /= box.extent[i];
      *at += index * box.stride[i];
      product = product * lead[i].at(box.offset[i] + index);
    }
    return product;
  }
};

// Sum of the weights of units from..to of the last axis.
inline Pair last_sum(const Rows& rows) {
  Pair total{{0, 0}};
  const int64_t first = (rows.from + rows.per_word - 1) / rows.per_word, last = rows.to / rows.per_word;
  const auto single = [&](int64_t from, int64_t to) {
    for (int64_t u = from; u < to; ++u) {
      const Pair c = rows.last.at(u / rows.per_word);
      const int bits = static_cast<int>(u % rows.per_word) * 8 * rows.unit;
      total = total + Pair{{shifted(c.v[0], bits), shifted(c.v[1], bits)}};
    }
  };
  if (first >= last) {
    single(rows.from, rows.to);
    return total;
  }
  single(rows.from, first * rows.per_word);
  uint64_t each = 0;  // 1 + 2^(bits of a unit) + ...: what the units of one whole word weigh together
  for (int q = 0; q < rows.per_word; ++q) each += uint64_t{1} << (8 * rows.unit * q);
  total = total + rows.last.sum(first, last) * Pair{{each, each}};
  single(last * rows.per_word, rows.to);
  return total;
}

// Sum of the weights of all units: what the plus one of each adds.
inline Pair ones_of(const Rows& rows) {
  Pair total = last_sum(rows);
  for (size_t i = 0; i < rows.lead.size(); ++i) {
    const int64_t from = rows.box.offset[i];
    total = total * rows.lead[i].sum(from, from + rows.box.extent[i]);
  }
  return total;
}

inline Pair ones_of_box(const ckpt_box& box) {
  if (box.itemsize <= 4) return ones_of(Rows(box));
  Pair total{{0, 0}};
  ckpt_box plane = box;
  plane.itemsize = 4;
  const Pair one = ones_of(Rows(plane));
  for (int64_t w = 0; 4 * w < box.itemsize; ++w) total = total + one * coefficient(box.ndim, 0, w);
  return total;
}

}  // namespace ckpt
