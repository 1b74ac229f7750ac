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

}  // namespace

ModelLayout make_layout(const ModelConfig& config, int rank, int num_ranks) {
  const int64_t hidden = config.hidden;
  const int64_t inner = config.expert_hidden;
  const int64_t num_experts = config.num_experts;
  ModelLayout layout;
  layout.blocks.resize(static_cast<size_t>(config.num_blocks));
  // Spans are placed one after another.
  const auto replicated = [&](int64_t size, float centre, float spread) -> ParameterSpan {
    const auto count = static_cast<uint64_t>(size);
    const ParameterSpan span = {layout.num_replicated, count, layout.num_model, centre, spread};
    layout.num_replicated += count;
    layout.num_model += count;
    return span;
  };
  // `size` elements of all ranks' experts, of which this rank holds an equal part.
  const auto shared_out = [&](int64_t size, float spread) -> ParameterSpan {
    const uint64_t count = static_cast<uint64_t>(size / num_ranks);
    const uint64_t before = static_cast<uint64_t>(rank) * count;
    const ParameterSpan span = {layout.num_expert, count, layout.num_model + before, 0, spread};
    layout.num_expert += count;
    layout.num_model += static_cast<uint64_t>(size);
    return span;
  };

  const int64_t table = int64_t{config.window} * kNumBytes * hidden;
  layout.embedding = replicated(table, 0, unit_spread(config.window));
  layout.head = replicated(kNumBytes * hidden, 0, unit_spread(hidden) * 0.1F);
  for (BlockLayout& block : layout.blocks) {
    block.router = replicated(num_experts * hidden, 0, unit_spread(hidden) * 0.1F);
  }
  layout.num_decayed = layout.num_replicated;
  layout.final_norm = replicated(hidden, 1, 0);
  for (BlockLayout& block : layout.blocks) {
    block.norm = replicated(hidden, 1, 0);
  }
  for (BlockLayout& block : layout.blocks) {
    block.experts_in = shared_out(num_experts * 2 * inner * hidden, unit_spread(hidden));
    block.experts_out = shared_out(num_experts * hidden * inner, unit_spread(inner));
  }
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
