// SPDX-License-Identifier: Apache-2.0
// The gradients of the whole model, through the exchange, against differences of its loss.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>

#include "train/step_model.hpp"
#include "training_runs.hpp"

namespace weft::moe {
namespace {

constexpr float kStep = 5e-3F;
constexpr double kShare = 0.01;  // tolerance, as a share of the largest gradient
constexpr size_t kProbes = 6;    // elements of each parameter

ModelConfig tiny_model() {
  return {
      .window = 3,
      .hidden = 8,
      .expert_hidden = 6,
      .num_blocks = 2,
      .num_experts = 4,
      .topk = 2,
      .balance_weight = 0.5F};
}

double sum_over_ranks(const Group& group, double mine) {
  double sum = 0;
  for (const Bytes& block : group.all_gather(std::as_bytes(std::span(&mine, 1)))) {
    double value = 0;
    std::memcpy(&value, block.data(), sizeof(value));
    sum += value;
  }
  return sum;
}

// One rank's model with memory of its own.
class Rig {
 public:
  Rig(const Group& group, int64_t global_tokens)
      : group_(group),
        tokens_(tokens_of_rank(global_tokens, group.rank(), group.num_ranks())),
        layout_(make_layout(config_, group.rank(), group.num_ranks())),
        exchange_(
            group,
            {.hidden = config_.hidden,
             .max_tokens = global_tokens,
             .num_experts = config_.num_experts,
             .max_topk = config_.topk,
             .num_threads = 1,
             .timeout = std::chrono::seconds(20)}
        ),
        values_(layout_.num_replicated),
        grads_(layout_.num_replicated),
        expert_values_(layout_.num_expert),
        expert_grads_(layout_.num_expert),
        context_{exchange_, config_, DType::kFloat32, global_tokens},
        micro_batches_{{tokens_, one_shard(tokens_.size())}},
        model_(
            {group,
             context_,
             micro_batches_,
             {},
             layout_,
             {{values_, grads_}, {expert_values_, expert_grads_}}}
        ),
        text_(make_text(500)) {
    initialise(layout_.replicated(), 3, values_);
    initialise(layout_.experts(), 3, expert_values_);
    // Decided routers: few tokens near a change of experts.
    for (const BlockLayout& block : layout_.blocks) {
      for (float& value : std::span(values_).subspan(block.router.begin, block.router.size)) {
        value *= 30.0F;
      }
    }
    BatchSource(text_, config_.window, 3).draw(0, tokens_, batch_);
  }

  // Returns the loss of the global batch, the same on every rank.
  double loss() {
    const LossShare share = model_.forward_backward({&batch_, 1});
    const double balance = share.balance * config_.num_blocks;
    const auto weight = static_cast<double>(config_.balance_weight);
    return sum_over_ranks(group_, share.cross_entropy.at(0) + weight * balance);
  }

  // Gradients of the global batch; those of replicated parameters are summed over the ranks.
  void compute_gradients() {
    std::ranges::fill(grads_, 0.0F);
    std::ranges::fill(expert_grads_, 0.0F);
    loss();
    kept_expert_grads_ = expert_grads_;
    kept_routing_ = routing();
    kept_grads_.assign(grads_.size(), 0.0);
    for (const Bytes& block : group_.all_gather(std::as_bytes(std::span(grads_)))) {
      std::vector<float> theirs(grads_.size());
      std::memcpy(theirs.data(), block.data(), block.size());
      std::ranges::transform(kept_grads_, theirs, kept_grads_.begin(), [](double a, float b) {
        return a + static_cast<double>(b);
      });
    }
  }

  // (loss(value + step) - loss(value - step)) / (2 step); every rank calls it, those with a value
  // change theirs. Nothing if any token changed its experts, for there the loss jumps.
  std::optional<double> difference(float* value) {
    const float kept = value != nullptr ? *value : 0.0F;
    double side[2];
    double num_changed = 0;
    for (const int sign : {0, 1}) {
      if (value != nullptr) {
        *value = sign == 0 ? kept + kStep : kept - kStep;
      }
      side[sign] = loss();
      num_changed += sum_over_ranks(group_, routing() == kept_routing_ ? 0 : 1);
    }
    if (value != nullptr) {
      *value = kept;
    }
    num_differences_ += 1;
    num_jumps_ += num_changed > 0 ? 1 : 0;
    if (num_changed > 0) {
      return std::nullopt;
    }
    return (side[0] - side[1]) / (2.0 * static_cast<double>(kStep));
  }

