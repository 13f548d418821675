// Fingerprint of boxes on the host.
//
// The digest of a box is a sum over its words of the word times one coefficient per axis. The axes may be taken in any
// order: the ones that lie densest in memory become the columns of a matrix, all others its rows, and the digest is
// the sum over the rows of their weight times their inner product with the columns' coefficients (dot.h).
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <vector>

#include "ckpt/abi.h"
#include "ckpt/check.h"
#include "ckpt/dot.h"
#include "ckpt/parallel.h"
#include "ckpt/words.h"

namespace ckpt {
namespace {

constexpr int64_t kColumns = 8192;     // columns whose coefficients stay in the L2 cache while all rows go by
constexpr int64_t kTileWords = 32768;  // words gathered at a time
constexpr int64_t kTileRows = 4;       // at least, of these; more where the words of a cache line are rows
constexpr int64_t kCacheLineWords = 16;
constexpr int64_t kEnoughColumns = 64;  // for an axis to be as good as the longest
constexpr double kTaskBytes = 1 << 20;  // least part of a box for one thread

// Costs, in units of the time that the inner product takes for a word (measured on x86; they only steer speed).
constexpr double kRowCost = 100;    // to finish a row
constexpr double kColumnCost = 16;  // to multiply the coefficients of a column that is made of several axes
constexpr double kGatherCost = 4;   // to copy a word from where it does not lie beside the next one
constexpr double kFarCost = 16;     // the same where each next word is more than kFar bytes away
constexpr int64_t kFar = 1024;

// A run of indices of one digit of one axis: coefficients c[k][0..extent), `stride` bytes apart in memory.
struct Run {
  const uint64_t* c[2];
  int64_t extent, stride;

  Pair at(int64_t i) const { return {{c[0][i], c[1][i]}}; }
};

// Goes through the indices of some runs in order, the last one fastest: their weight, and their offset in bytes.
class Walk {
 public:
  Walk(const Run* runs, size_t count, int64_t start) : runs_(runs), count_(count), index_(count), weight_(count + 1) {
    weight_[0] = {{1, 1}};
    for (size_t d = count; d-- > 0;) {
      index_[d] = start % runs[d].extent;
      start /= runs[d].extent;
      offset_ += index_[d] * runs[d].stride;
    }
    weigh(0);
  }

  const Pair& weight() const { return weight_[count_]; }
  int64_t offset() const { return offset_; }

  void next() {
    size_t d = count_;
    while (d-- > 0) {
      if (++index_[d] < runs_[d].extent) {
        offset_ += runs_[d].stride;
        return weigh(d);
      }
      offset_ -= (runs_[d].extent - 1) * runs_[d].stride;
      index_[d] = 0;
    }
    weigh(0);  // past the last index comes the first
  }

 private:
  void weigh(size_t from) {
    for (size_t d = from; d < count_; ++d) weight_[d + 1] = weight_[d] * runs_[d].at(index_[d]);
  }

  const Run* runs_;
  size_t count_;
  std::vector<int64_t> index_;
  std::vector<Pair> weight_;
  int64_t offset_ = 0;
};

// Sums words times coefficients, without the plus one of each element. One for each thread: it keeps its memory.
class Summer {
 public:
  Pair sum(const WordBox& box) {
    std::vector<HighDigits> high(box.axes.size());
    return over_digits(box, 0, {box.data, {{1, 1}}, {}}, high);
  }

 private:
  using HighDigits = std::array<std::vector<uint64_t>, 2>;  // coefficients of the high digits that a part has

