// Sums rewards over several steps. In the same pass over the rows, fields of the last step replace
// the fields of the batch. No Python, no torch, no global state. The caller has checked the memory
// at every address. This class checks the positions of rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "numbers.h"
#include "rows.h"

namespace replaykit {

class StepsAhead {
 public:
  // Memory for n results in each array. `sums` and `discounts` have the type of the rewards.
  struct Answers {
    char* sums;
    char* discounts;
    std::int64_t* used;  // number of summed steps
    std::int64_t* ends;  // time of the last step
    bool* open;          // true if the last step's flag is not set; null without a flag
  };

  // `reward` is a float in each of `rows` rows, or a double if it has 8 bytes. The rows of one time
  // are adjacent, in the order of the lanes. `flag` is a byte in each row. A null address means
  // that there is no flag. `discounts` has the discounts after 1, 2, ... steps. Its size is the
  // maximum number of steps.
  StepsAhead(Field reward, Field flag, std::vector<Field> fields, std::int64_t rows,
             std::int64_t lanes, double gamma, std::vector<double> discounts)
      : reward_(reward), flag_(flag), fields_(std::move(fields)), rows_(rows), lanes_(lanes),
        gamma_(gamma), discounts_(std::move(discounts)) {
    mark_reads();
  }

  bool has_flag() const { return flag_.base != nullptr; }
  std::int64_t width() const { return static_cast<std::int64_t>(fields_.size()); }

  // Writes the results for n rows `element` at times `time`, whose episodes end at `last`. Copies
  // field f of each last summed row to sides[f]. Returns the position of the first invalid element,
  // or n. An element is invalid if it is not a row, if its episode ends before it, or if its steps
  // exceed the ring. Nothing has changed then.
  std::int64_t run(Numbers element, Numbers time, Numbers last, std::int64_t n,
                   const Answers& answers, const std::vector<Side>& sides) const {
    const auto most = static_cast<std::int64_t>(discounts_.size()) - 1;
    std::vector<std::int64_t> first(static_cast<std::size_t>(n)), steps(first.size());
    const std::int64_t slots = rows_ / lanes_;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t at = element[i], on = std::min(last[i] - time[i], most);
      if (at < 0 || at >= rows_ || on < 0 || on >= slots) return i;
      first[static_cast<std::size_t>(i)] = at;
      steps[static_cast<std::size_t>(i)] = on;
    }
    for (std::int64_t i = 0; i < n; ++i) {
      answers.used[i] = steps[static_cast<std::size_t>(i)] + 1;
      answers.ends[i] = time[i] + steps[static_cast<std::size_t>(i)];
    }
    const std::vector<Piece> pieces = joined(sides);
    if (reward_.bytes == 8) {
      fill<double>(first.data(), steps.data(), n, answers, pieces);
    } else {
      fill<float>(first.data(), steps.data(), n, answers, pieces);
    }
    return n;
  }

 private:
  struct Piece {
    Field from;
    Side to;
  };

  // Prepares prefetches. Adjacent fields, such as the leaves of a record, are prefetched as one
  // range.
  void mark_reads() {
    std::vector<Field> all = fields_;
    if (flag_.base != nullptr) all.push_back(flag_);
    for (const Field& field : all) {
      if (!field.bytes) continue;
      const auto near = std::find_if(reads_.begin(), reads_.end(), [&](const Field& known) {
        const std::int64_t from = field.base - known.base;
        return known.stride == field.stride && from >= 0 && from <= known.bytes + detail::kLine &&
               from + field.bytes <= detail::kPrefetchBytes;
      });
      if (near == reads_.end()) {
        reads_.push_back(field);
      } else {
        near->bytes = std::max(near->bytes, field.base - near->base + field.bytes);
      }
    }
  }

  // Returns the pieces to copy. Fields that are adjacent both in the rows and in the batch form one
  // piece.
  std::vector<Piece> joined(const std::vector<Side>& sides) const {
    std::vector<Piece> pieces;
    for (std::size_t f = 0; f < fields_.size(); ++f) {
      const Field& field = fields_[f];
      if (!field.bytes) continue;  // an empty field may have no address
      if (!pieces.empty()) {
        Piece& before = pieces.back();
        if (before.from.stride == field.stride && before.to.stride == sides[f].stride &&
            before.from.base + before.from.bytes == field.base &&
            before.to.address + before.from.bytes == sides[f].address) {
          before.from.bytes += field.bytes;
          continue;
        }
      }
      pieces.push_back({field, sides[f]});
    }
    return pieces;
  }

  std::int64_t round(std::int64_t row) const { return row < rows_ ? row : row - rows_; }

  template <typename Number>
  void fill(const std::int64_t* first, const std::int64_t* steps, std::int64_t n,
            const Answers& answers, const std::vector<Piece>& pieces) const {
    std::int64_t wide = detail::kLine * static_cast<std::int64_t>(discounts_.size());
    for (const Field& field : reads_) wide += field.bytes + detail::kLine;
    const std::int64_t ahead = std::max<std::int64_t>(8, detail::kAheadBytes / wide);
    for (std::int64_t i = -ahead; i < n; ++i) {
      if (i + ahead < n) {
        const std::int64_t row = first[i + ahead], on = steps[i + ahead];
        for (std::int64_t k = 0; k <= on; ++k) {
          detail::prefetch_line(reward_.base + round(row + k * lanes_) * reward_.stride);
        }
        for (std::size_t f = 0; on > 0 && f < reads_.size(); ++f) {
          const Field& field = reads_[f];
          detail::prefetch(field.base + round(row + on * lanes_) * field.stride, field.bytes);
        }
      }
      if (i < 0) continue;
      double sum = 0, weight = 1;
      for (std::int64_t k = 0; k <= steps[i]; ++k, weight *= gamma_) {
        if (weight == 0) break;  // 0 * infinity would make the sum NaN
        Number value;
        std::memcpy(&value, reward_.base + round(first[i] + k * lanes_) * reward_.stride,
                    sizeof value);
        sum += weight * static_cast<double>(value);
      }
      put(answers.sums, i, static_cast<Number>(sum));
      const double after = discounts_[static_cast<std::size_t>(steps[i])];
      put(answers.discounts, i, static_cast<Number>(after));
      const std::int64_t row = round(first[i] + steps[i] * lanes_);
      if (flag_.base != nullptr) answers.open[i] = flag_.base[row * flag_.stride] == 0;
      if (steps[i] == 0) continue;  // the batch already has the fields of this row
      for (const Piece& piece : pieces) {
        detail::copy(piece.to.address + i * piece.to.stride,
                     piece.from.base + row * piece.from.stride, piece.from.bytes);
      }
    }
  }

  template <typename Number>
  static void put(char* out, std::int64_t i, Number value) {
    std::memcpy(out + i * static_cast<std::int64_t>(sizeof value), &value, sizeof value);
  }

  Field reward_, flag_;
  std::vector<Field> fields_, reads_;
  std::int64_t rows_, lanes_;
  double gamma_;
  std::vector<double> discounts_;
};

}  // namespace replaykit
