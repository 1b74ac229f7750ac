// SPDX-License-Identifier: Apache-2.0
#include "simulate/replay.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "cpu/protocol/region_map.hpp"
#include "simulate/traffic.hpp"

namespace weft::sim {
namespace {

enum class Step : uint32_t {
  kCardIn,     // card chunk: its first byte reaches the target's card
  kArrived,    // card chunk: all of it is there, and more is to be done with it
  kConfirmed,  // card chunk: its sender knows
  kReady,      // card chunk: complete at its sender (combine)
  kTurn,       // rank: goes on with its own rows
  kLinkOut,    // part: goes out over the links (combine)
  kLinkIn,     // part: its first byte reaches the rank
  kPartIn,     // part: all of it is there
};

// Simulated time is a whole number of picoseconds, so that the same input gives the same times
// everywhere.
using Ticks = int64_t;

constexpr double kTicksPerMicrosecond = 1e6;

Ticks ticks_of_us(double us) {
  return std::llround(us * kTicksPerMicrosecond);
}
double us_of_ticks(Ticks ticks) {
  return static_cast<double>(ticks) / kTicksPerMicrosecond;
}
// The time of so many bytes at a rate in GB/s (1e9).
Ticks ticks_of_bytes(int64_t bytes, double gbps) {
  return std::llround(static_cast<double>(bytes) * 1e3 / gbps);
}

struct Event {
  Ticks at = 0;
  uint64_t order = 0;  // of being added: breaks ties
  Step kind = {};
  uint32_t id = 0;

  // The last one comes first, as in a priority queue.
  bool operator<(const Event& other) const {
    return at != other.at ? at > other.at : order > other.order;
  }
};

// One server of a kind for each rank. Jobs are handed in by ascending time of being ready, so that
// "first come, first served" is a number for each server.
class Servers {
 public:
  explicit Servers(int num_ranks)
      : free_at_(static_cast<size_t>(num_ranks)), busy_(static_cast<size_t>(num_ranks)) {}

  // Returns when the job is done: not before `not_before`, which lets a job that is still coming in
  // occupy its receiver no longer than its bytes do.
  Ticks serve(int rank, Ticks ready, Ticks duration, Ticks not_before = 0) {
    const auto r = static_cast<size_t>(rank);
    const Ticks end = std::max(std::max(ready, free_at_[r]) + duration, not_before);
    free_at_[r] = end;
    busy_[r] += duration;
    return end;
  }
  [[nodiscard]] Ticks most_busy() const {
    return busy_.empty() ? 0 : *std::max_element(busy_.begin(), busy_.end());
  }

 private:
  std::vector<Ticks> free_at_;
  std::vector<Ticks> busy_;
};

// Common part of dispatch and combine: the servers of all ranks and the way of a chunk over the
// cards.
class ReplayMachine {
 public:
  ReplayMachine(
      const Scenario& scenario, const Model& model, const Schedule& schedule, bool is_back
  )
      : scenario_(scenario),
        schedule_(schedule),
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
  virtual ~ReplayMachine() = default;
  ReplayMachine(const ReplayMachine&) = delete;
  ReplayMachine& operator=(const ReplayMachine&) = delete;

