// SPDX-License-Identifier: Apache-2.0
#include "train/replicas.hpp"

namespace weft::moe {

std::optional<Exchange> make_replica_exchange(const Group& group, const TrainConfig& config) {
  if (config.replicas == 0 || group.num_ranks() == 1) {
    return std::nullopt;
  }
  const ModelConfig& model = config.model;
  const int64_t num_own = model.num_experts / group.num_ranks();
  const ExchangeConfig wanted = {
      .hidden = model.hidden,
      .max_tokens = num_own * 3 * model.expert_hidden,
      .num_experts = group.num_ranks() * config.replicas,
      .max_topk = group.num_ranks() - 1,  // a rank has at most one replica of an expert
      .transport = config.transport,
      .num_threads = config.num_threads,
      .timeout = config.timeout};
  return Exchange(group, wanted);
}

}  // namespace weft::moe
