// SPDX-License-Identifier: Apache-2.0
// What makes up each token in combine: rows that this rank reads where they are, partial sums that
// came, and sums of other domains.
#pragma once

#include <vector>

#include "cpu/call.hpp"
#include "cpu/combine/row_sum.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

class CombineRows {
 public:
  // Memory of one worker; `rows` point into the rest.
  struct Token {
    RowGroups rows;
    RowGroups near;                   // of this domain, where it is one of several
    std::vector<std::byte> near_sum;  // of those
  };

  CombineRows(const CpuRank& rank, const CpuCall& call, const CombineInput& in)
      : call_(call),
        plan_(call.plan),
        in_(in),
        row_bytes_(static_cast<size_t>(in.rows.row_bytes())) {
    for (size_t peer = 0; peer < plan_.sent.size(); ++peer) {
      const Target& at = call.words[peer].own_rows;
      const bool is_self = peer == static_cast<size_t>(plan_.shape.rank);
      const std::byte* rows = is_self ? in.rows.data : nullptr;
      const bool is_mapped = !is_self && at.region.generation != 0;
      if (is_mapped) {
        rows = rank.transport.mapped(static_cast<int>(peer), at.region.slot) + at.offset;
      }
      is_read_.push_back(is_self || is_mapped);
      rows_of_.push_back(rows);
    }
  }

  // This rank reads the rows of `peer` itself and gets no partial sums. Always true of itself.
  [[nodiscard]] bool reads(size_t peer) const { return is_read_[peer]; }
  // A group for each rank, or, of several domains, one for each of them; none for a token without
  // routes. All that the token waits for must be here.
  void list(int64_t token, Token& out) const {
    out.rows.clear();
    if (plan_.between) {
      list_across(token, out);
    } else {
      list_arrivals(token, out.rows, [](size_t /*peer*/) { return true; });
    }
  }

 private:
  // A group for each domain, this one's ranks added up before. A token that goes to no other domain
  // needs no more than their groups.
  void list_across(int64_t token, Token& out) const {
    const DomainTraffic& between = *plan_.between;
    const auto parts = between.parts_of(static_cast<size_t>(token));
    for (const TokenPart& part : parts) {
      if (part.index != TokenPart::kHere) {
        const int carrier = between.domains->carrier_into(part.domain, plan_.shape.rank);
        const uint64_t first = call_.staging.crossing_rows[static_cast<size_t>(carrier)];
        const size_t row = static_cast<size_t>(part.index) * row_bytes_;
        add_row(call_.staging_data + first + row, out.rows);
        continue;
      }
      const auto is_here = [this](size_t peer) { return is_near(plan_, peer); };
      if (parts.size() == 1) {
        return list_arrivals(token, out.rows, is_here);
      }
      out.near.clear();
      list_arrivals(token, out.near, is_here);
      out.near_sum.resize(row_bytes_);
      sum_groups(out.near_sum.data(), out.near, in_.rows.dtype, in_.rows.cols);
      add_row(out.near_sum.data(), out.rows);
    }
  }

  // Rows of the token's arrivals, a group for each.
  // Of each rank its rows where they can be read here, else the partial sum that came.
  template <class Filter>
  void list_arrivals(int64_t token, RowGroups& groups, const Filter& is_wanted) const {
    const auto t = static_cast<size_t>(token);
    const auto end = static_cast<size_t>(plan_.token_begin[t + 1]);
    for (auto a = static_cast<size_t>(plan_.token_begin[t]); a < end; ++a) {
      const auto peer = static_cast<size_t>(plan_.token_arrivals[a].rank);
      const auto index = static_cast<size_t>(plan_.token_arrivals[a].index);
      if (!is_wanted(peer)) {
        continue;
      }
      if (!is_read_[peer]) {
        const std::byte* staged = call_.staging_data + call_.staging.rows[peer];
        add_row(staged + index * row_bytes_, groups);
        continue;
      }
      const Arrivals& pair = plan_.sent[peer];
      const std::span<const int32_t> slots = pair.slots(static_cast<int64_t>(index));
      for (size_t s = 0; s < slots.size(); ++s) {
        groups.rows.push_back(rows_of_[peer] + static_cast<size_t>(slots[s]) * row_bytes_);
        if (in_.scale != CombineScale::kNone) {
          const size_t route = static_cast<size_t>(pair.route_begin[index]) + s;
          groups.weights.push_back(scale_of(pair, token, route));
        }
      }
      groups.group_ends.push_back(groups.rows.size());
    }
  }

  // A row that is a group of its own; its terms were multiplied before.
  void add_row(const std::byte* row, RowGroups& groups) const {
    groups.rows.push_back(row);
    if (in_.scale != CombineScale::kNone) {
      groups.weights.push_back(1.0F);
    }
    groups.group_ends.push_back(groups.rows.size());
  }

  // The factor of one route's row. Only layouts of one row per route are scaled.
  [[nodiscard]] float scale_of(const Arrivals& pair, int64_t token, size_t route) const {
    if (in_.scale == CombineScale::kPlanWeights) {
      return pair.weight[route];
    }
    const auto* weights = reinterpret_cast<const float*>(in_.source_weights.data);
    return weights[weight_index(plan_, token, pair.k[route])];
  }

  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  size_t row_bytes_;
  std::vector<bool> is_read_;              // by rank
  std::vector<const std::byte*> rows_of_;  // by rank, where its rows can be read here
};

}  // namespace weft
