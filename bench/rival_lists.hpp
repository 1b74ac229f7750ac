// SPDX-License-Identifier: Apache-2.0
// Lists of the rows that the NCCL rivals move, worked out on the host before anything is timed: a
// rival is not charged for planning.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/build.hpp"

namespace weft::bench {

enum class RivalWay : uint8_t {
  kPerRoute,   // one row per route, sorted by expert; the receiver sorts again and pads
  kPerExpert,  // the same, but a message per expert, received in its final place
  kPerRank,    // one row per (token, rank); the receiver copies it to all its slots
};

struct RivalCase {
  int num_ranks = 1;
  int64_t num_tokens = 0;  // per rank
  int64_t hidden = 0;      // bf16 elements
  int num_experts = 0;
  int topk = 0;
  int64_t pad_multiple = 128;

  [[nodiscard]] int64_t row_bytes() const { return 2 * hidden; }
};

// For each row of one matrix its rows in another, -1 = none.
struct RowLists {
  int width = 1;
  std::vector<int32_t> rows;  // [num_lists, width]

  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(rows.size()) / width; }
  [[nodiscard]] int64_t num_entries() const;  // that are not -1
};

struct Message {
  int peer = 0;
  int64_t row = 0;  // first, here
  int64_t num_rows = 0;
};

// One rank's part. Matrices of rows: tokens, sent [num_sent], received [num_received] and experts
// [num_rows], which is expert-major and padded.
struct RivalLists {
  int64_t num_sent = 0;
  int64_t num_received = 0;
  int64_t num_rows = 0;
  RowLists permute;               // token -> sent
  std::vector<Message> outgoing;  // of sent
  std::vector<Message> incoming;  // of received; of experts with kPerExpert
  RowLists place;                 // received -> experts; none with kPerExpert
  RowLists padding;               // rows of experts to fill with zeros
};

// Slots as Layout::kExpertMajor has them, of all ranks.
struct SlotTable {
  std::vector<std::vector<int32_t>> slot;  // [num_ranks][num_tokens * topk], -1 = no route
  std::vector<int64_t> num_rows;           // [num_ranks]
};

[[nodiscard]] SlotTable make_slots(const RivalCase& shape, std::span<const RouteTable> routes);

// Returns the lists of all ranks, by rank.
[[nodiscard]] std::vector<RivalLists> make_lists(
    const RivalCase& shape, std::span<const RouteTable> routes, RivalWay way
);

}  // namespace weft::bench
