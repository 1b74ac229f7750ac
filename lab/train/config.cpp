// SPDX-License-Identifier: Apache-2.0
#include "train/config.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/check.hpp"
#include "train/layers/random.hpp"
#include "weft/plan.hpp"
#include "weft/routing.hpp"

namespace weft::moe {
namespace {

// The most of every size of a model, and of the tokens of a step: what lies above is a slip.
constexpr int64_t kMostSize = 1 << 16;
constexpr int64_t kMostBlocks = 1 << 10;
constexpr int64_t kMostBatch = 1 << 30;

template <class... Args>
void require(bool is_good, fmt::format_string<Args...> text, Args&&... args) {
  WEFT_CHECK_ARG(Context{}, is_good, "train: {}", fmt::format(text, std::forward<Args>(args)...));
}

void check_range(std::string_view field, int64_t value, int64_t least, int64_t most) {
  require(value >= least, "{} = {} (at least {})", field, value, least);
  require(value <= most, "{} = {} (at most {})", field, value, most);
}

void check_model(const ModelConfig& model, int num_ranks) {
  visit_fields(model, [](const char* name, auto value) {
    if constexpr (std::is_integral_v<decltype(value)>) {
      check_range(name, value, 1, kMostSize);
    }
  });
  check_range("num_blocks", model.num_blocks, 1, kMostBlocks);
  require(
      model.num_experts % num_ranks == 0,
      "num_experts = {} (divisible by the number of ranks, {})",
      model.num_experts,
      num_ranks
  );
  const int most = std::min(model.num_experts, kMaxTopk);
  require(model.topk <= most, "topk = {} (at most {} here)", model.topk, most);
}

void check_micro_batches(const TrainConfig& config) {
  check_range("num_micro_batches", config.num_micro_batches, 1, kMostBatch);
  require(
      config.num_micro_batches <= config.global_batch,
      "num_micro_batches = {} (at most global_batch, {})",
      config.num_micro_batches,
      config.global_batch
  );
  require(
      config.num_micro_batches > 1 || !config.overlap.is_on,
      "num_micro_batches = 1 with overlap (at least 2: one computes while another travels)"
  );
  require(
      config.overlap.is_on || !config.overlap.delays_weight_gradients,
      "delayed weight gradients without overlap (there is nothing they could hide)"
  );
}

}  // namespace

float learning_rate_at(const TrainConfig& config, int64_t step) {
  if (step < config.warmup_steps) {
    return config.learning_rate * static_cast<float>(step + 1) /
           static_cast<float>(config.warmup_steps);
  }
  return config.learning_rate;
}

uint64_t signature(const TrainConfig& config) {
  uint64_t hash = 0;
  const auto add = [&](const char* /*name*/, auto value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(value));
    hash = mix_bits(hash ^ bits) + 1;
  };
  visit_fields(config.model, add);
  add("global_batch", config.global_batch);
  add("num_micro_batches", config.num_micro_batches);
  add("overlap", config.overlap.is_on);  // the order in which ranks call each other
  add("replicas", config.replicas);
  add("seed", config.seed);
  add("dtype", config.dtype);
  add("learning_rate", config.learning_rate);
  add("warmup_steps", config.warmup_steps);
  add("weight_decay", config.weight_decay);
  add("beta1", config.beta1);
  add("beta2", config.beta2);
  add("epsilon", config.epsilon);
  return hash;
}

void validate(const TrainConfig& config, int num_ranks) {
  require(
      num_ranks <= kMaxTopk,
      "{} ranks (at most {}: replicated parameters reach all ranks as one top-k)",
      num_ranks,
      kMaxTopk
  );
  check_model(config.model, num_ranks);
  check_range("global_batch", config.global_batch, 1, kMostBatch);
  require(
      std::isfinite(config.model.balance_weight) && config.model.balance_weight >= 0,
      "balance_weight = {} (finite, at least 0)",
      config.model.balance_weight
  );
  check_micro_batches(config);
  check_range("replicas", config.replicas, 0, kMostReplicas);
  check_range("warmup_steps", config.warmup_steps, 0, INT64_MAX);
  require(
      config.dtype == DType::kFloat32 || config.dtype == DType::kBFloat16,
      "dtype {} (float32 or bfloat16)",
      dtype_name(config.dtype)
  );
  const int64_t row_bytes = config.model.hidden * dtype_bytes(config.dtype);
  require(
      row_bytes % 16 == 0,
      "hidden = {} makes rows of {} B (a multiple of 16 B in {})",
      config.model.hidden,
      row_bytes,
      dtype_name(config.dtype)
  );
  require(
      std::isfinite(config.learning_rate) && config.learning_rate > 0,
      "learning_rate = {} (above 0)",
      config.learning_rate
  );
  require(
      config.beta1 >= 0 && config.beta1 < 1 && config.beta2 >= 0 && config.beta2 < 1,
      "beta1 = {}, beta2 = {} (in [0, 1))",
      config.beta1,
      config.beta2
  );
}

}  // namespace weft::moe
