// SPDX-License-Identifier: Apache-2.0
#include "hosts/plan_image.hpp"

#include <algorithm>
#include <cstring>

#include "plan/domain_traffic.hpp"
#include "plan/slots.hpp"

namespace weft {
namespace {

constexpr uint64_t kAlignment = 16;  // of what the kernel copies

template <class T>
T* at(std::span<std::byte> image, uint64_t offset) {
  return reinterpret_cast<T*>(image.data() + offset);
}

// Holds a pair's arrays, as a compiler cannot see that they stay while others are written.
struct RoutesView {
  explicit RoutesView(const Arrivals& pair)
      : num_arrivals(pair.token.size()),
        begin(pair.route_begin.data()),
        slot(pair.slot.data()),
        k(pair.k.data()),
        expert(pair.expert.data()),
        weight(pair.weight.empty() ? nullptr : pair.weight.data()) {}
  [[nodiscard]] float weight_at(size_t route) const {
    return weight == nullptr ? 0.0F : weight[route];
  }

  size_t num_arrivals;
  const int32_t* begin;
  const int32_t* slot;
  const int32_t* k;
  const int32_t* expert;
  const float* weight;
};

// Returns the rows of combine's parts, by token, that hold what the token gets from each domain.
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

// Returns each route's part, -1: none. A kept route goes to a domain that its token has a part of.
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

Round find_round(const PlanData& plan, size_t index) {
  const DomainTraffic& traffic = *plan.between;
  const auto near = traffic.domains->near();
  Round round;
  if (index == 0) {
    round.num_tokens = static_cast<int32_t>(plan.shape.num_tokens);
    for (const int member : near) {
      const Arrivals& pair = plan.sent[static_cast<size_t>(member)];
      round.pairs.push_back({&pair, pair.token});
    }
  } else if (index <= traffic.forwarded.size()) {
    const ForwardedSource& forwarded = traffic.forwarded[index - 1];
    round.num_tokens = static_cast<int32_t>(forwarded.crossings.size());
    for (size_t member = 0; member < near.size(); ++member) {
      round.pairs.push_back(
          {&forwarded_pair(plan, forwarded, member), forwarded.crossings.crossing[member]}
      );
    }
  } else {
    static const Arrivals none;
    round.pairs.resize(near.size(), {&none, {}});
  }
  return round;
}

size_t num_rounds(const PlanData& plan) {
  const Domains& domains = *plan.between->domains;
  size_t most = 0;
  for (const int member : domains.near()) {
    most = std::max(most, domains.forwarded_by(member).size());
  }
  return 1 + most;
}

PlanImage::PlanImage(const PlanMap& map, const Round& round, int topk)
    : map_(map), round_(round), topk_(topk) {
  AreaMap areas(map.chunk_begin(0), kAlignment);
  const auto chunks = static_cast<uint64_t>(num_device_chunks(round.num_tokens));
  for (const Round::Pair& pair : round.pairs) {
    const auto arrivals = static_cast<uint64_t>(pair.arrivals->size());
    const uint64_t routes = arrivals * map.max_topk;
    ImportedRecords records;
    records.num_arrivals = static_cast<int32_t>(arrivals);
    records.chunk_begin = areas.add((chunks + 1) * sizeof(int32_t));
    records.heads = areas.add(arrivals * sizeof(ArrivalHead));
    records.slots = areas.add(routes * sizeof(int32_t));
    records.weights = areas.add(routes * sizeof(float));
    records.origins = areas.add(routes * sizeof(int32_t));
    records_.push_back(records);
  }
  num_bytes_ = areas.num_bytes();
}

void PlanImage::write_block(std::span<std::byte> image, const PlanData& plan, bool is_first) const {
  const PlanView block = {image.data(), map_};
  write_shape(block, plan, is_first);
  write_routes(block, plan);
}

void PlanImage::write_records(std::span<std::byte> image) const {
  // Number of members before the current one that a token goes to, by token.
  std::vector<int32_t> num_arrivals(static_cast<size_t>(round_.num_tokens));
  for (size_t member = 0; member < round_.pairs.size(); ++member) {
    write_records(image, member, num_arrivals);
  }
}

// Writes the shape; the kernel fills in what it learns from the other ranks.
void PlanImage::write_shape(const PlanView& block, const PlanData& plan, bool is_first) const {
  PlanHeader header;
  header.num_tokens = round_.num_tokens;
  header.overflow = plan.overflow ? 1 : 0;
  header.num_rows = plan.num_rows;
  header.required_rows = plan.required_rows;
  header.expert_stride = plan.shape.options.expert_stride;
  *block.header() = header;
  const auto& padded = is_first ? plan.padded_rows_per_expert : plan.rows_per_expert;
  std::ranges::copy(plan.rows_per_expert, block.rows_per_expert());
  std::ranges::copy(padded, block.padded_rows_per_expert());
  std::ranges::copy(plan.expert_begin, block.expert_begin());
}

void PlanImage::write_routes(const PlanView& block, const PlanData& plan) const {
  const auto tokens = static_cast<size_t>(round_.num_tokens);
  const size_t topk = map_.max_topk;
  const size_t members = round_.pairs.size();
  int32_t* const experts = block.route_expert();
  int32_t* const slots = block.route_slot();
  float* const weights = block.route_weight();
  int32_t* const primary = block.primary();
  int32_t* const arrivals = block.arrival();
  std::fill_n(experts, tokens * topk, -1);
  std::fill_n(slots, tokens * topk, -1);
  std::fill_n(weights, tokens * topk, 0.0F);
  std::fill_n(primary, tokens * members, -1);
  std::fill_n(arrivals, tokens * members, -1);
  const int per_rank = plan.shape.num_local_experts();
  for (size_t member = 0; member < members; ++member) {
    const RoutesView pair(*round_.pairs[member].arrivals);
    const int32_t* const token_of = round_.pairs[member].token.data();
    const int32_t first_expert = static_cast<int32_t>(member) * per_rank;
    for (size_t i = 0; i < pair.num_arrivals; ++i) {
      const auto token = static_cast<size_t>(token_of[i]);
      const auto first = static_cast<size_t>(pair.begin[i]);
      const auto last = static_cast<size_t>(pair.begin[i + 1]);
      primary[token * members + member] = pair.slot[first];
      arrivals[token * members + member] = static_cast<int32_t>(i);
      for (size_t route = first; route < last; ++route) {
        const size_t place = token * topk + static_cast<size_t>(pair.k[route]);
        experts[place] = first_expert + pair.expert[route];
        slots[place] = pair.slot[route];
        weights[place] = pair.weight_at(route);
      }
    }
  }
}

// Writes what the plan kernel would write at the receiver (src/cuda/plan/place_routes.cuh).
void PlanImage::write_records(
    std::span<std::byte> image, size_t member, std::span<int32_t> num_arrivals
) const {
  const ImportedRecords& to = records_[member];
  const Round::Pair& from = round_.pairs[member];
  const RoutesView pair(*from.arrivals);
  const auto topk = static_cast<size_t>(map_.max_topk);
  const int32_t per_token = std::min(static_cast<int32_t>(map_.num_ranks), topk_);
  auto* const heads = at<ArrivalHead>(image, to.heads);
  auto* const slots = at<int32_t>(image, to.slots);
  auto* const weights = at<float>(image, to.weights);
  auto* const origins = at<int32_t>(image, to.origins);
  for (size_t i = 0; i < pair.num_arrivals; ++i) {
    const int32_t token = from.token[i];
    const auto first = static_cast<size_t>(pair.begin[i]);
    const auto count = static_cast<size_t>(pair.begin[i + 1]) - first;
    const int32_t place = num_arrivals[static_cast<size_t>(token)]++;
    heads[i] = {token, static_cast<int32_t>(count), token * per_token + place, 0};
    for (size_t j = 0; j < count; ++j) {
      const size_t route = first + j;
      slots[i * topk + j] = pair.slot[route];
      weights[i * topk + j] = pair.weight_at(route);
      origins[i * topk + j] = pair.expert[route] << 8 | pair.k[route];
    }
  }
  // The number of the first arrival of each chunk; the last entry closes the last chunk.
  auto* const begin = at<int32_t>(image, to.chunk_begin);
  const int num_chunks = num_device_chunks(round_.num_tokens);
  const int32_t tokens = chunk_tokens(round_.num_tokens);
  int32_t next = 0;
  for (int chunk = 0; chunk <= num_chunks; ++chunk) {
    while (next < records_[member].num_arrivals &&
           from.token[static_cast<size_t>(next)] < chunk * tokens) {
      ++next;
    }
    begin[chunk] = next;
  }
}

InterNodeIndex::InterNodeIndex(const PlanData& plan) : from_map_(plan.shape.from_map) {
  for_each_row(plan, [&](int32_t row, int32_t source, int32_t token) {
    row_sources_.insert(row_sources_.end(), {row, source, token});
  });
  if (plan.shape.options.layout == Layout::kRankMajor) {
    const auto topk = static_cast<size_t>(plan.shape.topk);
    row_experts_.assign(static_cast<size_t>(num_used_rows(plan)) * topk, -1);
    for_each_route(plan, [&](int32_t row, int32_t k, int32_t expert) {
      row_experts_[static_cast<size_t>(row) * topk + static_cast<size_t>(k)] = expert;
    });
  }
  part_row_ = part_rows(plan);
  weight_row_ = weight_rows(plan, part_row_);
  for (const auto& tokens : plan.between->sent) {
    offsets_.sent.push_back(add(tokens));
  }
  offsets_.row_sources = add(row_sources_);
  offsets_.row_experts = add(row_experts_);
  offsets_.part_begin = add(plan.between->token_begin);
  offsets_.part_row = add(part_row_);
  offsets_.weight_row = add(weight_row_);
  if (from_map_) {
    offsets_.weight_column = add(plan.route_expert);
  }
}

uint64_t InterNodeIndex::add(std::span<const int32_t> values) {
  return arrays_.emplace_back(map_.add(values.size_bytes()), values).first;
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
  arrays.row_sources = array(offsets_.row_sources);
  arrays.row_experts = array(offsets_.row_experts);
  arrays.part_begin = array(offsets_.part_begin);
  arrays.part_row = array(offsets_.part_row);
  arrays.weight_row = array(offsets_.weight_row);
  arrays.weight_column = from_map_ ? array(offsets_.weight_column) : nullptr;
  return arrays;
}

}  // namespace weft
