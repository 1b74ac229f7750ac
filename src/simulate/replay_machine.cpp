// SPDX-License-Identifier: Apache-2.0
#include "simulate/replay_machine.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "exchange/region_map.hpp"
#include "simulate/traffic.hpp"

namespace weft::sim {

ReplayMachine::ReplayMachine(
    const Scenario& scenario, const Model& model, const Schedule& schedule, bool is_back
)
    : scenario_(scenario),
      schedule_(schedule),
      events_(static_cast<size_t>(Turn::kCount) * static_cast<size_t>(scenario.num_ranks)),
      num_card_parts_(static_cast<uint32_t>(schedule.card_parts.size())),
      is_back_(is_back),
      has_one_mover_(model.one_mover != 0),
      window_(static_cast<int64_t>(model.card_window)),
      post_time_(ticks_of_us(model.post_us / model.proxies)),
      link_row_(ticks_of_bytes(scenario.row_bytes, model.link_gbps)),
      copy_row_(ticks_of_bytes(scenario.row_bytes, model.copy_gbps)),
      link_signal_(ticks_of_us(model.link_signal_us)),
      link_latency_(ticks_of_us(model.link_latency_us)),
      card_latency_(ticks_of_us(model.card_latency_us)),
      link_out_(scenario.num_ranks),
      link_in_(scenario.num_ranks),
      copies_(scenario.num_ranks),
      card_out_(scenario.num_ranks),
      card_in_(scenario.num_ranks),
      proxies_(scenario.num_ranks),
      senders_(static_cast<size_t>(scenario.num_ranks)),
      card_sent_(schedule.card_chunks.size()),
      link_sent_(schedule.card_parts.size() + schedule.link_parts.size()) {
  const auto message_rows = static_cast<int64_t>(model.message_rows);
  for (int64_t rows = 0; rows <= kChunkArrivals; ++rows) {
    const int64_t messages = count_messages(rows, message_rows);
    const Ticks sending = ticks_of_us(static_cast<double>(messages) / model.card_messages);
    const Ticks moving = ticks_of_bytes(rows * scenario.row_bytes, model.card_gbps);
    sizes_.push_back({messages, std::max(sending, moving)});
  }
}

ReplayTimes ReplayMachine::run() {
  while (!events_.is_empty()) {
    const Event<Step> event = events_.take();
    if (event.kind == Step::kCardIn) {
      card_in(event.id, event.at);
    } else if (event.kind == Step::kConfirmed) {
      confirm(schedule_.card_chunks[event.id], event.at);
    } else {
      handle(event);
    }
  }
  WEFT_ASSERT(std::ranges::all_of(senders_, [](const Sender& sender) {
    return sender.waiting.empty() && sender.unconfirmed == 0;
  }));
  const auto busiest = [](const Servers& a, const Servers& b) {
    return us_of_ticks(std::max(a.most_busy(), b.most_busy()));
  };
  return {
      .us = us_of_ticks(end_),
      .busy = {
          .link_us = busiest(link_out_, link_in_),
          .card_us = busiest(card_out_, card_in_),
          .proxy_us = us_of_ticks(proxies_.most_busy()),
          .copy_us = us_of_ticks(copies_.most_busy())}};
}

void ReplayMachine::send_over_card(uint32_t chunk, Ticks now) {
  const int from = sender(schedule_.card_chunks[chunk]);
  senders_[static_cast<size_t>(from)].waiting.push_back(chunk);
  post(from, now);
}

// As many as the window lets through; the proxies and the card take them one after the other.
void ReplayMachine::post(int rank, Ticks now) {
  Sender& sender = senders_[static_cast<size_t>(rank)];
  while (!sender.waiting.empty()) {
    const uint32_t id = sender.waiting.front();
    const Chunk& chunk = schedule_.card_chunks[id];
    const int64_t messages = size_of(chunk).messages;
    if (sender.unconfirmed > 0 && sender.unconfirmed + messages > window_) {
      return;  // a confirmation comes
    }
    sender.waiting.pop_front();
    sender.unconfirmed += messages;
    const Ticks posted = proxies_.serve(rank, now, post_time_ * messages);
    const Ticks first_posted = posted - post_time_ * (messages - 1);
    const Ticks duration = size_of(chunk).on_card;
    const Ticks sent = card_out_.serve(rank, first_posted, duration, posted);
    card_sent_[id] = sent;
    add_in_turn(Turn::kCardIn, rank, sent - duration + card_latency_, Step::kCardIn, id);
  }
}

void ReplayMachine::confirm(const Chunk& chunk, Ticks now) {
  const int from = sender(chunk);
  senders_[static_cast<size_t>(from)].unconfirmed -= size_of(chunk).messages;
  post(from, now);
}

void ReplayMachine::card_in(uint32_t id, Ticks now) {
  const Chunk& chunk = schedule_.card_chunks[id];
  const Ticks duration = size_of(chunk).on_card;
  const Ticks arrived =
      card_in_.serve(receiver(chunk), now, duration, card_sent_[id] + card_latency_);
  if (needs_word_of(chunk, arrived)) {
    add_in_turn(Turn::kArrived, receiver(chunk), arrived, Step::kArrived, id);
  }
  add_in_turn(Turn::kConfirmed, receiver(chunk), arrived + card_latency_, Step::kConfirmed, id);
}

Ticks ReplayMachine::send_over_link(int from, uint32_t id, Ticks now) {
  const Ticks duration = link_row_ * part(id).rows + link_signal_;
  const Ticks sent = link_out_.serve(from, now, duration);
  link_sent_[id] = sent;
  add_in_turn(Turn::kLinkIn, from, sent - duration + link_latency_, Step::kLinkIn, id);
  return sent;
}

void ReplayMachine::take_from_link(int to, uint32_t id, Ticks now) {
  const Ticks arrived =
      link_in_.serve(to, now, link_row_ * part(id).rows, link_sent_[id] + link_latency_);
  add_in_turn(Turn::kPartIn, to, arrived, Step::kPartIn, id);
}

}  // namespace weft::sim
