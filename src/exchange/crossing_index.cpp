// SPDX-License-Identifier: Apache-2.0
#include "exchange/crossing_index.hpp"

#include <cstring>

#include "exchange/region_map.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {
namespace {

constexpr uint64_t kAlignment = 256;

// Which part of combine holds what a token gets from a domain.
class Parts {
 public:
  explicit Parts(const PlanData& plan) : traffic_(*plan.between) {
    int64_t next = plan.shape.num_tokens;
    for (const auto& tokens : traffic_.sent) {
      first_.push_back(next);
      next += static_cast<int64_t>(tokens.size());
    }
  }
  [[nodiscard]] int32_t row(int32_t token, const TokenPart& part) const {
    const bool is_here = part.index == TokenPart::kHere;
    return is_here ? token
                   : static_cast<int32_t>(first_[static_cast<size_t>(part.domain)]) + part.index;
  }
  // -1: nothing comes from there.
  [[nodiscard]] int32_t row_from(int32_t token, int domain) const {
    const auto begin = static_cast<size_t>(traffic_.token_begin[static_cast<size_t>(token)]);
    const auto end = static_cast<size_t>(traffic_.token_begin[static_cast<size_t>(token) + 1]);
    for (size_t i = begin; i < end; ++i) {
      if (traffic_.token_parts[i].domain == domain) {
        return row(token, traffic_.token_parts[i]);
      }
    }
    return -1;
  }

 private:
  const DomainTraffic& traffic_;
  std::vector<int64_t> first_;  // [num_domains]
};

std::vector<int32_t> part_rows(const PlanData& plan, const Parts& parts) {
  const DomainTraffic& traffic = *plan.between;
  std::vector<int32_t> rows;
  rows.reserve(traffic.token_parts.size());
  for (int32_t token = 0; token < plan.shape.num_tokens; ++token) {
    const auto begin = static_cast<size_t>(traffic.token_begin[static_cast<size_t>(token)]);
    const auto end = static_cast<size_t>(traffic.token_begin[static_cast<size_t>(token) + 1]);
    for (size_t i = begin; i < end; ++i) {
      rows.push_back(parts.row(token, traffic.token_parts[i]));
    }
  }
  return rows;
}

std::vector<int32_t> weight_rows(const PlanData& plan, const Parts& parts) {
  std::vector<int32_t> rows(plan.route_expert.size(), -1);
  const int per_rank = plan.shape.num_local_experts();
  for (size_t route = 0; route < rows.size(); ++route) {
    if (plan.route_slot[route] >= 0) {
      const int owner = plan.route_expert[route] / per_rank;
      const auto token = static_cast<int32_t>(route / static_cast<size_t>(plan.shape.topk));
      rows[route] = parts.row_from(token, plan.between->domains->domain_of(owner));
    }
  }
  return rows;
}

}  // namespace

CrossingIndex::CrossingIndex(const PlanData& plan) : from_map_(plan.shape.from_map) {
  const Parts parts(plan);
  part_row_ = part_rows(plan, parts);
  weight_row_ = weight_rows(plan, parts);
  for (const auto& tokens : plan.between->sent) {
    offsets_.sent.push_back(add(tokens));
  }
  offsets_.part_begin = add(plan.between->token_begin);
  offsets_.part_row = add(part_row_);
  offsets_.weight_row = add(weight_row_);
  if (from_map_) {
    offsets_.weight_column = add(plan.route_expert);
  }
}

uint64_t CrossingIndex::add(std::span<const int32_t> values) {
  const uint64_t offset = num_bytes_;
  arrays_.emplace_back(offset, values);
  num_bytes_ = align_up(offset + values.size_bytes(), kAlignment);
  return offset;
}

void CrossingIndex::write(std::byte* to) const {
  for (const auto& [offset, values] : arrays_) {
    if (!values.empty()) {
      std::memcpy(to + offset, values.data(), values.size_bytes());
    }
  }
}

CrossingArrays<const int32_t*> CrossingIndex::at(const std::byte* address) const {
  const auto array = [&](uint64_t offset) {
    return reinterpret_cast<const int32_t*>(address + offset);
  };
  CrossingArrays<const int32_t*> arrays;
  for (const uint64_t offset : offsets_.sent) {
    arrays.sent.push_back(array(offset));
  }
  arrays.part_begin = array(offsets_.part_begin);
  arrays.part_row = array(offsets_.part_row);
  arrays.weight_row = array(offsets_.weight_row);
  arrays.weight_column = from_map_ ? array(offsets_.weight_column) : nullptr;
  return arrays;
}

}  // namespace weft
