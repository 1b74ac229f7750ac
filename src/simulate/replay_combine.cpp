// SPDX-License-Identifier: Apache-2.0
// Combine: a rank sums the rows of each part and returns one row per arrival, to the token's rank
// inside the domain, else to the carrier, which sums what its domain has and sends one row back.
#include <algorithm>
#include <tuple>

#include "simulate/replay_machine.hpp"

namespace weft::sim {
namespace {

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

  ReplayTimes times() { return run(); }

 private:
  // What each rank has to sum, in its order: by chunk, then by the token's rank, its own last.
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
        const int step =
            (chunk.source - static_cast<int>(rank) + scenario().num_ranks) % scenario().num_ranks;
        return std::tuple(chunk.index, step == 0 ? scenario().num_ranks : step, id);
      };
      std::ranges::sort(parts_[rank], {}, turn);
    }
  }

  void pace_other_domains(const Model& model, const Traffic& traffic) {
    std::vector<std::vector<uint32_t>> sent(parts_.size());
    for (uint32_t c = 0; c < schedule().card_chunks.size(); ++c) {
      const int carrier = schedule().card_chunks[c].target;
      if (!is_replayed(carrier)) {
        sent[static_cast<size_t>(carrier)].push_back(c);
      }
    }
    for (size_t carrier = 0; carrier < sent.size(); ++carrier) {
      const auto turn = [&](uint32_t id) {
        const Chunk& chunk = schedule().card_chunks[id];
        const int step = (chunk.source - static_cast<int>(carrier) + scenario().num_ranks) %
                         scenario().num_ranks;
        return std::pair(chunk.index, step);
      };
      std::ranges::sort(sent[carrier], {}, turn);
      const double load = domain_load_us(scenario(), model, traffic.ranks[carrier]);
      for (size_t i = 0; i < sent[carrier].size(); ++i) {
        const double share = static_cast<double>(i + 1) / static_cast<double>(sent[carrier].size());
        const Ticks ready = ticks_of_us(load * share);
        add_in_turn(Turn::kReady, static_cast<int>(carrier), ready, Step::kReady, sent[carrier][i]);
      }
    }
  }

  void handle(const Event<Step>& event) override {
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

  // Where a part's partial sums go over the links.
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
    if (goal(id) == rank) {
      add_event(summed, Step::kPartIn, id);
    } else {
      add_event(summed, Step::kLinkOut, id);
    }
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

ReplayTimes replay_combine(
    const Scenario& scenario, const Model& model, const Schedule& schedule, const Traffic& traffic
) {
  return CombineReplay(scenario, model, schedule, traffic).times();
}

}  // namespace weft::sim
