// A box as arrays of 32-bit words with coefficients along each axis: what the host fingerprint works on.
#pragma once

#include <cstring>
#include <vector>

#include "ckpt/abi.h"
#include "ckpt/geometry.h"

namespace ckpt {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie in memory");

// How a word lies in memory: its units first..last of `size` bytes, `step` bytes apart. Absent units count as zero.
struct Units {
  int size;
  int first, last;
  int64_t step;

  bool is_plain() const { return size == 4 || ((last - first) * size == 4 && step == size); }
};

// Indices first..first + extent of an axis of a logical tensor that counts `count` words, `stride` bytes apart.
struct WordAxis {
  int number;
  const uint64_t* c[2];  // coefficients of the low digit
  int64_t count;
  int64_t first, extent, stride;
};

struct WordBox {
  const unsigned char* data;
  Units units;
  std::vector<WordAxis> axes;
};

// Coefficients of the axis that the words of wide elements make, for each number that it may have.
struct PlaneTable {
  uint64_t c[CKPT_MAX_NDIM + 1][2][4];

  PlaneTable() {
    for (int axis = 0; axis <= CKPT_MAX_NDIM; ++axis)
      for (int w = 0; w < 4; ++w) {
        const Pair found = coefficient(axis, 0, w);
        c[axis][0][w] = found.v[0];
        c[axis][1][w] = found.v[1];
      }
  }
};

inline WordAxis plane_axis(int number, int64_t words) {
  static const PlaneTable table;
  return {number, {table.c[number][0], table.c[number][1]}, words, 0, words, 4};
}

inline WordAxis word_axis(int number, int64_t count, int64_t first, int64_t extent, int64_t stride) {
  const Table& table = table_of(number);
  return {number, {table.c[0].data(), table.c[1].data()}, count, first, extent, stride};
}

// The words of a box that is not empty. Where units are smaller than a word and the box starts or ends inside of one,
// it falls into up to three arrays: the first word of each row, the whole words, the last word.
inline std::vector<WordBox> words_of(const ckpt_box& box) {
  const int unit = static_cast<int>(std::min<int64_t>(box.itemsize, 4)), per_word = 4 / unit, last = box.ndim - 1;
  WordBox whole{static_cast<const unsigned char*>(box.data), {unit, 0, 1, unit}, {}};
  const int lead = unit == 4 ? box.ndim : std::max(last, 0);
  for (int i = 0; i < lead; ++i)
    whole.axes.push_back(word_axis(i, box.shape[i], box.offset[i], box.extent[i], box.stride[i]));
  if (box.itemsize > 4) whole.axes.push_back(plane_axis(box.ndim, box.itemsize / 4));
  if (unit == 4 || box.ndim == 0) return {whole};

  const int64_t from = box.offset[last], to = from + box.extent[last], step = box.stride[last];
  const int64_t count = (box.shape[last] + per_word - 1) / per_word;
  std::vector<WordBox> found;
  const auto add_words = [&](int64_t first, int64_t n, int64_t first_unit, int64_t last_unit) {
    WordBox part = whole;
    part.data += (first * per_word + first_unit - from) * step;
    part.units = {unit, static_cast<int>(first_unit), static_cast<int>(last_unit), step};
    part.axes.push_back(word_axis(last, count, first, n, n == 1 ? 0 : per_word * step));
    found.push_back(std::move(part));
  };
  const int64_t first_whole = (from + per_word - 1) / per_word, last_whole = to / per_word;
  if (first_whole > last_whole) {
    add_words(last_whole, 1, from % per_word, to % per_word);
    return found;
  }
  if (from % per_word != 0) add_words(first_whole - 1, 1, from % per_word, per_word);
  if (first_whole < last_whole) add_words(first_whole, last_whole - first_whole, 0, per_word);
  if (to % per_word != 0) add_words(last_whole, 1, 0, to % per_word);
  return found;
}

// to[i] = the word of units units.first..last at from + i * stride; Stride is known to the compiler where it is not 0.
template <typename Unit, int64_t Stride>
void join_units(uint32_t* to, int64_t n, const unsigned char* from, int64_t stride, Units units) {
  const auto at = [&](int64_t i, int q) {
    Unit unit;
    std::memcpy(&unit, from + i * (Stride == 0 ? stride : Stride) + (q - units.first) * units.step, sizeof(Unit));
    return uint32_t{unit} << 8 * sizeof(Unit) * q;
  };
  if (units.first == 0 && units.last == 4 / sizeof(Unit)) {
    for (int64_t i = 0; i < n; ++i) {
      uint32_t word = 0;
#pragma GCC unroll 4
      for (int q = 0; q < static_cast<int>(4 / sizeof(Unit)); ++q) word |= at(i, q);
      to[i] = word;
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      uint32_t word = 0;
      for (int q = units.first; q < units.last; ++q) word |= at(i, q);
      to[i] = word;
    }
  }
}

// to[i] = the word at from + i * stride.
inline void gather_words(uint32_t* to, int64_t n, const unsigned char* from, int64_t stride, Units units) {
  if (units.is_plain()) {
    for (int64_t i = 0; i < n; ++i) std::memcpy(to + i, from + i * stride, 4);
  } else if (units.size == 1) {
    (stride == 1 ? join_units<uint8_t, 1> : join_units<uint8_t, 0>)(to, n, from, stride, units);
  } else {
    (stride == 2 ? join_units<uint16_t, 2> : join_units<uint16_t, 0>)(to, n, from, stride, units);
  }
}

// Words at all combinations of some runs' indices, times `factor`. A run has an `extent`, and coefficients `at` indices.
template <typename Run>
struct Product {
  const unsigned char* data;
  Pair factor;
  std::vector<Run> runs;

  void add(const Run& run) {
    if (run.extent == 1) {
      factor = factor * run.at(0);
    } else {
      runs.push_back(run);
    }
  }

  int64_t words(size_t first, size_t last) const {
    int64_t n = 1;
    for (size_t i = first; i < last; ++i) n *= runs[i].extent;
    return n;
  }
};

}  // namespace ckpt
