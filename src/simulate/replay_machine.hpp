// SPDX-License-Identifier: Apache-2.0
// What dispatch and combine share: the servers of all ranks and the way of a chunk over the cards.
#pragma once

#include <deque>
#include <vector>

#include "simulate/replay.hpp"
#include "simulate/replay_clock.hpp"

namespace weft::sim {

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

class ReplayMachine {
 public:
  ReplayMachine(
      const Scenario& scenario, const Model& model, const Schedule& schedule, bool is_back
  );
  virtual ~ReplayMachine() = default;
  ReplayMachine(const ReplayMachine&) = delete;
  ReplayMachine& operator=(const ReplayMachine&) = delete;

 protected:
  // Serves events until none is left.
  ReplayTimes run();
  virtual void handle(const Event<Step>& event) = 0;
  // All of a card chunk will be there: true if kArrived shall tell so, false if nothing that
  // depends on others' order follows from it.
  virtual bool needs_word_of(const Chunk& chunk, Ticks arrives) = 0;

  // Over the card: from the source to the target, or back.
  void send_over_card(uint32_t chunk, Ticks now);
  [[nodiscard]] int sender(const Chunk& chunk) const {
    return is_back_ ? chunk.target : chunk.source;
  }
  [[nodiscard]] int receiver(const Chunk& chunk) const {
    return is_back_ ? chunk.source : chunk.target;
  }

  // Out of `from`; its first byte is announced with kLinkIn, its last with kPartIn.
  // Returns when the last byte has left.
  Ticks send_over_link(int from, uint32_t part, Ticks now);
  void take_from_link(int to, uint32_t part, Ticks now);

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
  // Of a link chunk, which has one part.
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
  // Streams of events: a kind of step, and the rank that takes it in turn.
  enum class Turn : uint32_t { kCardIn, kArrived, kConfirmed, kLinkIn, kPartIn, kReady, kCount };
  void add_in_turn(Turn turn, int rank, Ticks at, Step step, uint32_t id) {
    const auto ranks = static_cast<size_t>(scenario_.num_ranks);
    events_.add_to_stream(
        static_cast<size_t>(turn) * ranks + static_cast<size_t>(rank), at, step, id
    );
  }
  void add_event(Ticks at, Step step, uint32_t id) { events_.add(at, step, id); }

 private:
  void post(int rank, Ticks now);
  void card_in(uint32_t chunk, Ticks now);
  void confirm(const Chunk& chunk, Ticks now);
  // By its rows.
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
  EventQueue<Step> events_;
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

}  // namespace weft::sim