  // Axes of two digits fall into parts in which each digit has a run of its own: what comes before the first multiple
  // of 2^16, the whole multiples, the rest.
  Pair over_digits(const WordBox& box, size_t number, const Product<Run>& before, std::vector<HighDigits>& high) {
    if (number == box.axes.size()) return over_words(before, box.units);
    const WordAxis& axis = box.axes[number];
    Pair total{{0, 0}};
    for (int64_t at = axis.first, stop = at + axis.extent; at < stop;) {
      Product<Run> part = before;
      part.data += (at - axis.first) * axis.stride;
      if (axis.count <= kDigit) {
        part.add({{axis.c[0] + at, axis.c[1] + at}, axis.extent, axis.stride});
        at = stop;
      } else {
        const int64_t low = at % kDigit, digit = at / kDigit, whole = low == 0 ? (stop - at) / kDigit : 0;
        const int64_t digits = std::max<int64_t>(whole, 1);
        const int64_t extent = whole > 0 ? kDigit : std::min(kDigit - low, stop - at);
        HighDigits& c = high[number];
        for (auto& half : c) half.resize(digits);
        for (int64_t i = 0; i < digits; ++i) {
          const Pair found = coefficient(axis.number, 1, digit + i);
          for (int k = 0; k < 2; ++k) c[k][i] = found.v[k];
        }
        part.add({{c[0].data(), c[1].data()}, digits, digits == 1 ? 0 : kDigit * axis.stride});
        part.add({{axis.c[0] + low, axis.c[1] + low}, extent, axis.stride});
        at += digits * extent;
      }
      total = total + over_digits(box, number + 1, part, high);
    }
    return total;
  }

  // The words in place where they lie well enough, or else a copy of them, whichever is cheaper.
  Pair over_words(Product<Run> part, const Units& units) {
    auto& runs = part.runs;
    std::stable_sort(runs.begin(), runs.end(),
                     [](const Run& a, const Run& b) { return std::abs(a.stride) > std::abs(b.stride); });
    if (runs.empty()) {
      uint32_t word;
      gather_words(&word, 1, part.data, 0, units);
      return part.factor * Pair{{word, word}};
    }
    const size_t longest = longest_run(runs);
    const auto all = static_cast<double>(part.words(0, runs.size()));
    const double gather = std::abs(runs[longest].stride) > kFar ? kFarCost : kGatherCost;
    const double copied = all * gather + all / static_cast<double>(runs[longest].extent) * kRowCost;
    const Columns columns = cheapest_columns(part);
    return units.is_plain() && runs.back().stride == 4 && columns.cost < copied ? over_rows(part, columns.first)
                                                                                : over_tiles(part, units, longest);
  }

  struct Columns {
    size_t first;  // run
    double cost;
  };

  // How many of the innermost runs, which lie without gaps, to take as columns.
  static Columns cheapest_columns(const Product<Run>& part) {
    const auto& runs = part.runs;
    const auto all = static_cast<double>(part.words(0, runs.size()));
    Columns best{runs.size() - 1, all / static_cast<double>(runs.back().extent) * kRowCost};
    int64_t columns = runs.back().extent;
    for (size_t i = runs.size() - 1; i > 0 && runs[i - 1].stride == 4 * columns;) {
      columns *= runs[--i].extent;
      const auto width = static_cast<double>(columns);
      const double cost = all / width * kRowCost + width * kColumnCost;
      if (cost < best.cost) best = {i, cost};
    }
    return best;
  }

  // The longest run, but the innermost one where that is long enough: its words lie closest together.
  static size_t longest_run(const std::vector<Run>& runs) {
    if (runs.back().extent >= kEnoughColumns) return runs.size() - 1;
    size_t longest = 0;
    for (size_t i = 1; i < runs.size(); ++i)
      if (runs[i].extent > runs[longest].extent) longest = i;
    return longest;
  }

