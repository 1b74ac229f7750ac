// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cpu/protocol/region_map.hpp"
#include "simulate/replay.hpp"

namespace weft::sim {
namespace {

// A row takes one way out of its source: over the links to a rank of its own domain, or over the
// card to the target that stands for a remote domain (flat: for itself).
class SourceChunks {
 public:
  SourceChunks(const Scenario& scenario, Schedule& schedule)
      : scenario_(scenario),
        schedule_(schedule),
        rows_(static_cast<size_t>(scenario.num_ranks)),
        arrivals_(rows_.size()),
        routes_(rows_.size()),
        num_chunks_(rows_.size()),
        seen_(rows_.size(), -1),
        way_seen_(rows_.size(), -1) {}

  // All chunks of `source`, in order of sending, to the end of the schedule's lists.
  void add(int source, const RouteTable& table) {
    source_ = source;
    first_card_ = schedule_.card_chunks.size();
    first_link_ = schedule_.link_chunks.size();
    std::ranges::fill(num_chunks_, 0);
    for (int64_t token = 0; token < table.num_tokens; ++token, ++stamp_) {
      add_token(table, token);
    }
    for (int target = 0; target < scenario_.num_ranks; ++target) {
      close(target);
    }
    sort_by_turn(schedule_.card_chunks, schedule_.card_parts, first_card_);
    sort_by_turn(schedule_.link_chunks, schedule_.link_parts, first_link_);
  }

 private:
  [[nodiscard]] bool is_remote(int to) const {
    return scenario_.domain_of(to) != scenario_.domain_of(source_);
  }
  [[nodiscard]] bool is_replayed(int to) const {
    return schedule_.is_replayed[static_cast<size_t>(scenario_.domain_of(to))];
  }
  [[nodiscard]] int target_for(int to) const {
    return is_remote(to) && !scenario_.is_flat
               ? scenario_.forwarder(source_, scenario_.domain_of(to))
               : to;
  }

  void add_token(const RouteTable& table, int64_t token) {
    const auto topk = static_cast<size_t>(table.topk);
    const auto experts = std::span(table.expert).subspan(static_cast<size_t>(token) * topk, topk);
    full_.clear();
    for (const int32_t expert : experts) {
      if (expert < 0) {
        continue;
      }
      const int to = scenario_.owner_of(expert);
      const int target = target_for(to);
      if (way_seen_[static_cast<size_t>(target)] != stamp_) {
        way_seen_[static_cast<size_t>(target)] = stamp_;
        if (++rows_[static_cast<size_t>(target)] == kChunkArrivals) {
          full_.push_back(target);
        }
      }
      arrivals_[static_cast<size_t>(to)] += seen_[static_cast<size_t>(to)] != stamp_ ? 1 : 0;
      seen_[static_cast<size_t>(to)] = stamp_;
      ++routes_[static_cast<size_t>(to)];
    }
    for (const int target : full_) {
      close(target);
    }
  }

  // Ends the target's chunk, if it holds anything.
  void close(int target) {
    const auto t = static_cast<size_t>(target);
    if (rows_[t] == 0) {
      return;
    }
    const bool is_on_card = is_remote(target);
    auto& chunks = is_on_card ? schedule_.card_chunks : schedule_.link_chunks;
    auto& parts = is_on_card ? schedule_.card_parts : schedule_.link_parts;
    const bool is_detailed = is_replayed(target);
    if (is_detailed || is_on_card) {
      chunks.push_back(
          {.source = source_,
           .target = target,
           .index = num_chunks_[t],
           .rows = rows_[t],
           .first_part = static_cast<uint32_t>(parts.size())}
      );
    }
    const bool has_many = is_on_card && !scenario_.is_flat;
    const int domain_begin = scenario_.domain_of(target) * scenario_.ranks_per_domain;
    const int begin = has_many ? domain_begin : target;
    const int end = has_many ? domain_begin + scenario_.ranks_per_domain : target + 1;
    for (int to = begin; to < end; ++to) {
      const auto r = static_cast<size_t>(to);
      if (arrivals_[r] > 0 && is_detailed) {
        parts.push_back({.rank = to, .rows = arrivals_[r], .routes = routes_[r]});
        ++chunks.back().num_parts;
      }
      arrivals_[r] = 0;
      routes_[r] = 0;
    }
    ++num_chunks_[t];
    rows_[t] = 0;
  }

  // Parts stay where they are and learn their chunk's new place.
  void sort_by_turn(std::vector<Chunk>& chunks, std::vector<Part>& parts, size_t first) const {
    const auto turn = [&](const Chunk& chunk) {
      const int step = (chunk.target - source_ + scenario_.num_ranks) % scenario_.num_ranks;
      return std::pair(chunk.index, step == 0 ? scenario_.num_ranks : step);  // itself last
    };
    std::sort(
        chunks.begin() + static_cast<std::ptrdiff_t>(first),
        chunks.end(),
        [&](const Chunk& a, const Chunk& b) { return turn(a) < turn(b); }
    );
    for (size_t c = first; c < chunks.size(); ++c) {
      for (uint32_t p = 0; p < chunks[c].num_parts; ++p) {
        parts[chunks[c].first_part + p].chunk = static_cast<uint32_t>(c);
      }
    }
  }

  const Scenario& scenario_;
  Schedule& schedule_;
  int source_ = 0;
  size_t first_card_ = 0;
  size_t first_link_ = 0;
  std::vector<int32_t> rows_;        // by target: of its open chunk
  std::vector<int32_t> arrivals_;    // by rank: in the open chunk of its target
  std::vector<int32_t> routes_;      // likewise
  std::vector<int32_t> num_chunks_;  // by target: closed ones
  std::vector<int64_t> seen_;        // by rank: last token that goes there
  std::vector<int64_t> way_seen_;    // by target
  std::vector<int> full_;
  int64_t stamp_ = 0;
};

}  // namespace

Schedule make_schedule(
    const Scenario& scenario,
    const Traffic& traffic,
    std::span<const RouteTable> routes,
    std::vector<bool> is_replayed
) {
  Schedule schedule;
  schedule.is_replayed = std::move(is_replayed);
  int64_t most = 0;
  for (const RankTraffic& rank : traffic.ranks) {
    most += rank.card_out / kChunkArrivals;
  }
  schedule.card_chunks.reserve(static_cast<size_t>(most));
  SourceChunks chunks(scenario, schedule);
  for (int source = 0; source < scenario.num_ranks; ++source) {
    schedule.link_begin.push_back(static_cast<uint32_t>(schedule.link_chunks.size()));
    chunks.add(source, routes[static_cast<size_t>(source)]);
  }
  schedule.link_begin.push_back(static_cast<uint32_t>(schedule.link_chunks.size()));
  return schedule;
}

}  // namespace weft::sim
