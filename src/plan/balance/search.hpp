// SPDX-License-Identifier: Apache-2.0
// The search for the least limit on a rank's rows that can be kept, for host loops and kernels.
//
// It goes in rounds of kProbes limits, of which the lowest that is kept counts; higher ones need
// not be tried then. Mostly the ranks can be made even, so the first round begins just above the
// mean (at the mean it would take more replicas) and goes up in steps that double. Each further
// round evenly divides the gap from the last limit that failed to the one kept.
#pragma once

#include <cstdint>

#include "core/hd.hpp"

namespace weft {

class LimitSearch {
 public:
  static constexpr int kProbes = 16;
  // The search ends when less than this part of a mean rank's rows could still be gained.
  static constexpr int64_t kFineness = 1024;

  // Ranks count as even up to this part of a mean rank's rows above it.
  static constexpr int64_t kEvenness = 128;

  // `total`: rows of all ranks; `busiest`: of the rank that has most without replicas.
  WEFT_HD LimitSearch(int64_t total, int num_ranks, int64_t busiest)
      : mean_((total + num_ranks - 1) / num_ranks),
        failed_(mean_ - 1),
        kept_(busiest),
        fineness_(mean_ / kFineness > 1 ? mean_ / kFineness : 1) {}

  [[nodiscard]] WEFT_HD bool is_over() const { return kept_ - failed_ <= fineness_; }

  [[nodiscard]] WEFT_HD bool is_even(int64_t busiest) const {
    return busiest <= mean_ + mean_ / kEvenness;
  }

  // Returns the limit of this round's `probe`-th try, ascending; tries() says if it is worth it.
  [[nodiscard]] WEFT_HD int64_t limit(int probe) const {
    if (is_first_) {
      return failed_ + (fineness_ << probe);
    }
    return failed_ + (kept_ - failed_ + kProbes - 1) / kProbes * (probe + 1);
  }
  [[nodiscard]] WEFT_HD bool tries(int probe) const {
    return probe < kProbes && limit(probe) < kept_;
  }

  // Ends a round: the `probe`-th is the lowest that was kept, and its busiest rank has so many
  // rows.
  WEFT_HD void keep(int probe, int64_t busiest) {
    failed_ = probe == 0 ? failed_ : limit(probe - 1);
    kept_ = busiest;
    is_first_ = false;
  }
  // Ends a round whose limits all failed.
  WEFT_HD void fail() {
    int probe = kProbes - 1;
    while (probe >= 0 && !tries(probe)) {
      --probe;
    }
    failed_ = probe < 0 ? failed_ : limit(probe);
    is_first_ = false;
  }

 private:
  int64_t mean_;
  int64_t failed_;  // the highest limit that is known to fail
  int64_t kept_;    // rows of the busiest rank in the best placement
  int64_t fineness_;
  bool is_first_ = true;
};

}  // namespace weft
