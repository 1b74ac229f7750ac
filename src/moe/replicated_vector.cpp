// SPDX-License-Identifier: Apache-2.0
#include "moe/replicated_vector.hpp"

#include <algorithm>

namespace weft::moe {
namespace {

constexpr int64_t kRowElements = 1024;  // 4 KiB; a guess between overhead per row and even slices

int64_t rows_for(size_t size) {
  return (static_cast<int64_t>(size) + kRowElements - 1) / kRowElements;
}

ExchangeConfig exchange_config(int num_ranks, size_t size, const TrainConfig& config) {
  return {
      .hidden = kRowElements,
      .max_tokens = (rows_for(size) + num_ranks - 1) / num_ranks,
      .num_experts = num_ranks,
      .max_topk = num_ranks,
      .transport = config.transport,
      .num_threads = config.num_threads,
      .timeout = config.timeout};
}

}  // namespace

ReplicatedVector::ReplicatedVector(const Group& group, size_t size, const TrainConfig& config)
    : size_(size), exchange_(group, exchange_config(group.num_ranks(), size, config)) {
  const int64_t num_ranks = group.num_ranks();
  const int64_t rows = rows_for(size);
  const int64_t first = rows * group.rank() / num_ranks;
  own_rows_ = rows * (group.rank() + 1) / num_ranks - first;
  const auto end = static_cast<size_t>((first + own_rows_) * kRowElements);
  own_begin_ = static_cast<size_t>(first * kRowElements);
  own_size_ = std::min(end, size) - std::min(own_begin_, size);

  // Each row to all ranks.
  std::vector<int32_t> topk_idx(static_cast<size_t>(own_rows_ * num_ranks));
  for (size_t i = 0; i < topk_idx.size(); ++i) {
    topk_idx[i] = static_cast<int32_t>(i % static_cast<size_t>(num_ranks));
  }
  plan_ = exchange_.plan(
      {.topk_idx = matrix(topk_idx.data(), own_rows_, num_ranks)}, {.layout = Layout::kRankMajor}
  );
  values_ = exchange_.allocate(rows, kRowElements, DType::kFloat32);
  std::ranges::fill_n(values_.tensor().data, values_.tensor().num_bytes(), std::byte{});
  grads_.resize(static_cast<size_t>(rows * kRowElements));
  own_values_.resize(own_rows_, kRowElements);
  own_grads_.resize(own_rows_, kRowElements);
}

Parameter ReplicatedVector::all() {
  auto* values = reinterpret_cast<float*>(values_.tensor().data);
  return {{values, size_}, {grads_.data(), size_}};
}

Parameter ReplicatedVector::own() {
  return {{own_values_.data(), own_size_}, {own_grads_.data(), own_size_}};
}

void ReplicatedVector::reduce() {
  exchange_.combine(
      *plan_,
      {.rows = matrix(grads_.data(), plan_->num_rows(), kRowElements)},
      {.x = matrix(own_grads_.data(), own_rows_, kRowElements)}
  );
  traffic_.count(*plan_, values_.tensor().row_bytes());
}

void ReplicatedVector::broadcast() {
  exchange_.dispatch(
      *plan_, {.x = matrix(own_values_.data(), own_rows_, kRowElements)}, {.rows = values_.tensor()}
  );
  traffic_.count(*plan_, values_.tensor().row_bytes());
}

}  // namespace weft::moe
