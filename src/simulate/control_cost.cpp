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

// By symmetry a rank sends as many bytes as it gets; records are taken to be of one length.
void add_records(
    const Scenario& scenario, const Model& model, int64_t record_bytes, ControlCost& cost
) {
  const int64_t near = scenario.ranks_per_domain - 1;
  const int64_t far = scenario.num_ranks - scenario.ranks_per_domain;
  const int64_t others = scenario.num_domains() - 1;
  const bool is_carried = others > 0 && !scenario.is_flat;
  // A bundle for each other domain, whose carrier passes on all but its own records.
  const int64_t passed = is_carried ? others * near : 0;
  const int64_t num_records = near + far + passed;
  const int64_t far_bytes = num_records == 0 ? 0 : record_bytes * far / num_records;
  const double far_us = card_us(model, is_carried ? others : far, far_bytes);
  const double near_us = link_us(model, near + passed, record_bytes - far_bytes);
  cost.plan_records_us = is_carried ? far_us + near_us : std::max(far_us, near_us);
  cost.plan_bytes_out += far_bytes;
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
  cost.words_by_carrier_us = others == 0 ? 0
                                         : card_us(model, others, others * word) +
                                               link_us(model, near, near * others * word);
  cost.plan_words_us = both(word + counts);
  cost.plan_local_us =
      plan_work_us(model, scenario.num_ranks, scenario.num_experts, scenario.max_tokens);
  add_records(scenario, model, static_cast<int64_t>(memory.cpu.records_used), cost);
  cost.plan_bytes_out += far * (word + counts);
  return cost;
}

}  // namespace weft::sim