  // The runs from `first` on are the columns, which lie without gaps; those before it are the rows.
  Pair over_rows(const Product<Run>& part, size_t first) {
    const int64_t columns = part.words(first, part.runs.size()), rows = part.words(0, first);
    Pair total{{0, 0}};
    for (int64_t at = 0; at < columns; at += kColumns) {
      const int64_t n = std::min(kColumns, columns - at);
      const uint64_t* c[2] = {part.runs[first].c[0] + at, part.runs[first].c[1] + at};
      if (first + 1 < part.runs.size()) multiply_columns(part, first, at, n, c);
      Walk walk(part.runs.data(), first, 0);
      for (int64_t row = 0; row < rows; row += dot_.rows) {
        const int count = static_cast<int>(std::min<int64_t>(dot_.rows, rows - row));
        const unsigned char* words[kMaxRows];
        Pair weight[kMaxRows], sum[kMaxRows];
        for (int i = 0; i < count; ++i, walk.next()) {
          words[i] = part.data + walk.offset() + 4 * at;
          weight[i] = walk.weight();
        }
        dot_of(words, count, c, n, sum);
        for (int i = 0; i < count; ++i) total = total + sum[i] * weight[i];
      }
    }
    return total * part.factor;
  }

  void dot_of(const unsigned char* const* words, int count, const uint64_t* const* c, int64_t n, Pair* sum) const {
    for (int i = 0; i < count; ++i) sum[i] = {{0, 0}};
    for (int64_t j = 0; j < n; j += kSegment) {
      const unsigned char* at[kMaxRows];
      Pair more[kMaxRows];
      for (int i = 0; i < count; ++i) at[i] = words[i] + 4 * j;
      dot_.call(at, count, c[0] + j, c[1] + j, std::min(kSegment, n - j), more);
      for (int i = 0; i < count; ++i) sum[i] = sum[i] + more[i];
    }
  }

  // Coefficients at..at + n of columns made of several runs: products of one coefficient of each.
  void multiply_columns(const Product<Run>& part, size_t first, int64_t at, int64_t n, const uint64_t** c) {
    const Run& inner = part.runs.back();
    Walk walk(&part.runs[first], part.runs.size() - 1 - first, at / inner.extent);
    for (auto& half : columns_) half.resize(kColumns);
    int64_t i = at % inner.extent;
    for (int64_t j = 0; j < n; i = 0, walk.next()) {
      const Pair weight = walk.weight();
      for (; i < inner.extent && j < n; ++i, ++j)
        for (int k = 0; k < 2; ++k) columns_[k][j] = mul(weight.v[k], inner.c[k][i]);
    }
    for (int k = 0; k < 2; ++k) c[k] = columns_[k].data();
  }

  // Tile by tile a copy of the words, in which run `longest` is the innermost.
  Pair over_tiles(const Product<Run>& part, const Units& units, size_t longest) {
    std::vector<Run> order(part.runs);  // outermost first
    std::rotate(order.begin() + longest, order.begin() + longest + 1, order.end());
    const size_t count = order.size();
    std::vector<int64_t> size(count);
    const int64_t in_line = longest + 1 == count ? 1 : std::min(part.runs.back().extent, kCacheLineWords);
    int64_t room = kTileWords / std::max(kTileRows, in_line);
    for (size_t i = count; i-- > 0;) {
      size[i] = std::min(order[i].extent, room);
      room = i + 1 == count ? kTileWords / size[i] : room / size[i];
    }
    std::vector<int64_t> at(count, 0);
    tile_.resize(kTileWords);
    Pair total{{0, 0}};
    for (bool more = true; more;) {
      total = total + over_tile(part, units, order, at, size);
      more = false;
      for (size_t d = count; d-- > 0 && !more;) {
        at[d] += size[d];
        more = at[d] < order[d].extent;
        if (!more) at[d] = 0;
      }
    }
    return total * part.factor;
  }

  Pair over_tile(const Product<Run>& part, const Units& units, const std::vector<Run>& order,
                 const std::vector<int64_t>& at, const std::vector<int64_t>& size) {
    std::vector<Run> here(order);
    const unsigned char* data = part.data;
    for (size_t i = 0; i < here.size(); ++i) {
      data += at[i] * here[i].stride;
      for (auto& c : here[i].c) c += at[i];
      here[i].extent = std::min(size[i], here[i].extent - at[i]);
    }
    const Run columns = here.back();
    here.pop_back();
    int64_t lines = 1;
    for (const Run& run : here) lines *= run.extent;
    Walk walk(here.data(), here.size(), 0);
    for (int64_t line = 0; line < lines; ++line, walk.next())
      gather_words(tile_.data() + line * columns.extent, columns.extent, data + walk.offset(), columns.stride, units);

    here.push_back(columns);
    Product<Run> copy{reinterpret_cast<const unsigned char*>(tile_.data()), {{1, 1}}, {}};
    int64_t stride = 4;
    for (size_t i = here.size(); i-- > 0;) {
      here[i].stride = stride;
      stride *= here[i].extent;
    }
    for (const Run& run : here) copy.add(run);
    if (copy.runs.empty()) return copy.factor * Pair{{tile_[0], tile_[0]}};
    return over_rows(copy, cheapest_columns(copy).first);
  }

