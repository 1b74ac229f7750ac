// SPDX-License-Identifier: Apache-2.0
// Data that dispatch moves: rows of one kind (x, or scales), and one fp32 weight per route.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "call/chunks.hpp"
#include "core/copy.hpp"
#include "cpu/call.hpp"

namespace weft {

struct RowStream {
  const std::byte* source = nullptr;  // [num_tokens] rows of this rank
  std::byte* out = nullptr;           // [num_rows] rows of this rank's output
  size_t row_bytes = 0;
  const Target CallWord::*target = nullptr;        // where receivers want it
  Place place = Place::kStaging;                   // where this rank receives it
  const std::vector<uint64_t>* staged = nullptr;   // by source, offset in this rank's staging
  const std::vector<uint64_t>* crossed = nullptr;  // the same of rows that this rank forwards

  bool is_streamed = false;  // the output is too big to be found in a cache by whoever reads it

  void copy_row(std::byte* to, const std::byte* from) const {
    if (is_streamed) {
      copy_streaming(to, from, row_bytes);
    } else {
      copy_bytes(to, from, row_bytes);
    }
  }
  // Copies rows of some arrivals of a pair to all slots in the output that begins at `to`.
  // `row_of(i)`: where the row of arrival i lies here.
  template <class RowOf>
  void store_rows(std::byte* to, const Arrivals& pair, ChunkRange range, const RowOf& row_of)
      const {
    for (int64_t i = range.first; i < range.last; ++i) {
      const std::byte* from = row_of(i);
      for (const int32_t slot : pair.slots(i)) {
        copy_row(to + static_cast<size_t>(slot) * row_bytes, from);
      }
    }
  }
  [[nodiscard]] const std::byte* token(int32_t idx) const {
    return source + static_cast<size_t>(idx) * row_bytes;
  }
  [[nodiscard]] std::byte* row(int32_t slot) const {
    return out + static_cast<size_t>(slot) * row_bytes;
  }
};

// Rows of one chunk of a pair, from wherever they lie on this rank to wherever their receiver wants
// them.
struct PairChunk {
  size_t to = 0;
  const Arrivals& pair;
  ChunkRange range;
  uint32_t signal = 0;    // of `to`
  int64_t first_row = 0;  // of the pair's arrival 0 in the area that `to` staged
};

// Puts that share a signal, sent together.
class PutList {
 public:
  void add(const Put& put) { puts_[num_puts_++] = put; }
  // Counts arrivals that this rank stored itself, each like one put.
  void add_stored(int64_t num_arrivals) { num_stored_ += static_cast<uint64_t>(num_arrivals); }

  void send(Transport& transport, size_t to, uint32_t signal) const {
    if (num_puts_ > 0) {
      transport.put(static_cast<int>(to), {puts_.data(), num_puts_});
    }
    if (num_stored_ > 0) {
      transport.raise(static_cast<int>(to), signal, num_stored_);
    }
  }

 private:
  std::array<Put, 2 * kChunkArrivals + 1> puts_;  // rows and scales, and the chunk's weights
  size_t num_puts_ = 0;
  uint64_t num_stored_ = 0;
};

// `row_of(i)`: where the row of arrival i lies here.
template <class RowOf>
void add_rows(
    PutList& puts,
    const CpuCall& call,
    const PairChunk& chunk,
    const RowStream& stream,
    const RowOf& row_of
) {
  const Target& target = call.words[chunk.to].*stream.target;
  if (target.place == Place::kEverySlot) {
    std::byte* const base = reach(call, static_cast<int>(chunk.to), target);
    stream.store_rows(base, chunk.pair, chunk.range, row_of);
    puts.add_stored(chunk.range.last - chunk.range.first);
    return;
  }
  const bool is_staged = target.place == Place::kStaging;
  for (int64_t i = chunk.range.first; i < chunk.range.last; ++i) {
    const int64_t row = is_staged ? chunk.first_row + i : chunk.pair.slots(i)[0];
    puts.add(put_to(target, row, row_of(i), stream.row_bytes, chunk.signal));
  }
}

// Weights of an output's rows, as DispatchOutput::weights.
class RowWeights {
 public:
  RowWeights(const PlanData& plan, const Tensor& tensor)
      : plan_(plan), data_(reinterpret_cast<float*>(tensor.data)) {}

  [[nodiscard]] bool is_given() const { return data_ != nullptr; }

  // Stores an arrival's weights, in route order.
  void put(const Arrivals& pair, int64_t arrival, const float* weights) const {
    const auto a = static_cast<size_t>(arrival);
    const auto first = static_cast<size_t>(pair.route_begin[a]);
    const auto last = static_cast<size_t>(pair.route_begin[a + 1]);
    if (pair.one_row) {  // the row's other places belong to routes of other ranks
      const auto topk = static_cast<size_t>(plan_.shape.topk);
      std::fill_n(data_ + static_cast<size_t>(pair.slot[first]) * topk, topk, 0.0F);
    }
    for (size_t j = first; j < last; ++j) {
      data_[row_weight_index(plan_, pair, j)] = weights[j - first];
    }
  }

  // Zeros padding rows [begin, end).
  void zero(int64_t begin, int64_t end) const {
    const bool is_by_choice = plan_.shape.options.layout == Layout::kRankMajor;
    const int64_t cols = is_by_choice ? plan_.shape.topk : 1;
    std::fill(data_ + begin * cols, data_ + end * cols, 0.0F);
  }

 private:
  const PlanData& plan_;
  float* data_;
};

}  // namespace weft
