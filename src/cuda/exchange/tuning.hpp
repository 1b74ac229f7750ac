// SPDX-License-Identifier: Apache-2.0
// How many multiprocessors a call occupies and how they share its two roles: the fastest of what
// was measured within the caller's bound. `weft tune` measures a machine; WEFT_TUNING names its
// file.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "weft/calls.hpp"

namespace weft {

struct RoleBlocks {
  int first = 1;   // push, or pre-reduce
  int second = 1;  // fan-out, or sum

  bool operator==(const RoleBlocks&) const = default;
};

// One measurement.
struct TunedSplit {
  Op op = Op::kDispatch;  // or kCombine, as everywhere below
  int num_ranks = 1;
  int64_t row_bytes = 0;
  RoleBlocks blocks = {};
  double us = 0;
  bool one_row = false;  // a combine of rank_major rows: none of them are added before they return

  bool operator==(const TunedSplit&) const = default;
};

// Returns tuning.json, measured on 2 and 4 x H200.
[[nodiscard]] const std::vector<TunedSplit>& built_in_tuning();
// Loads a file that `weft tune` wrote. Throws Error (kFile).
[[nodiscard]] std::vector<TunedSplit> load_tuning(const std::string& path);
// Returns the splits that some call would take.
[[nodiscard]] std::vector<TunedSplit> useful_splits(const std::vector<TunedSplit>& tuning);

struct CallSize {
  Op op = Op::kDispatch;
  int num_ranks = 1;
  int64_t row_bytes = 0;
  int num_sms = 2;           // most that the call may occupy, at least 2
  int num_senders = 0;       // as asked for; 0: by the table
  bool is_one_role = false;  // the other role has next to nothing to do
  bool one_row = false;      // as above

  friend bool operator==(const CallSize&, const CallSize&) = default;
};

// For a combine of few tokens, whose latency decides: returns as many summing blocks as all tokens
// need at the same time, at `at_once` each; none if that is more than half. Pure.
[[nodiscard]] std::optional<RoleBlocks> blocks_of_short_combine(
    int num_sms, int64_t num_tokens, int at_once
);

// Numbers of ranks from which a call's split comes. They are equal where the call's own number was
// measured or lies outside all that were, and 0 where nothing fits.
struct MeasuredRanks {
  int below = 0;
  int above = 0;

  bool operator==(const MeasuredRanks&) const = default;
};
[[nodiscard]] MeasuredRanks measured_ranks(
    const std::vector<TunedSplit>& tuning, const CallSize& size
);

// Takes, of the splits that fit, those of the nearest row size, then the fastest, then the one with
// most blocks. For a number of ranks between two that were measured, both roles get what lies
// between, on a logarithmic scale. Beyond them the nearest is taken as it is: from 4 ranks to 8 the
// links stay as fast while each rank fans out fewer rows, so the same senders are enough. A
// combine of rank_major rows takes the other splits where none of its own were measured.
[[nodiscard]] RoleBlocks choose_blocks(const std::vector<TunedSplit>& tuning, const CallSize& size);

// Chooses like choose_blocks(), but looks into the table only where a call differs from the last
// one of its kind.
class BlockChoice {
 public:
  BlockChoice() = default;
  explicit BlockChoice(std::vector<TunedSplit> tuning) : tuning_(std::move(tuning)) {}
  [[nodiscard]] RoleBlocks of(const CallSize& size);

 private:
  std::vector<TunedSplit> tuning_;
  std::array<CallSize, 2> last_;  // of dispatch and combine; at first of a size that none has
  std::array<RoleBlocks, 2> blocks_;
};

}  // namespace weft
