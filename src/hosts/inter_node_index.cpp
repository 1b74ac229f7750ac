// SPDX-License-Identifier: Apache-2.0
#include "hosts/inter_node_index.hpp"

#include <cstring>

#include "cpu/protocol/region_map.hpp"
#include "plan/domain_traffic.hpp"
#include "plan/slots.hpp"

namespace weft {
namespace {

constexpr uint64_t kAlignment = 256;

// Which row of combine's parts holds what each token gets from a domain.
std::vector<int32_t> part_rows(const PlanData& plan) {
  const DomainTraffic& traffic = *plan.between;
  std::vector<int32_t> first;  // [num_domains]
  auto next = static_cast<int32_t>(plan.shape.num_tokens);
  for (const auto& tokens : traffic.sent) {
    first.push_back(next);
    next += static_cast<int32_t>(tokens.size());
  }
  std::vector<int32_t> rows;
  rows.reserve(traffic.token_parts.size());
  for (size_t token = 0; token + 1 < traffic.token_begin.size(); ++token) {
    for (const TokenPart& part : traffic.parts_of(token)) {
      const bool is_here = part.index == TokenPart::kHere;
      rows.push_back(
          is_here ? static_cast<int32_t>(token)
                  : first[static_cast<size_t>(part.domain)] + part.index
      );
    }
  }
  return rows;
}

// A route that was kept goes to a domain from which its token has a part.
std::vector<int32_t> weight_rows(const PlanData& plan, std::span<const int32_t> part_row) {
  const DomainTraffic& traffic = *plan.between;
  std::vector<size_t> domain_of;  // by expert
  for (int expert = 0; expert < plan.shape.num_experts; ++expert) {
    const int owner = owner_rank(expert, plan.shape.num_local_experts());
    domain_of.push_back(static_cast<size_t>(traffic.domains->domain_of(owner)));
  }
  std::vector<int32_t> rows(plan.route_expert.size(), -1);
  std::vector<int32_t> row_from(traffic.sent.size(), -1);  // of one token, by domain
  const auto topk = static_cast<size_t>(plan.shape.topk);
  const auto tokens = static_cast<size_t>(plan.shape.num_tokens);
  for (size_t token = 0, next = 0; token < tokens; ++token) {
    for (const TokenPart& part : traffic.parts_of(token)) {
      row_from[static_cast<size_t>(part.domain)] = part_row[next++];
    }
    for (size_t route = token * topk; route < (token + 1) * topk; ++route) {
      if (plan.route_slot[route] >= 0) {
        rows[route] = row_from[domain_of[static_cast<size_t>(plan.route_expert[route])]];
      }
    }
  }
  return rows;
}

}  // namespace

InterNodeIndex::InterNodeIndex(const PlanData& plan) : from_map_(plan.shape.from_map) {
  part_row_ = part_rows(plan);
  weight_row_ = weight_rows(plan, part_row_);
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

uint64_t InterNodeIndex::add(std::span<const int32_t> values) {
  const uint64_t offset = num_bytes_;
  arrays_.emplace_back(offset, values);
  num_bytes_ = align_up(offset + values.size_bytes(), kAlignment);
  return offset;
}

void InterNodeIndex::write(std::byte* to) const {
  for (const auto& [offset, values] : arrays_) {
    if (!values.empty()) {
      std::memcpy(to + offset, values.data(), values.size_bytes());
    }
  }
}

InterNodeArrays<const int32_t*> InterNodeIndex::at(const std::byte* address) const {
  const auto array = [&](uint64_t offset) {
    return reinterpret_cast<const int32_t*>(address + offset);
  };
  InterNodeArrays<const int32_t*> arrays;
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
