// SPDX-License-Identifier: Apache-2.0
#include "train/layers/replicas.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace weft::moe {
namespace {

constexpr int64_t kRowElements = 1024;  // 4 KiB; a guess, as that of ReplicatedVector

// A place of an expert behind its own rank's.
struct Replica {
  int rank = 0;
  size_t slot = 0;
  int expert = 0;
};

// By rank and slot.
std::vector<Replica> replicas_of(const Plan& plan) {
  std::vector<Replica> replicas;
  const auto slots = static_cast<size_t>(plan.num_replicas());
  const std::span<const int32_t> placement = plan.placement();
  for (size_t at = 0; at < placement.size(); ++at) {
    if (placement[at] >= 0) {
      replicas.push_back({static_cast<int>(at / slots), at % slots, placement[at]});
    }
  }
  return replicas;
}

size_t num_own(const Plan& plan) {
  return static_cast<size_t>(plan.num_experts() / plan.num_ranks());
}

int owner_of(const Plan& plan, int expert) {
  return expert / static_cast<int>(num_own(plan));
}

void append(std::vector<float>& to, const float* from, size_t size) {
  to.insert(to.end(), from, from + size);
}

void add(std::span<const float> from, float* to) {
  std::ranges::transform(from, std::span(to, from.size()), to, std::plus<>());
}

}  // namespace

ReplicaCarrier::ReplicaCarrier(const Group& group, const TrainConfig& config)
    : rank_(group.rank()),
      num_ranks_(group.num_ranks()),
      size_in_(
          static_cast<size_t>(2 * config.model.expert_hidden) *
          static_cast<size_t>(config.model.hidden)
      ),
      size_out_(size_in_ / 2),
      rows_of_expert_((static_cast<int64_t>(size()) + kRowElements - 1) / kRowElements) {
  if (config.replicas == 0) {
    return;
  }
  exchange_.emplace(
      group,
      ExchangeConfig{
          .hidden = kRowElements,
          .max_tokens = rows_of_expert_ * config.replicas * num_ranks_,  // all from one rank
          .num_experts = num_ranks_,
          .max_topk = 1,
          .transport = config.transport,
          .num_threads = config.num_threads,
          .timeout = config.timeout}
  );
}

// Experts for other ranks -> those for this one, by the ranks that sent them, then their order.
std::vector<float> ReplicaCarrier::carry(
    std::span<const float> experts, std::span<const int32_t> to
) {
  const auto padded = static_cast<size_t>(rows_of_expert_ * kRowElements);
  std::vector<int32_t> ranks;  // of each row
  sent_.assign(to.size() * padded, 0.0F);
  for (size_t i = 0; i < to.size(); ++i) {
    ranks.insert(ranks.end(), static_cast<size_t>(rows_of_expert_), to[i]);
    const auto expert = experts.subspan(i * size(), size());
    std::ranges::copy(expert, sent_.begin() + static_cast<std::ptrdiff_t>(i * padded));
  }
  const auto num_rows = static_cast<int64_t>(ranks.size());
  const Plan plan = exchange_->plan({.topk_idx = matrix(ranks.data(), num_rows, 1)}, {});
  const Buffer rows = exchange_->allocate(plan.num_rows(), kRowElements, DType::kFloat32);
  exchange_->dispatch(
      plan, {.x = matrix(sent_.data(), num_rows, kRowElements)}, {.rows = rows.tensor()}
  );
  std::vector<float> arrived;
  const auto* first = reinterpret_cast<const float*>(rows.tensor().data);
  for (int64_t row = 0; row < plan.num_rows(); row += rows_of_expert_) {
    append(arrived, first + row * kRowElements, size());
  }
  return arrived;
}

void ReplicaCarrier::push(const Plan& plan, const Parts& own, std::vector<float>& replicas) {
  if (!exchange_) {
    return;
  }
  std::vector<float> sent;
  std::vector<int32_t> to;
  std::vector<std::pair<int, size_t>> awaited;  // owner and slot
  for (const Replica& replica : replicas_of(plan)) {
    const int owner = owner_of(plan, replica.expert);
    if (owner == rank_) {
      const auto at = static_cast<size_t>(replica.expert) % num_own(plan);
      append(sent, own.in + at * size_in_, size_in_);
      append(sent, own.out + at * size_out_, size_out_);
      to.push_back(replica.rank);
    }
    if (replica.rank == rank_) {
      awaited.emplace_back(owner, replica.slot);
    }
  }
  const std::vector<float> arrived = carry(sent, to);
  std::ranges::sort(awaited);
  replicas.resize(static_cast<size_t>(plan.num_replicas()) * size());
  for (size_t i = 0; i < awaited.size(); ++i) {
    const auto expert = std::span(arrived).subspan(i * size(), size());
    const size_t first = awaited[i].second * size();
    std::ranges::copy(expert, replicas.begin() + static_cast<std::ptrdiff_t>(first));
  }
}

void ReplicaCarrier::reduce(const Plan& plan, const Add& add, float* grad_in, float* grad_out) {
  std::map<int, std::vector<float>> sums = sums_of_replicas(plan, add);
  for (size_t e = 0; e < num_own(plan); ++e) {
    std::vector<float>& sum = sums[rank_ * static_cast<int>(num_own(plan)) + static_cast<int>(e)];
    sum.resize(size());
    add(e, sum.data(), sum.data() + size_in_);
    moe::add(std::span(sum).first(size_in_), grad_in + e * size_in_);
    moe::add(std::span(sum).subspan(size_in_), grad_out + e * size_out_);
  }
}

// In the n-th turn the n-th replica of every expert adds, and hands the sum on.
std::map<int, std::vector<float>> ReplicaCarrier::sums_of_replicas(
    const Plan& plan, const Add& add
) {
  std::map<int, std::vector<Replica>> by_expert;
  size_t num_turns = 0;
  for (const Replica& replica : replicas_of(plan)) {
    auto& places = by_expert[replica.expert];
    places.push_back(replica);
    num_turns = std::max(num_turns, places.size());
  }
  std::map<int, std::vector<float>> sums;
  for (size_t turn = 0; turn < num_turns; ++turn) {
    std::vector<float> sent;
    std::vector<int32_t> to;
    std::vector<std::pair<int, int>> awaited;  // the rank that sends, and the expert
    for (const auto& [expert, places] : by_expert) {
      if (turn >= places.size()) {
        continue;
      }
      const bool is_last = turn + 1 == places.size();
      const int next = is_last ? owner_of(plan, expert) : places[turn + 1].rank;
      if (places[turn].rank == rank_) {
        std::vector<float> sum = std::exchange(sums[expert], {});
        sum.resize(size());
        add(num_own(plan) + places[turn].slot, sum.data(), sum.data() + size_in_);
        append(sent, sum.data(), size());
        to.push_back(next);
      }
      if (next == rank_) {
        awaited.emplace_back(places[turn].rank, expert);
      }
    }
    const std::vector<float> arrived = carry(sent, to);
    std::ranges::sort(awaited);
    for (size_t i = 0; i < awaited.size(); ++i) {
      sums[awaited[i].second].clear();
      append(sums[awaited[i].second], arrived.data() + i * size(), size());
    }
  }
  return sums;
}

}  // namespace weft::moe