  void expect_few_jumps() const {
    EXPECT_LT(num_jumps_, num_differences_ / 5) << "of " << num_differences_;
  }

  // The probed elements of a parameter: those with the largest gradients, and the first.
  static std::vector<size_t> probes(std::span<const double> grads) {
    std::vector<size_t> order(grads.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, std::greater<>(), [&](size_t i) { return std::abs(grads[i]); });
    order.resize(std::min(order.size(), kProbes));
    order.push_back(0);
    return order;
  }

  void check_replicated() {
    for (const ParameterSpan& span : layout_.replicated()) {
      const auto grads = std::span(kept_grads_).subspan(span.begin, span.size);
      const auto elements = probes(grads);
      const double largest = std::abs(grads[elements[0]]);
      EXPECT_GT(largest, 0);
      for (const size_t i : elements) {
        const auto expected = difference(&values_[span.begin + i]);
        EXPECT_NEAR(grads[i], expected.value_or(grads[i]), kShare * largest + 4e-4)
            << "replicated element " << span.begin + i;
      }
    }
  }

  void check_experts() {
    for (int owner = 0; owner < group_.num_ranks(); ++owner) {
      const bool is_owner = owner == group_.rank();
      for (const ParameterSpan& span : layout_.experts()) {
        const auto first = kept_expert_grads_.begin() + static_cast<std::ptrdiff_t>(span.begin);
        const std::vector<double> grads(first, first + static_cast<std::ptrdiff_t>(span.size));
        const auto elements = probes(grads);
        const double largest = std::abs(grads[elements[0]]);
        for (const size_t i : elements) {
          const auto expected = difference(is_owner ? &expert_values_[span.begin + i] : nullptr);
          if (is_owner) {
            EXPECT_GT(largest, 0);
            EXPECT_NEAR(grads[i], expected.value_or(grads[i]), kShare * largest + 4e-4)
                << "expert element " << span.begin + i << " of rank " << owner;
          }
        }
      }
    }
  }

 private:
  // Returns the choices of this rank's tokens in all blocks.
  [[nodiscard]] std::vector<int32_t> routing() {
    std::vector<int32_t> all;
    for (int block = 0; block < config_.num_blocks; ++block) {
      const auto chosen = model_.topk_idx(block);
      all.insert(all.end(), chosen.begin(), chosen.end());
    }
    return all;
  }

  const ModelConfig config_ = tiny_model();
  const Group& group_;
  Range tokens_;
  ModelLayout layout_;
  Exchange exchange_;
  std::vector<float> values_;
  std::vector<float> grads_;
  std::vector<float> expert_values_;
  std::vector<float> expert_grads_;
  MoeContext context_;
  std::vector<MicroBatch> micro_batches_;
  StepModel model_;
  std::vector<std::byte> text_;
  Batch batch_;
  std::vector<double> kept_grads_;
  std::vector<float> kept_expert_grads_;
  std::vector<int32_t> kept_routing_;
  int num_differences_ = 0;
  int num_jumps_ = 0;
};

class ModelGradientTest : public testing::TestWithParam<int> {};

TEST_P(ModelGradientTest, MatchesDifferences) {
  run_threads(GetParam(), [](Group& group) {
    Rig rig(group, 11);
    rig.compute_gradients();
    rig.check_replicated();
    rig.check_experts();
    rig.expect_few_jumps();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ModelGradientTest, testing::Values(1, 2));

TEST(ModelTest, BalanceLossDoesNotDependOnTheNumberOfRanks) {
  double alone = 0;
  run_threads(1, [&](Group& group) { alone = Rig(group, 11).loss(); });
  for (const int num_ranks : {2, 4}) {
    run_threads(num_ranks, [&](Group& group) {
      EXPECT_NEAR(Rig(group, 11).loss(), alone, 1e-5) << num_ranks << " ranks";
    });
  }
}

}  // namespace
}  // namespace weft::moe
