// SPDX-License-Identifier: Apache-2.0
#include "train/replicated_vector.hpp"

#include <algorithm>
#include <functional>

namespace weft::moe {
namespace {

constexpr int64_t kRowElements = 1024;  // 4 KiB; a guess between overhead per row and even slices

int64_t rows_for(size_t size) {
  return (static_cast<int64_t>(size) + kRowElements - 1) / kRowElements;
}

ExchangeConfig exchange_config(int num_ranks, size_t size, const TrainConfig& config) {
  const int64_t most_own_rows = (rows_for(size) + num_ranks - 1) / num_ranks;
  return {
      .hidden = kRowElements,
      .max_tokens = num_ranks * most_own_rows,
      .num_experts = num_ranks,
      .max_topk = num_ranks,
      .transport = config.transport,
      .num_threads = config.num_threads,
      .timeout = config.timeout};
}

}  // namespace

ReplicatedVector::ReplicatedVector(const Group& group, size_t size, const TrainConfig& config)
    : num_ranks_(group.num_ranks()),
      size_(size),
      exchange_(group, exchange_config(group.num_ranks(), size, config)) {
  const int64_t rows = rows_for(size);
  const int64_t first = rows * group.rank() / num_ranks_;
  own_rows_ = rows * (group.rank() + 1) / num_ranks_ - first;
  const auto end = static_cast<size_t>((first + own_rows_) * kRowElements);
  own_begin_ = static_cast<size_t>(first * kRowElements);
  own_size_ = std::min(end, size) - std::min(own_begin_, size);

  std::vector<int32_t> all_ranks;  // of every row
  for (int64_t row = 0; row < own_rows_; ++row) {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      all_ranks.push_back(rank);
    }
  }
  to_all_ = plan_of(all_ranks, num_ranks_);
  for (int64_t nth = 0;; ++nth) {
    std::vector<int> ranks;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (nth < shards_of_rank(rank, num_ranks_).size()) {
        ranks.push_back(rank);
      }
    }
    if (ranks.empty()) {
      break;
    }
    // Each of the ranks gets one copy of every row, so that its rows are the whole vector.
    std::vector<int32_t> copies;
    for (const int rank : ranks) {
      copies.insert(copies.end(), static_cast<size_t>(own_rows_), rank);
    }
    rounds_.push_back({plan_of(copies, 1), ranks, std::vector<float>(copies.size() * kRowElements)}
    );
  }
  values_ = exchange_.allocate(rows, kRowElements, DType::kFloat32);
  std::ranges::fill_n(values_.tensor().data, values_.tensor().num_bytes(), std::byte{});
  grad_stride_ = static_cast<size_t>(rows * kRowElements);
  const auto shards = static_cast<size_t>(shards_of_rank(group.rank(), num_ranks_).size());
  grads_.resize(shards * grad_stride_);
  own_values_.resize(static_cast<size_t>(own_rows_ * kRowElements));
  own_grads_.resize(own_values_.size());
}

Plan ReplicatedVector::plan_of(const std::vector<int32_t>& topk_idx, int64_t topk) {
  const auto num_rows = static_cast<int64_t>(topk_idx.size()) / topk;
  return exchange_.plan(
      {.topk_idx = matrix(topk_idx.data(), num_rows, topk)}, {.layout = Layout::kRankMajor}
  );
}

Parameter ReplicatedVector::all() {
  auto* values = reinterpret_cast<float*>(values_.tensor().data);
  return {{values, size_}, {grads_.data(), size_}, grad_stride_};
}

Parameter ReplicatedVector::own() {
  return {{own_values_.data(), own_size_}, {own_grads_.data(), own_size_}};
}

void ReplicatedVector::clear_grads() {
  std::ranges::fill(grads_, 0.0F);
}

void ReplicatedVector::reduce() {
  for (size_t nth = 0; nth < rounds_.size(); ++nth) {
    Round& round = rounds_[nth];
    const int64_t num_rows = round.plan.num_rows();  // none if this rank has no such shard
    const float* grads = num_rows > 0 ? grads_.data() + nth * grad_stride_ : nullptr;
    exchange_.combine(
        round.plan,
        {.rows = matrix(grads, num_rows, kRowElements)},
        {.x = matrix(round.arrived.data(), round.plan.num_tokens(), kRowElements)}
    );
  }
  std::ranges::fill(own_grads_, 0.0F);
  // A rank's shards follow each other, so by rank and then by round is the order of the shards.
  for (int rank = 0; rank < num_ranks_; ++rank) {
    for (const Round& round : rounds_) {
      const auto found = std::ranges::find(round.ranks, rank);
      if (found != round.ranks.end()) {
        add_round(round, static_cast<size_t>(found - round.ranks.begin()));
      }
    }
  }
}

void ReplicatedVector::add_round(const Round& round, size_t place) {
  const auto part = std::span(round.arrived).subspan(place * own_grads_.size(), own_grads_.size());
  std::ranges::transform(own_grads_, part, own_grads_.begin(), std::plus<>());
}

void ReplicatedVector::broadcast() {
  const float* own = own_values_.data();
  exchange_.dispatch(
      *to_all_, {.x = matrix(own, own_rows_, kRowElements)}, {.rows = values_.tensor()}
  );
}

}  // namespace weft::moe