  // Serves events until none is left.
  ReplayTimes run() {
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
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

 protected:
  virtual void handle(const Event& event) = 0;
  // All of a card chunk will be there: true if kArrived shall tell so, false if nothing that
  // depends on others' order follows from it.
  virtual bool needs_word_of(const Chunk& chunk, Ticks arrives) = 0;

  // Sends a chunk over the card: from the source to the target, or back.
  void send_over_card(uint32_t chunk, Ticks now) {
    const int from = sender(schedule_.card_chunks[chunk]);
    senders_[static_cast<size_t>(from)].waiting.push_back(chunk);
    post(from, now);
  }

  [[nodiscard]] int sender(const Chunk& chunk) const {
    return is_back_ ? chunk.target : chunk.source;
  }
  [[nodiscard]] int receiver(const Chunk& chunk) const {
    return is_back_ ? chunk.source : chunk.target;
  }

  // Out of `from`; its first byte is announced with kLinkIn, its last with kPartIn.
  // Returns when the last byte has left.
  Ticks send_over_link(int from, uint32_t id, Ticks now) {
    const Ticks duration = link_row_ * part(id).rows + link_signal_;
    const Ticks sent = link_out_.serve(from, now, duration);
    link_sent_[id] = sent;
    add_event(sent - duration + link_latency_, Step::kLinkIn, id);
    return sent;
  }

  void take_from_link(int to, uint32_t id, Ticks now) {
    const Ticks arrived =
        link_in_.serve(to, now, link_row_ * part(id).rows, link_sent_[id] + link_latency_);
    add_event(arrived, Step::kPartIn, id);
  }

  // Parts of card chunks first, then those of link chunks.
  [[nodiscard]] const Part& part(uint32_t id) const {
    return id < num_card_parts_ ? schedule_.card_parts[id]
                                : schedule_.link_parts[id - num_card_parts_];
  }
  [[nodiscard]] bool is_on_card(uint32_t part) const { return part < num_card_parts_; }
  [[nodiscard]] const Chunk& chunk_of(uint32_t id) const {
    return is_on_card(id) ? schedule_.card_chunks[part(id).chunk]
                          : schedule_.link_chunks[part(id).chunk];
  }
  // Returns the number of a link chunk's only part.
  [[nodiscard]] uint32_t only_part(const Chunk& chunk) const {
    return num_card_parts_ + chunk.first_part;
  }
  [[nodiscard]] bool is_replayed(int rank) const {
    return schedule_.is_replayed[static_cast<size_t>(scenario_.domain_of(rank))];
  }

  Ticks copy(int rank, int64_t rows, Ticks now) {
    return copies().serve(rank, now, copy_row_ * rows);
  }
  void is_done(Ticks at) { end_ = std::max(end_, at); }

  [[nodiscard]] const Scenario& scenario() const { return scenario_; }
  [[nodiscard]] const Schedule& schedule() const { return schedule_; }
  void add_event(Ticks at, Step step, uint32_t id) { events_.push({at, next_event_++, step, id}); }

 private:
  // Posts as many chunks as the window lets through; the proxies and the card take them one after
  // the other.
  void post(int rank, Ticks now) {
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
      add_event(sent - duration + card_latency_, Step::kCardIn, id);
    }
  }

  void confirm(const Chunk& chunk, Ticks now) {
    const int from = sender(chunk);
    senders_[static_cast<size_t>(from)].unconfirmed -= size_of(chunk).messages;
    post(from, now);
  }

  void card_in(uint32_t id, Ticks now) {
    const Chunk& chunk = schedule_.card_chunks[id];
    const Ticks duration = size_of(chunk).on_card;
    const Ticks arrived =
        card_in_.serve(receiver(chunk), now, duration, card_sent_[id] + card_latency_);
    if (needs_word_of(chunk, arrived)) {
      add_event(arrived, Step::kArrived, id);
    }
    add_event(arrived + card_latency_, Step::kConfirmed, id);
  }

  // Size of a chunk, by its rows.
  struct ChunkSize {
    int64_t messages = 0;
    Ticks on_card = 0;
  };
  [[nodiscard]] const ChunkSize& size_of(const Chunk& chunk) const {
    return sizes_[static_cast<size_t>(chunk.rows)];
  }
  Servers& copies() { return has_one_mover_ ? link_out_ : copies_; }

  struct Sender {
    std::deque<uint32_t> waiting;  // card chunks
    int64_t unconfirmed = 0;       // messages
  };

  const Scenario& scenario_;
  const Schedule& schedule_;
  std::priority_queue<Event> events_;
  uint64_t next_event_ = 0;
  uint32_t num_card_parts_;
  bool is_back_;
  bool has_one_mover_;
  int64_t window_;
  Ticks post_time_;
  Ticks link_row_;
  Ticks copy_row_;
  Ticks link_signal_;
  Ticks link_latency_;
  Ticks card_latency_;
  Servers link_out_;
  Servers link_in_;
  Servers copies_;
  Servers card_out_;
  Servers card_in_;
  Servers proxies_;
  std::vector<ChunkSize> sizes_;  // [kChunkArrivals + 1]
  std::vector<Sender> senders_;
  std::vector<Ticks> card_sent_;  // by card chunk: when its last byte left
  std::vector<Ticks> link_sent_;  // by part: likewise
  Ticks end_ = 0;
};

// Dispatch: a rank pushes its own domain's rows one chunk after the other, while its proxies send
// the others; what a forwarder takes in goes on over the links, behind what it is pushing.
class DispatchReplay final : public ReplayMachine {
 public:
  DispatchReplay(const Scenario& scenario, const Model& model, const Schedule& schedule)
      : ReplayMachine(scenario, model, schedule, false),
        next_(schedule.link_begin.begin(), schedule.link_begin.end()) {
    for (uint32_t chunk = 0; chunk < schedule.card_chunks.size(); ++chunk) {
      send_over_card(chunk, 0);
    }
    for (uint32_t rank = 0; rank + 1 < next_.size(); ++rank) {
      add_event(0, Step::kTurn, rank);
    }
  }

