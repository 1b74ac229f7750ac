// SPDX-License-Identifier: Apache-2.0
#include <numeric>

#include "mpi/rival.hpp"

namespace weft::bench {

void PerRouteRival::plan(std::span<const int32_t> topk_idx) {
  const auto num_experts = static_cast<size_t>(shape_.num_experts);
  const auto num_local = static_cast<size_t>(num_local_experts_);
  num_tokens_ = static_cast<int64_t>(topk_idx.size()) / shape_.topk;
  std::vector<int> counts(num_experts, 0);
  for (const int32_t expert : topk_idx) {
    if (expert >= 0) {
      ++counts[static_cast<size_t>(expert)];
    }
  }
  std::vector<int> received_counts(num_experts);
  MPI_Alltoall(
      counts.data(),
      num_local_experts_,
      MPI_INT,
      received_counts.data(),
      num_local_experts_,
      MPI_INT,
      MPI_COMM_WORLD
  );
  for (size_t rank = 0; rank < static_cast<size_t>(num_ranks_); ++rank) {
    const auto sum = [&](const std::vector<int>& all) {
      const auto* first = all.data() + rank * num_local;
      return std::accumulate(first, first + num_local, 0);
    };
    exchange_.send_counts[rank] = sum(counts);
    exchange_.recv_counts[rank] = sum(received_counts);
  }
  exchange_.set_begins();
  place_experts(received_counts);
  reserve(exchange_.num_sent(), exchange_.num_received());

  std::vector<int> next(num_experts);
  std::exclusive_scan(counts.begin(), counts.end(), next.begin(), 0);
  sent_place_.assign(topk_idx.size(), -1);
  token_of_.resize(static_cast<size_t>(exchange_.num_sent()));
  for (size_t i = 0; i < topk_idx.size(); ++i) {
    if (topk_idx[i] >= 0) {
      sent_place_[i] = next[static_cast<size_t>(topk_idx[i])]++;
      token_of_[static_cast<size_t>(sent_place_[i])] =
          static_cast<int32_t>(i / static_cast<size_t>(shape_.topk));
    }
  }
  place_blocks(received_counts);
}

void PerRouteRival::place_blocks(std::span<const int> received_counts) {
  blocks_.clear();
  std::vector<int64_t> next_slot(expert_begin_.begin(), expert_begin_.end() - 1);
  int64_t received = 0;
  for (size_t i = 0; i < received_counts.size(); ++i) {
    int64_t& slot = next_slot[i % next_slot.size()];
    blocks_.push_back({received, slot, received_counts[i]});
    received += received_counts[i];
    slot += received_counts[i];
  }
}

void PerRouteRival::dispatch(const std::byte* x, std::byte* rows) {
  parallel(exchange_.num_sent(), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      copy_rows(send_.data(), i, {x, token_of_[static_cast<size_t>(i)]}, 1);
    }
  });
  send_rows();
  parallel(static_cast<int64_t>(blocks_.size()), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const Block& block = blocks_[static_cast<size_t>(i)];
      copy_rows(rows, block.slot, {received_.data(), block.received}, block.rows);
    }
  });
  zero_padding(rows);
}

void PerRouteRival::combine(const std::byte* rows, std::byte* x) {
  parallel(static_cast<int64_t>(blocks_.size()), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const Block& block = blocks_[static_cast<size_t>(i)];
      copy_rows(received_.data(), block.received, {rows, block.slot}, block.rows);
    }
  });
  return_rows();
  parallel(num_tokens_, [&](int64_t first, int64_t last) {
    std::vector<int32_t> places;
    for (int64_t token = first; token < last; ++token) {
      places.clear();
      for (int64_t i = token * shape_.topk; i < (token + 1) * shape_.topk; ++i) {
        if (sent_place_[static_cast<size_t>(i)] >= 0) {
          places.push_back(sent_place_[static_cast<size_t>(i)]);
        }
      }
      sum_at(x, token, send_.data(), places);
    }
  });
}

}  // namespace weft::bench