  const Dot dot_ = chosen_dot();
  std::vector<uint64_t> columns_[2];
  std::vector<uint32_t> tile_;
};

// A number for sizes of work only: copies of one element count, however many they are.
double bytes_of(const WordBox& box) {
  double n = 4;
  for (const WordAxis& axis : box.axes) n *= static_cast<double>(axis.extent);
  return n;
}

struct Task {
  int64_t box;
  WordBox words;
};

// Cuts a part of a box along its longest axis into about `pieces`; at multiples of 2^16 where an axis has many.
void add_tasks(int64_t box, const WordBox& words, int64_t pieces, std::vector<Task>& tasks) {
  size_t longest = 0;
  for (size_t i = 1; i < words.axes.size(); ++i)
    if (words.axes[i].extent > words.axes[longest].extent) longest = i;
  if (pieces <= 1 || words.axes.empty()) return tasks.push_back({box, words});
  const WordAxis& axis = words.axes[longest];
  int64_t step = (axis.extent + pieces - 1) / pieces;
  if (step > kDigit) step = (step + kDigit - 1) / kDigit * kDigit;
  const int64_t stop = axis.first + axis.extent;
  for (int64_t at = axis.first, next; at < stop; at = next) {
    next = std::min(stop, (at / step + 1) * step);
    tasks.push_back({box, words});
    WordBox& piece = tasks.back().words;
    piece.data += (at - axis.first) * axis.stride;
    piece.axes[longest].first = at;
    piece.axes[longest].extent = next - at;
  }
}

}  // namespace
}  // namespace ckpt

extern "C" int ckpt_fingerprint(const ckpt_box* boxes, int64_t count, int threads, uint64_t* out) {
  using namespace ckpt;
  for (int64_t i = 0; i < count; ++i)
    if (const int fault = check_box(boxes[i])) return fault;
  std::vector<WordBox> words;
  std::vector<int64_t> owner;
  double bytes = 0;
  std::vector<Pair> total(count, Pair{{0, 0}});
  for (int64_t i = 0; i < count; ++i) {
    if (is_empty(boxes[i])) continue;
    total[i] = ones_of_box(boxes[i]);
    for (WordBox& part : words_of(boxes[i])) {
      bytes += bytes_of(part);
      words.push_back(std::move(part));
      owner.push_back(i);
    }
  }
  const int64_t useful = useful_threads(threads, bytes);
  const double share = useful == 1 ? bytes + 1 : std::max(kTaskBytes, bytes / (4.0 * static_cast<double>(useful)));
  std::vector<Task> tasks;
  for (size_t i = 0; i < words.size(); ++i)
    add_tasks(owner[i], words[i], static_cast<int64_t>(bytes_of(words[i]) / share), tasks);

  std::vector<Pair> found(tasks.size());
  std::atomic<size_t> next{0};
  on_threads(useful, [&] {
    Summer summer;
    for (size_t i = next++; i < tasks.size(); i = next++) found[i] = summer.sum(tasks[i].words);
  });
  for (size_t i = 0; i < tasks.size(); ++i) total[tasks[i].box] = total[tasks[i].box] + found[i];
  for (int64_t i = 0; i < count; ++i) {
    out[2 * i] = total[i].v[0];
    out[2 * i + 1] = total[i].v[1];
  }
  return CKPT_OK;
}
