// SPDX-License-Identifier: Apache-2.0
// Checks of what replicas must do with weights and gradients.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "train/replicas.hpp"
#include "training_runs.hpp"

namespace weft::moe {

// One rank, whose popular experts get replicas on others.
class ReplicasCase {
 public:
  ReplicasCase(const Group& group, const TrainConfig& config)
      : config_(config),
        num_own_(config.model.num_experts / group.num_ranks()),
        exchange_(
            group,
            {.hidden = config.model.hidden,
             .max_tokens = kTokens,
             .num_experts = config.model.num_experts,
             .max_topk = config.model.topk,
             .timeout = config.timeout}
        ),
        replica_exchange_(make_replica_exchange(group, config)),
        context_{
            exchange_,
            config_.model,
            config.dtype,
            kTokens * group.num_ranks(),
            false,
            config.replicas,
            replica_exchange_ ? &*replica_exchange_ : nullptr},
        rank_(context_, kTokens),
        size_out_(static_cast<size_t>(config.model.hidden * config.model.expert_hidden)) {}

  // Weights come bit by bit, gradients are added by ascending rank, twice in a row. Returns how
  // many replicas the ranks have.
  int run() {
    const std::vector<int32_t> topk_idx = popular_choice();
    std::vector<float> in = weights_of_masters(kIn);
    std::vector<float> out = weights_of_masters(kOut);
    std::vector<float> grad_in = masters_gradients(kIn);
    std::vector<float> grad_out = masters_gradients(kOut);
    const CountedPlan counted = rank_.plan(kTokens, topk_idx.data());
    placement_ = counted.plan.placement();
    for (int time = 0; time < 2; ++time) {
      replicas_.bring(
          rank_, counted.plan, {in.data(), out.data(), grad_in.data(), grad_out.data()}
      );
      check_and_use_places(counted.plan.rank());
      replicas_.return_gradients(rank_);
      replicas_.add_to_masters();
    }
    check_gradients(counted.plan, kIn, grad_in);
    check_gradients(counted.plan, kOut, grad_out);
    return static_cast<int>(std::ranges::count_if(placement_, [](int32_t expert) {
      return expert >= 0;
    }));
  }

 private:
  static constexpr int64_t kTokens = 40;
  enum Matrix : size_t { kIn, kOut };

  [[nodiscard]] size_t size_of(Matrix matrix) const {
    return matrix == kIn ? 2 * size_out_ : size_out_;
  }

  // Others for each expert.
  static float weight(int expert, Matrix matrix, size_t i) {
    return static_cast<float>((static_cast<size_t>(expert) * 29 + matrix * 7 + i) % 251);
  }
  // That of a place, or of masters.
  static float gradient(int place, Matrix matrix, size_t i) {
    return 1.0F /
           static_cast<float>((static_cast<size_t>(place + 1) * 17 + matrix * 5 + i) % 97 + 1);
  }
  static constexpr int kMaster = -1;

  // Experts of rank 0 for nearly all tokens, of which it then gets rid.
  [[nodiscard]] std::vector<int32_t> popular_choice() const {
    std::vector<int32_t> chosen;
    for (int64_t token = 0; token < kTokens; ++token) {
      for (int k = 0; k < config_.model.topk; ++k) {
        chosen.push_back(token % 5 == 0 ? config_.model.num_experts - 1 - k : k);
      }
    }
    return chosen;
  }

  template <class Make>
  static std::vector<float> made(size_t size, const Make& make) {
    std::vector<float> values(size);
    for (size_t i = 0; i < size; ++i) {
      values[i] = make(i);
    }
    return values;
  }
  [[nodiscard]] std::vector<float> weights_of_masters(Matrix matrix) const {
    const size_t size = size_of(matrix);
    return made(static_cast<size_t>(num_own_) * size, [&](size_t i) {
      const int own = static_cast<int>(i / size);
      return weight(exchange_.rank() * num_own_ + own, matrix, i % size);
    });
  }
  [[nodiscard]] std::vector<float> masters_gradients(Matrix matrix) const {
    const size_t size = size_of(matrix);
    return made(static_cast<size_t>(num_own_) * size, [&](size_t i) {
      return gradient(kMaster, matrix, i % size);
    });
  }

  // Checks that this rank's replicas have the weights, and adds gradients, of which they had none.
  void check_and_use_places(int rank) {
    const auto places = replicas_.places();
    for (size_t i = 0; i < places.size(); ++i) {
      const int place = rank * static_cast<int>(places.size()) + static_cast<int>(i);
      const int expert = placement_[static_cast<size_t>(place)];
      ASSERT_EQ(places[i].in == nullptr, expert < 0);
      if (expert >= 0) {
        check_and_use(expert, place, kIn, places[i].in, places[i].grad_in);
        check_and_use(expert, place, kOut, places[i].out, places[i].grad_out);
      }
    }
  }
  void check_and_use(int expert, int place, Matrix matrix, const float* values, float* grads) {
    const size_t size = size_of(matrix);
    for (size_t i = 0; i < size; ++i) {
      ASSERT_EQ(values[i], weight(expert, matrix, i)) << "expert " << expert << "[" << i << "]";
    }
    const std::vector<float> own = made(size, [&](size_t i) { return gradient(place, matrix, i); });
    Math::add(own.data(), grads, static_cast<int64_t>(size));
  }

  void check_gradients(const Plan& plan, Matrix matrix, const std::vector<float>& seen) {
    const size_t size = size_of(matrix);
    for (size_t at = 0; at < seen.size(); ++at) {
      const size_t i = at % size;
      const int expert = plan.rank() * num_own_ + static_cast<int>(at / size);
      std::optional<float> sum;
      for (size_t place = 0; place < placement_.size(); ++place) {
        if (placement_[place] == expert) {
          const float of_place = gradient(static_cast<int>(place), matrix, i);
          sum = sum ? *sum + of_place : of_place;
        }
      }
      float expected = gradient(kMaster, matrix, i);
      for (int time = 0; sum && time < 2; ++time) {
        expected += *sum;
      }
      ASSERT_EQ(seen[at], expected) << "expert " << expert << "[" << i << "]";
    }
  }

  TrainConfig config_;
  int num_own_;
  Exchange exchange_;
  std::optional<Exchange> replica_exchange_;
  MoeContext context_;
  Rank rank_;
  size_t size_out_;
  Replicas replicas_;
  std::span<const int32_t> placement_;
};

// On threads as ranks.
void check_replicas(int num_ranks, TrainConfig config) {
  config.replicas = 2;
  run_threads(num_ranks, [&](Group& group) {
    ReplicasCase one(group, config);
    const int num_replicas = one.run();
    EXPECT_EQ(num_replicas > 0, num_ranks > 1);
  });
}

}  // namespace weft::moe
