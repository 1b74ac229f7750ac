// SPDX-License-Identifier: Apache-2.0
#include "train/layers/parameters.hpp"

#include <cmath>

#include "train/config.hpp"
#include "train/layers/random.hpp"

namespace weft::moe {
namespace {

constexpr uint64_t kInitialStream = 0;

// Half-width of a uniform distribution that keeps the variance of a sum over `terms` at one.
float unit_spread(int64_t terms) {
  return std::sqrt(3.0F / static_cast<float>(terms));
}

// Places spans one after another.
class Cursor {
 public:
  Cursor(int rank, int num_ranks)
      : rank_(static_cast<uint64_t>(rank)), num_ranks_(static_cast<uint64_t>(num_ranks)) {}

  ParameterSpan replicated(int64_t size, float centre, float spread) {
    const auto count = static_cast<uint64_t>(size);
    const ParameterSpan span = {num_replicated_, count, num_model_, centre, spread};
    num_replicated_ += count;
    num_model_ += count;
    return span;
  }
  // `size` elements of all ranks' experts, of which this rank holds an equal part.
  ParameterSpan shared_out(int64_t size, float spread) {
    const uint64_t count = static_cast<uint64_t>(size) / num_ranks_;
    const ParameterSpan span = {num_expert_, count, num_model_ + rank_ * count, 0, spread};
    num_expert_ += count;
    num_model_ += static_cast<uint64_t>(size);
    return span;
  }
  [[nodiscard]] size_t num_replicated() const { return num_replicated_; }
  [[nodiscard]] size_t num_expert() const { return num_expert_; }
  [[nodiscard]] uint64_t num_model() const { return num_model_; }

 private:
  uint64_t rank_;
  uint64_t num_ranks_;
  size_t num_replicated_ = 0;
  size_t num_expert_ = 0;
  uint64_t num_model_ = 0;
};

}  // namespace

ModelLayout make_layout(const ModelConfig& config, int rank, int num_ranks) {
  const int64_t hidden = config.hidden;
  const int64_t inner = config.expert_hidden;
  const int64_t num_experts = config.num_experts;
  Cursor cursor(rank, num_ranks);
  ModelLayout layout;
  layout.blocks.resize(static_cast<size_t>(config.num_blocks));

  const int64_t table = int64_t{config.window} * kNumBytes * hidden;
  layout.embedding = cursor.replicated(table, 0, unit_spread(config.window));
  layout.head = cursor.replicated(kNumBytes * hidden, 0, unit_spread(hidden) * 0.1F);
  for (BlockLayout& block : layout.blocks) {
    block.router = cursor.replicated(num_experts * hidden, 0, unit_spread(hidden) * 0.1F);
  }
  layout.num_decayed = cursor.num_replicated();
  layout.final_norm = cursor.replicated(hidden, 1, 0);
  for (BlockLayout& block : layout.blocks) {
    block.norm = cursor.replicated(hidden, 1, 0);
  }
  layout.num_replicated = cursor.num_replicated();
  for (BlockLayout& block : layout.blocks) {
    block.experts_in = cursor.shared_out(num_experts * 2 * inner * hidden, unit_spread(hidden));
    block.experts_out = cursor.shared_out(num_experts * hidden * inner, unit_spread(inner));
  }
  layout.num_expert = cursor.num_expert();
  layout.num_model = cursor.num_model();
  return layout;
}

std::vector<ParameterSpan> ModelLayout::replicated() const {
  std::vector<ParameterSpan> spans = {embedding, head, final_norm};
  for (const BlockLayout& block : blocks) {
    spans.push_back(block.router);
    spans.push_back(block.norm);
  }
  return spans;
}

std::vector<ParameterSpan> ModelLayout::experts() const {
  std::vector<ParameterSpan> spans;
  for (const BlockLayout& block : blocks) {
    spans.push_back(block.experts_in);
    spans.push_back(block.experts_out);
  }
  return spans;
}

void initialise(std::span<const ParameterSpan> spans, uint64_t seed, std::span<float> values) {
  for (const ParameterSpan& span : spans) {
    for (size_t i = 0; i < span.size; ++i) {
      values[span.begin + i] =
          span.centre + span.spread * random_symmetric(seed, kInitialStream, span.model_begin + i);
    }
  }
}

}  // namespace weft::moe
