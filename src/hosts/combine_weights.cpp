// SPDX-License-Identifier: Apache-2.0
// Source weights of a combine between domains of GPUs: those of crossing tokens go to their
// carriers before any round.
#include "hosts/combine.hpp"

namespace weft {

void CombineAcross::swap_weights(std::span<const CallWord> words) {
  const uint32_t number = ++owner_.number;
  Transfer weights;
  weights.chunk = weights_;
  weights.what = "weights";
  for (size_t domain = 0; domain < traffic_.sent.size(); ++domain) {
    if (num_sent(domain) == 0) {
      continue;
    }
    PackLaunch launch = weights_launch();
    launch.index = device_.index.sent[domain];
    launch.count = num_sent(domain);
    launch.messages = owner_.messages.data + areas_.weight_messages[domain];
    launch.done = owner_.done->get() + areas_.weight_chunks[domain];
    launch.number = number;
    launch_pack(launch, owner_.copies.get());
    weights.sends.push_back(
        {.to = static_cast<int>(carrier_of(domain)),
         .count = num_sent(domain),
         .target = words[carrier_of(domain)].source_weights,
         .first_signal = network_.signals().source_weights(static_cast<uint32_t>(plan_.shape.rank)),
         .messages = launch.messages,
         .done = launch.done,
         .number = number}
    );
  }
  for (const CarriedSource& carried : traffic_.carried) {
    weights.receives.push_back(
        {.from = carried.source,
         .count = carried.crossings.size(),
         .first_signal = network_.signals().source_weights(static_cast<uint32_t>(carried.source))}
    );
  }
  const size_t transfer = start(std::move(weights));
  for (size_t i = 0; i < traffic_.carried.size(); ++i) {
    const int64_t count = traffic_.carried[i].crossings.size();
    if (count > 0) {
      let_copies_await(transfer, i, 0);
      copy_in(
          areas_.carried[i].source_weights,
          network_.staging() + areas_.staged_weights[i],
          weights_bytes(count)
      );
    }
  }
}

PackLaunch CombineAcross::weights_launch() const {
  PackLaunch launch;
  launch.chunk = weights_;
  launch.weights = reinterpret_cast<const float*>(in_.source_weights.data);
  launch.weight_column = device_.index.weight_column;
  launch.topk = topk_;
  launch.weight_cols = static_cast<int32_t>(in_.source_weights.cols);
  return launch;
}

}  // namespace weft
