// SPDX-License-Identifier: Apache-2.0
// What makes up each token in combine: rows that this rank reads where they are, partial sums that
// came, and sums of other domains.
#pragma once

#include <vector>

#include "exchange/cpu_call.hpp"
#include "exchange/row_sum.hpp"

namespace weft {

class CombineRows {
 public:
  // Memory of one worker; `rows` point into the rest.
  struct Token {
    RowGroups rows;
    RowGroups near;                   // of this domain, where it is one of several
    std::vector<std::byte> near_sum;  // of those
  };

  CombineRows(const CpuRank& rank, const CpuCall& call, const CombineInput& in);

  // This rank reads the rows of `peer` itself and gets no partial sums. Always true of itself.
  [[nodiscard]] bool reads(size_t peer) const { return is_read_[peer]; }
  // A group for each rank, or, of several domains, one for each of them; none for a token without
  // routes. All that the token waits for must be here.
  void list(int64_t token, Token& out) const;

 private:
  void list_across(int64_t token, Token& out) const;
  // Rows of the token's arrivals, a group for each.
  template <class Filter>
  void list_arrivals(int64_t token, RowGroups& groups, const Filter& is_wanted) const;
  void add_row(const std::byte* row, RowGroups& groups) const;
  [[nodiscard]] float scale_of(const Arrivals& pair, int64_t token, size_t route) const;

  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  size_t row_bytes_;
  std::vector<bool> is_read_;              // by rank
  std::vector<const std::byte*> rows_of_;  // by rank, where its rows can be read here
};

}  // namespace weft
