// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "mpi/rival.hpp"

namespace weft::bench {

void PerRankRival::plan(std::span<const int32_t> topk_idx) {
  num_tokens_ = static_cast<int64_t>(topk_idx.size()) / shape_.topk;
  choose_arrivals(topk_idx);
  MPI_Alltoall(
      exchange_.send_counts.data(),
      1,
      MPI_INT,
      exchange_.recv_counts.data(),
      1,
      MPI_INT,
      MPI_COMM_WORLD
  );
  exchange_.set_begins();
  reserve(exchange_.num_sent(), exchange_.num_received());
  experts_.resize(static_cast<size_t>(exchange_.num_received() * shape_.topk));
  MPI_Datatype choices;
  MPI_Type_contiguous(shape_.topk, MPI_INT32_T, &choices);
  MPI_Type_commit(&choices);
  MPI_Alltoallv(
      sent_experts_.data(),
      exchange_.send_counts.data(),
      exchange_.send_begin.data(),
      choices,
      experts_.data(),
      exchange_.recv_counts.data(),
      exchange_.recv_begin.data(),
      choices,
      MPI_COMM_WORLD
  );
  MPI_Type_free(&choices);
  place_received();
}

// Chooses which tokens go to which ranks, and where their sums come back.
void PerRankRival::choose_arrivals(std::span<const int32_t> topk_idx) {
  const auto topk = static_cast<size_t>(shape_.topk);
  const auto num_tokens = static_cast<size_t>(num_tokens_);
  std::vector<std::vector<int32_t>> tokens(static_cast<size_t>(num_ranks_));
  for (size_t token = 0; token < num_tokens; ++token) {
    for (const int32_t expert : topk_idx.subspan(token * topk, topk)) {
      if (expert >= 0) {
        auto& there = tokens[static_cast<size_t>(expert / num_local_experts_)];
        if (there.empty() || there.back() != static_cast<int32_t>(token)) {
          there.push_back(static_cast<int32_t>(token));
        }
      }
    }
  }
  token_of_.clear();
  sent_experts_.clear();
  std::vector<int32_t> num_places(num_tokens, 0);
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    exchange_.send_counts[rank] = static_cast<int>(tokens[rank].size());
    for (const int32_t token : tokens[rank]) {
      const auto choices = topk_idx.subspan(static_cast<size_t>(token) * topk, topk);
      token_of_.push_back(token);
      sent_experts_.insert(sent_experts_.end(), choices.begin(), choices.end());
      ++num_places[static_cast<size_t>(token)];
    }
  }
  sent_begin_.assign(num_tokens + 1, 0);
  std::inclusive_scan(num_places.begin(), num_places.end(), sent_begin_.begin() + 1);
  sent_places_.resize(token_of_.size());
  std::vector<int32_t> next(sent_begin_.begin(), sent_begin_.end() - 1);
  for (size_t place = 0; place < token_of_.size(); ++place) {
    auto& at = next[static_cast<size_t>(token_of_[place])];
    sent_places_[static_cast<size_t>(at++)] = static_cast<int32_t>(place);
  }
}

void PerRankRival::place_received() {
  const int32_t first_expert = rank_ * num_local_experts_;
  const auto is_mine = [&](int32_t expert) {
    return expert >= first_expert && expert < first_expert + num_local_experts_;
  };
  std::vector<int> counts(static_cast<size_t>(num_local_experts_), 0);
  for (const int32_t expert : experts_) {
    if (is_mine(expert)) {
      ++counts[static_cast<size_t>(expert - first_expert)];
    }
  }
  place_experts(counts);
  slot_begin_.assign(1, 0);
  slots_.clear();
  std::vector<int64_t> next(expert_begin_.begin(), expert_begin_.end() - 1);
  const auto topk = static_cast<size_t>(shape_.topk);
  for (size_t i = 0; i < experts_.size(); i += topk) {
    for (size_t k = 0; k < topk; ++k) {
      if (is_mine(experts_[i + k])) {
        const auto expert = static_cast<size_t>(experts_[i + k] - first_expert);
        slots_.push_back(static_cast<int32_t>(next[expert]++));
      }
    }
    std::sort(slots_.begin() + slot_begin_.back(), slots_.end());
    slot_begin_.push_back(static_cast<int32_t>(slots_.size()));
  }
}

void PerRankRival::dispatch(const std::byte* x, std::byte* rows) {
  parallel(exchange_.num_sent(), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      copy_rows(send_.data(), i, {x, token_of_[static_cast<size_t>(i)]}, 1);
    }
  });
  send_rows();
  parallel(exchange_.num_received(), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      for (const int32_t slot : slots_of(i)) {
        copy_rows(rows, slot, {received_.data(), i}, 1);
      }
    }
  });
  zero_padding(rows);
}

void PerRankRival::combine(const std::byte* rows, std::byte* x) {
  parallel(exchange_.num_received(), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      sum_at(received_.data(), i, rows, slots_of(i));
    }
  });
  return_rows();
  parallel(num_tokens_, [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      const auto begin = static_cast<size_t>(sent_begin_[static_cast<size_t>(token)]);
      const auto end = static_cast<size_t>(sent_begin_[static_cast<size_t>(token) + 1]);
      const std::span<const int32_t> places(sent_places_.data() + begin, end - begin);
      sum_at(x, token, send_.data(), places);
    }
  });
}

}  // namespace weft::bench
