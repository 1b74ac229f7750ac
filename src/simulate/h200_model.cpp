// SPDX-License-Identifier: Apache-2.0
// The built-in model. "measured" stands for 4 x H200 of one host; docs/scale.md compares what
// follows from it with what was measured there.
#include "simulate/model.hpp"

namespace weft::sim {

Model h200_model() {
  constexpr const char* kCard = "assumed: a 400 Gb/s card for each rank";
  constexpr const char* kProxy = "assumed";
  Model model;
  model.name = "h200";
  set_field(model, "link_gbps", 350, "measured: bulk stores of 64 SMs, all GPUs to all others");
  set_field(model, "link_latency_us", 0.8, "measured: half of a signal to a peer GPU and back");
  set_field(model, "link_signal_us", 0, "measured: hidden behind the rows, part of call_us");
  set_field(model, "copy_gbps", 2150, "measured: copy inside a GPU, read and written 4.3 TB/s");
  set_field(model, "one_mover", 0, "by design: pushing and copying SMs differ");
  set_field(model, "card_gbps", 50, kCard);
  set_field(model, "card_latency_us", 5, "assumed: card, two switches, card");
  set_field(model, "card_messages", 100, kCard);
  set_field(model, "card_window", 256, kProxy);
  set_field(model, "post_us", 0.3, kProxy);
  set_field(model, "proxies", 1, kProxy);
  set_field(model, "message_rows", 32, "by design: a message is a packed chunk");
  set_field(
      model, "call_us", 24.5, "measured: what a dispatch of 128 tokens takes beyond its bytes"
  );
  set_field(model, "plan_base_us", 24.2, "measured: plan of 128 tokens, 4 ranks, 256 experts");
  set_field(model, "plan_token_ns", 0.66, "measured: plan of 4,096 tokens less that of 128");
  set_field(model, "plan_count_ns", 0.0025, "assumed: counts are read at 1.6 TB/s by 32 blocks");
  return model;
}

}  // namespace weft::sim
