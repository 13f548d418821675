// What of a fingerprint depends on geometry alone: coefficients by axis, and the sum of the weights of a box.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>

#include "ckpt/abi.h"
#include "ckpt/fingerprint.h"

namespace ckpt {

// Coefficients of the low digit of one axis, and their sums: prefix[k][i] is the sum of c[k][0..i).
struct Table {
  std::array<uint64_t, kDigit> c[2];
  std::array<uint64_t, kDigit + 1> prefix[2];

  explicit Table(int axis) {
    prefix[0][0] = prefix[1][0] = 0;
    for (int64_t i = 0; i < kDigit; ++i) {
      const Pair found = coefficient(axis, 0, i);
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
inline const Table& table_of(int axis) {
  static std::mutex mutex;
  static std::array<std::unique_ptr<const Table>, CKPT_MAX_NDIM> tables;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& table = tables[axis];
  if (!table) table = std::make_unique<const Table>(axis);
  return *table;
}

// Coefficients of one axis of a logical tensor of `count` indices: of one digit, or of two.
class Axis {
 public:
  Axis(int number, int64_t count) : number_(number), low_(table_of(number)), two_digits_(count > kDigit) {}

  Pair at(int64_t index) const { return low_.at(index % kDigit) * high(index / kDigit); }

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
  Pair high(int64_t digit) const { return two_digits_ ? coefficient(number_, 1, digit) : Pair{{1, 1}}; }

  int number_;
  const Table& low_;
  bool two_digits_;
};

// Sum of the weights of the units along the last axis of a box whose units have at most 4 bytes, without those of
// the axes before it.
inline Pair ones_of_last_axis(const ckpt_box& box) {
  const int last = box.ndim - 1, unit = static_cast<int>(std::min<int64_t>(box.itemsize, 4)), per_word = 4 / unit;
  const Axis axis(last, (box.shape[last] + per_word - 1) / per_word);
  const int64_t from = box.offset[last], to = from + box.extent[last];
  const int64_t first_whole = (from + per_word - 1) / per_word, last_whole = to / per_word;
  Pair total{{0, 0}};
  const auto add_units = [&](int64_t a, int64_t b) {
    for (int64_t u = a; u < b; ++u) {
      const Pair c = axis.at(u / per_word);
      const int bits = static_cast<int>(u % per_word) * 8 * unit;
      total = total + Pair{{shifted(c.v[0], bits), shifted(c.v[1], bits)}};
    }
  };
  if (first_whole >= last_whole) {
    add_units(from, to);
    return total;
  }
  add_units(from, first_whole * per_word);
  uint64_t each = 0;  // 1 + 2^(bits of a unit) + ...: what the units of one whole word weigh together
  for (int q = 0; q < per_word; ++q) each += uint64_t{1} << (8 * unit * q);
  total = total + axis.sum(first_whole, last_whole) * Pair{{each, each}};
  add_units(last_whole * per_word, to);
  return total;
}

// Sum of the coefficients of the words of a wide element, which are one more axis.
inline Pair ones_of_planes(const ckpt_box& box) {
  Pair total{{0, 0}};
  for (int64_t w = 0; 4 * w < box.itemsize; ++w) total = total + coefficient(box.ndim, 0, w);
  return total;
}

// Sum of the weights of all units of a box: what the plus one of each adds.
inline Pair ones_of_box(const ckpt_box& box) {
  Pair total = box.ndim == 0 ? Pair{{1, 1}} : ones_of_last_axis(box);
  for (int i = 0; i + 1 < box.ndim; ++i)
    total = total * Axis(i, box.shape[i]).sum(box.offset[i], box.offset[i] + box.extent[i]);
  return box.itemsize > 4 ? total * ones_of_planes(box) : total;
}

}  // namespace ckpt
