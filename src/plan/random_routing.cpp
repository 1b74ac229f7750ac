// SPDX-License-Identifier: Apache-2.0
#include "plan/random_routing.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace weft {
namespace {

// Returns base^(sixteenths/16) by square roots and products: both are exact IEEE operations, so
// every machine gets the same bits, unlike std::pow.
double power_of_sixteenths(double base, int64_t sixteenths) {
  double root = base;
  for (int i = 0; i < 4; ++i) {
    root = std::sqrt(root);
  }
  double result = 1.0;
  for (; sixteenths > 0; sixteenths /= 2) {
    result *= sixteenths % 2 == 1 ? root : 1.0;
    root *= root;
  }
  return result;
}

// Draws experts by popularity.
class ExpertSource {
 public:
  explicit ExpertSource(const RandomRouting& spec)
      : expert_(static_cast<size_t>(spec.num_experts)) {
    RandomSource random(spec.seed);
    std::iota(expert_.begin(), expert_.end(), 0);
    for (size_t i = expert_.size(); i > 1; --i) {
      std::swap(expert_[i - 1], expert_[random.below(i)]);
    }
    const bool is_zipf = spec.popularity == Popularity::kZipf;
    const int64_t exponent =
        is_zipf ? std::llround(std::clamp(spec.zipf_exponent, 0.0, 8.0) * 16) : 0;
    const double scale = 0x1p31 / static_cast<double>(expert_.size());  // keeps the sum below 2^32
    uint64_t sum = 0;
    for (size_t i = 0; i < expert_.size(); ++i) {
      const double weight = scale / power_of_sixteenths(static_cast<double>(i + 1), exponent);
      sum += std::max<uint64_t>(1, static_cast<uint64_t>(weight));
      cumulative_.push_back(sum);
    }
    if (spec.popularity == Popularity::kOneExpert) {
      expert_.resize(1);
      cumulative_.resize(1);
    }
  }

  int32_t draw(RandomSource& random) const {
    const uint64_t at = random.below(cumulative_.back());
    const auto found = std::ranges::upper_bound(cumulative_, at);
    return expert_[static_cast<size_t>(found - cumulative_.begin())];
  }

  // Draws an expert not in `taken`; after some tries the most popular free one.
  int32_t draw_other(RandomSource& random, std::span<const int32_t> taken) const {
    const auto is_free = [&](int32_t expert) {
      return std::ranges::find(taken, expert) == taken.end();
    };
    for (int attempt = 0; attempt < 32; ++attempt) {
      if (const int32_t expert = draw(random); is_free(expert)) {
        return expert;
      }
    }
    return *std::ranges::find_if(expert_, is_free);
  }

 private:
  std::vector<int32_t> expert_;  // most popular first
  std::vector<uint64_t> cumulative_;
};

}  // namespace

RouteTable random_routing(const RandomRouting& spec, int rank) {
  const bool may_repeat = spec.repeat_experts || spec.popularity == Popularity::kOneExpert;
  WEFT_CHECK_ARG(
      Context{},
      spec.num_tokens >= 0 && spec.num_experts >= 1 && spec.topk >= 1 && spec.topk <= kMaxTopk &&
          (may_repeat || spec.topk <= spec.num_experts),
      "random_routing: {} tokens, {} experts, topk = {} (topk is 1 to {} and at most the experts)",
      spec.num_tokens,
      spec.num_experts,
      spec.topk,
      kMaxTopk
  );
  const ExpertSource experts(spec);
  RandomSource random(spec.seed ^ (static_cast<uint64_t>(rank) + 1) * 0xd1342543de82ef95U);
  const auto topk = static_cast<size_t>(spec.topk);

  RouteTable table;
  table.num_tokens = spec.num_tokens;
  table.topk = spec.topk;
  table.has_weights = spec.with_weights;
  table.expert.resize(static_cast<size_t>(spec.num_tokens) * topk);
  for (size_t i = 0; i < table.expert.size(); ++i) {
    const auto taken = std::span(table.expert).subspan(i - i % topk, i % topk);
    const bool is_hole = random.uniform() < static_cast<float>(spec.hole_fraction);
    const int32_t expert = may_repeat ? experts.draw(random) : experts.draw_other(random, taken);
    table.expert[i] = is_hole ? -1 : expert;
  }
  table.weight.resize(spec.with_weights ? table.expert.size() : 0);
  for (float& weight : table.weight) {
    weight = random.uniform() + 0x1p-24F;
  }
  return table;
}

}  // namespace weft