 private:
  void handle(const Event& event) override {
    switch (event.kind) {
      case Step::kTurn:
        push(static_cast<int>(event.id), event.at);
        break;
      case Step::kArrived:
        forward(schedule().card_chunks[event.id], event.at);
        break;
      case Step::kLinkIn:
        take_from_link(part(event.id).rank, event.id, event.at);
        break;
      default:  // kPartIn: the first slot of each row is filled, the others follow
        is_done(copy(part(event.id).rank, part(event.id).routes - part(event.id).rows, event.at));
        break;
    }
  }

  bool needs_word_of(const Chunk& chunk, Ticks arrives) override {
    is_done(arrives);
    return chunk.num_parts > 0;
  }

  void push(int rank, Ticks now) {
    const auto r = static_cast<size_t>(rank);
    if (next_[r] == schedule().link_begin[r + 1]) {
      return;
    }
    const Chunk& chunk = schedule().link_chunks[next_[r]++];
    const uint32_t id = only_part(chunk);
    Ticks through = now;
    if (chunk.target == rank) {
      is_done(copy(rank, part(id).routes, now));
    } else {
      through = send_over_link(rank, id, now);
    }
    add_event(through, Step::kTurn, static_cast<uint32_t>(rank));
  }

  // Sends a chunk's rows to all ranks of the target's domain that want them.
  void forward(const Chunk& chunk, Ticks now) {
    for (uint32_t p = chunk.first_part; p < chunk.first_part + chunk.num_parts; ++p) {
      if (part(p).rank == chunk.target) {
        // A forwarder's own rows lie in its staging, unless they came only for it.
        const int64_t copies = scenario().is_flat ? part(p).routes - part(p).rows : part(p).routes;
        is_done(copy(chunk.target, copies, now));
      } else {
        static_cast<void>(send_over_link(chunk.target, p, now));
      }
    }
  }

  std::vector<uint32_t> next_;  // by rank: of its link chunks
};

// Combine: a rank sums the rows of each Part and returns one row per arrival: to the token's rank
// if in its domain, else to the forwarder, which sums its domain's rows and sends one row back.
class CombineReplay final : public ReplayMachine {
 public:
  CombineReplay(
      const Scenario& scenario, const Model& model, const Schedule& schedule, const Traffic& traffic
  )
      : ReplayMachine(scenario, model, schedule, true),
        missing_(schedule.card_chunks.size()),
        parts_(static_cast<size_t>(scenario.num_ranks)),
        next_(parts_.size()) {
    list_parts();
    pace_other_domains(model, traffic);
    for (uint32_t rank = 0; rank < parts_.size(); ++rank) {
      add_event(0, Step::kTurn, rank);
    }
  }

 private:
  // Lists what each rank has to sum, in its order: by chunk, then by the token's rank, its own
  // last.
  void list_parts() {
    const auto add = [&](uint32_t id) { parts_[static_cast<size_t>(part(id).rank)].push_back(id); };
    for (uint32_t c = 0; c < schedule().card_chunks.size(); ++c) {
      const Chunk& chunk = schedule().card_chunks[c];
      missing_[c] = chunk.num_parts;
      for (uint32_t p = 0; p < chunk.num_parts; ++p) {
        add(chunk.first_part + p);
      }
    }
    for (const Chunk& chunk : schedule().link_chunks) {
      add(only_part(chunk));
    }
    for (size_t rank = 0; rank < parts_.size(); ++rank) {
      const auto turn = [&](uint32_t id) {
        const Chunk& chunk = chunk_of(id);
        const int step = steps_after(rank, chunk.source);
        return std::tuple(chunk.index, step == 0 ? scenario().num_ranks : step, id);
      };
      std::ranges::sort(parts_[rank], {}, turn);
    }
  }

  [[nodiscard]] int steps_after(size_t rank, int other) const {
    return (other - static_cast<int>(rank) + scenario().num_ranks) % scenario().num_ranks;
  }

  void pace_other_domains(const Model& model, const Traffic& traffic) {
    std::vector<std::vector<uint32_t>> sent(parts_.size());
    for (uint32_t c = 0; c < schedule().card_chunks.size(); ++c) {
      const int forwarder = schedule().card_chunks[c].target;
      if (!is_replayed(forwarder)) {
        sent[static_cast<size_t>(forwarder)].push_back(c);
      }
    }
    for (size_t forwarder = 0; forwarder < sent.size(); ++forwarder) {
      const auto turn = [&](uint32_t id) {
        const Chunk& chunk = schedule().card_chunks[id];
        return std::pair(chunk.index, steps_after(forwarder, chunk.source));
      };
      std::ranges::sort(sent[forwarder], {}, turn);
      const double load = domain_load_us(scenario(), model, traffic.ranks[forwarder]);
      for (size_t i = 0; i < sent[forwarder].size(); ++i) {
        const double share =
            static_cast<double>(i + 1) / static_cast<double>(sent[forwarder].size());
        add_event(ticks_of_us(load * share), Step::kReady, sent[forwarder][i]);
      }
    }
  }

