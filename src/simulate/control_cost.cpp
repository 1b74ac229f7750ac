// SPDX-License-Identifier: Apache-2.0
#include "simulate/control_cost.hpp"

#include <algorithm>

#include "exchange/call_board.hpp"

namespace weft::sim {
namespace {

// Many small messages out of a card at once, until the last has arrived.
double card_us(const Model& model, int64_t messages, int64_t bytes) {
  if (messages == 0) {
    return 0;
  }
  const auto count = static_cast<double>(messages);
  const double posting = count * model.post_us / model.proxies;
  const double sending = count / model.card_messages;
  const double moving = static_cast<double>(bytes) / model.card_gbps / 1e3;
  return std::max({posting, sending, moving}) + model.card_latency_us;
}

double link_us(const Model& model, int64_t messages, int64_t bytes) {
  if (messages == 0) {
    return 0;
  }
  const double moving = static_cast<double>(bytes) / model.link_gbps / 1e3;
  return moving + static_cast<double>(messages) * model.link_signal_us + model.link_latency_us;
}

}  // namespace

ControlCost control_cost(const Scenario& scenario, const Model& model, const Memory& memory) {
  const int64_t near = scenario.ranks_per_domain - 1;
  const int64_t far = scenario.num_ranks - scenario.ranks_per_domain;
  const int64_t others = scenario.num_domains() - 1;
  const auto word = static_cast<int64_t>(sizeof(CallWord));
  const int64_t counts = (int64_t{scenario.num_experts} + scenario.num_ranks) * 4;
  const auto both = [&](int64_t bytes) {
    return std::max(card_us(model, far, far * bytes), link_us(model, near, near * bytes));
  };

  ControlCost cost;
  cost.word_messages = far;
  // call_us holds the words of a domain.
  cost.words_us = card_us(model, far, far * word);
  cost.words_by_relay_us = others == 0 ? 0
                                       : card_us(model, others, others * word) +
                                             link_us(model, near, near * others * word);
  cost.plan_words_us = both(word + counts);
  cost.plan_local_us =
      plan_work_us(model, scenario.num_ranks, scenario.num_experts, scenario.max_tokens);
  // By symmetry a rank sends as many records as it gets; a share of them stays in the domain.
  const int64_t record_bytes = static_cast<int64_t>(memory.cpu.records_used);
  const int64_t remote_bytes =
      scenario.num_ranks > 1 ? record_bytes * far / (scenario.num_ranks - 1) : 0;
  cost.plan_records_us = std::max(
      card_us(model, far, remote_bytes), link_us(model, near, record_bytes - remote_bytes)
  );
  cost.plan_bytes_out = far * (word + counts) + remote_bytes;
  return cost;
}

}  // namespace weft::sim
