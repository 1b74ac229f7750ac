// SPDX-License-Identifier: Apache-2.0
// Dispatch: a rank pushes its own domain's rows one chunk after the other, while its proxies send
// the others; what a carrier takes in goes on over the links, behind what it is pushing.
#include "simulate/replay_machine.hpp"

namespace weft::sim {
namespace {

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

  ReplayTimes times() { return run(); }

 private:
  void handle(const Event<Step>& event) override {
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

  // To all ranks of the target's domain that want these rows.
  void forward(const Chunk& chunk, Ticks now) {
    for (uint32_t p = chunk.first_part; p < chunk.first_part + chunk.num_parts; ++p) {
      if (part(p).rank == chunk.target) {
        // A carrier's own rows lie in its staging, unless they came for it alone.
        const int64_t copies = scenario().is_flat ? part(p).routes - part(p).rows : part(p).routes;
        is_done(copy(chunk.target, copies, now));
      } else {
        static_cast<void>(send_over_link(chunk.target, p, now));
      }
    }
  }

  std::vector<uint32_t> next_;  // by rank: of its link chunks
};

}  // namespace

ReplayTimes replay_dispatch(
    const Scenario& scenario, const Model& model, const Schedule& schedule
) {
  return DispatchReplay(scenario, model, schedule).times();
}

}  // namespace weft::sim