  void handle(const Event& event) override {
    switch (event.kind) {
      case Step::kTurn:
        reduce(static_cast<int>(event.id), event.at);
        break;
      case Step::kLinkOut:
        static_cast<void>(send_over_link(part(event.id).rank, event.id, event.at));
        break;
      case Step::kLinkIn:
        take_from_link(goal(event.id), event.id, event.at);
        break;
      case Step::kPartIn:
        part_is_there(event.id, event.at);
        break;
      case Step::kReady:
        send_over_card(event.id, event.at);
        break;
      default:  // kArrived
        sum(schedule().card_chunks[event.id].source, schedule().card_chunks[event.id].rows, event.at
        );
        break;
    }
  }

  // Elsewhere nothing but these sums occupies a rank.
  bool needs_word_of(const Chunk& chunk, Ticks arrives) override {
    const bool is_shared = is_replayed(chunk.source);
    if (!is_shared) {
      sum(chunk.source, chunk.rows, arrives);
    }
    return is_shared;
  }

  // Returns the rank to which a part's partial sums go over the links.
  [[nodiscard]] int goal(uint32_t id) const {
    return is_on_card(id) ? chunk_of(id).target : chunk_of(id).source;
  }

  void reduce(int rank, Ticks now) {
    const auto r = static_cast<size_t>(rank);
    if (next_[r] == parts_[r].size()) {
      return;
    }
    const uint32_t id = parts_[r][next_[r]++];
    const Ticks summed = copy(rank, part(id).routes, now);
    add_event(summed, goal(id) == rank ? Step::kPartIn : Step::kLinkOut, id);
    add_event(summed, Step::kTurn, static_cast<uint32_t>(rank));
  }

  void part_is_there(uint32_t id, Ticks now) {
    const Chunk& chunk = chunk_of(id);
    if (!is_on_card(id)) {
      // A rank's own rows were summed where they lie.
      sum(chunk.source, part(id).rank == chunk.source ? 0 : part(id).rows, now);
      return;
    }
    uint32_t& missing = missing_[part(id).chunk];
    if (--missing == 0) {
      int64_t rows = 0;
      for (const Part& one : schedule().parts_of(chunk)) {
        rows += one.rows;
      }
      const bool is_single = chunk.num_parts == 1 && part(id).rank == chunk.target;
      const Ticks ready = copy(chunk.target, is_single ? 0 : rows, now);
      add_event(ready, Step::kReady, part(id).chunk);
    }
  }

  void sum(int rank, int64_t rows, Ticks now) { is_done(copy(rank, rows, now)); }

  std::vector<uint32_t> missing_;             // by card chunk: parts still to come
  std::vector<std::vector<uint32_t>> parts_;  // by rank
  std::vector<size_t> next_;                  // by rank: of its parts
};

}  // namespace

std::string_view ReplayTimes::bound() const {
  const std::array<std::pair<double, std::string_view>, 4> kinds = {{
      {busy.link_us, "links"},
      {busy.card_us, "cards"},
      {busy.proxy_us, "proxies"},
      {busy.copy_us, "copies"},
  }};
  const auto longest =
      std::ranges::max_element(kinds, {}, [](const auto& kind) { return kind.first; });
  return longest->second;
}

double domain_load_us(const Scenario& scenario, const Model& model, const RankTraffic& rank) {
  const auto us = [&](int64_t rows, double gbps) {
    return static_cast<double>(rows * scenario.row_bytes) / gbps / 1e3;
  };
  const double links = us(std::max(rank.link_out, rank.link_in), model.link_gbps);
  const double copies = us(rank.routes, model.copy_gbps);
  return model.one_mover != 0 ? links + copies : std::max(links, copies);
}

ReplayTimes replay_dispatch(
    const Scenario& scenario, const Model& model, const Schedule& schedule
) {
  return DispatchReplay(scenario, model, schedule).run();
}

ReplayTimes replay_combine(
    const Scenario& scenario, const Model& model, const Schedule& schedule, const Traffic& traffic
) {
  return CombineReplay(scenario, model, schedule, traffic).run();
}

}  // namespace weft::sim
