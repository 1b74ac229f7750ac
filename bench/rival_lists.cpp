// SPDX-License-Identifier: Apache-2.0
#include "rival_lists.hpp"

#include <algorithm>
#include <cstddef>

#include "plan/slots.hpp"

namespace weft::bench {
namespace {

size_t at(int64_t index) {
  return static_cast<size_t>(index);
}

// Counts of routes and what follows from them for all ranks.
struct Counts {
  int num_ranks = 0;
  int num_experts = 0;
  std::vector<int64_t> routes;        // [num_ranks, num_experts]
  std::vector<int64_t> expert_begin;  // [num_experts] first slot on its rank
  std::vector<int64_t> num_rows;      // [num_ranks] padded

  [[nodiscard]] int per_rank() const { return num_experts / num_ranks; }
  [[nodiscard]] int64_t of(int rank, int expert) const {
    return routes[at(int64_t{rank} * num_experts + expert)];
  }
  // Routes of a rank to experts [first, last).
  [[nodiscard]] int64_t of(int rank, int first, int last) const {
    int64_t sum = 0;
    for (int expert = first; expert < last; ++expert) {
      sum += of(rank, expert);
    }
    return sum;
  }
  // First slot of one source's routes to an expert.
  [[nodiscard]] int64_t slot_begin(int source, int expert) const {
    int64_t slot = expert_begin[at(expert)];
    for (int rank = 0; rank < source; ++rank) {
      slot += of(rank, expert);
    }
    return slot;
  }
};

Counts count(const RivalCase& shape, std::span<const RouteTable> routes) {
  Counts counts;
  counts.num_ranks = shape.num_ranks;
  counts.num_experts = shape.num_experts;
  counts.routes.resize(at(int64_t{shape.num_ranks} * shape.num_experts));
  counts.num_rows.resize(at(shape.num_ranks));
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    for (const int32_t expert : routes[at(rank)].expert) {
      if (expert >= 0) {
        ++counts.routes[at(int64_t{rank} * shape.num_experts + expert)];
      }
    }
  }
  for (int expert = 0; expert < shape.num_experts; ++expert) {
    int64_t& rows = counts.num_rows[at(owner_rank(expert, counts.per_rank()))];
    counts.expert_begin.push_back(rows);
    int64_t received = 0;
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      received += counts.of(rank, expert);
    }
    rows += padded_count(received, shape.pad_multiple);
  }
  return counts;
}

// Numbers each rank's routes inside their expert and starts from `begin(rank, expert)`.
template <class Begin>
std::vector<std::vector<int32_t>> number_routes(
    const Counts& counts, std::span<const RouteTable> routes, const Begin& begin
) {
  std::vector<std::vector<int32_t>> places;
  for (int rank = 0; rank < counts.num_ranks; ++rank) {
    std::vector<int64_t> next;
    for (int expert = 0; expert < counts.num_experts; ++expert) {
      next.push_back(begin(rank, expert));
    }
    auto& mine = places.emplace_back();
    for (const int32_t expert : routes[at(rank)].expert) {
      mine.push_back(expert < 0 ? -1 : static_cast<int32_t>(next[at(expert)]++));
    }
  }
  return places;
}

RowLists padding_of(
    const SlotTable& slots, const RivalCase& shape, int receiver, std::span<const RouteTable> routes
) {
  std::vector<bool> is_used(at(slots.num_rows[at(receiver)]));
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    const auto& expert = routes[at(rank)].expert;
    for (size_t i = 0; i < expert.size(); ++i) {
      if (expert[i] >= 0 &&
          owner_rank(expert[i], shape.num_experts / shape.num_ranks) == receiver) {
        is_used[at(slots.slot[at(rank)][i])] = true;
      }
    }
  }
  RowLists padding;
  for (size_t row = 0; row < is_used.size(); ++row) {
    if (!is_used[row]) {
      padding.rows.push_back(static_cast<int32_t>(row));
    }
  }
  return padding;
}

// Blocks of sent and received rows, one per pair, from rows[source][receiver].
void add_messages(std::vector<RivalLists>& lists, const std::vector<std::vector<int64_t>>& rows) {
  const int num_ranks = static_cast<int>(lists.size());
  for (int source = 0; source < num_ranks; ++source) {
    for (int receiver = 0; receiver < num_ranks; ++receiver) {
      const int64_t num_rows = rows[at(source)][at(receiver)];
      lists[at(source)].outgoing.push_back({receiver, lists[at(source)].num_sent, num_rows});
      lists[at(receiver)].incoming.push_back({source, lists[at(receiver)].num_received, num_rows});
      lists[at(source)].num_sent += num_rows;
      lists[at(receiver)].num_received += num_rows;
    }
  }
}

void fill_per_route(
    std::vector<RivalLists>& lists, const Counts& counts, std::span<const RouteTable> routes
) {
  const int per_rank = counts.per_rank();
  std::vector<std::vector<int64_t>> rows(at(counts.num_ranks));
  for (int source = 0; source < counts.num_ranks; ++source) {
    for (int receiver = 0; receiver < counts.num_ranks; ++receiver) {
      rows[at(source)].push_back(counts.of(source, receiver * per_rank, (receiver + 1) * per_rank));
    }
  }
  add_messages(lists, rows);
  const auto sent = number_routes(counts, routes, [&](int rank, int expert) {
    return counts.of(rank, 0, expert);
  });
  for (int rank = 0; rank < counts.num_ranks; ++rank) {
    RivalLists& mine = lists[at(rank)];
    mine.permute = {routes[at(rank)].topk, sent[at(rank)]};
    for (const Message& message : mine.incoming) {
      for (int expert = rank * per_rank; expert < (rank + 1) * per_rank; ++expert) {
        const int64_t slot = counts.slot_begin(message.peer, expert);
        for (int64_t i = 0; i < counts.of(message.peer, expert); ++i) {
          mine.place.rows.push_back(static_cast<int32_t>(slot + i));
        }
      }
    }
  }
}

// Cuts the pair's message into one per expert; the receiver has it in its final place.
void cut_by_expert(std::vector<RivalLists>& lists, const Counts& counts) {
  for (int rank = 0; rank < counts.num_ranks; ++rank) {
    RivalLists& mine = lists[at(rank)];
    mine.outgoing.clear();
    mine.incoming.clear();
    mine.place.rows.clear();
    int64_t sent = 0;
    for (int expert = 0; expert < counts.num_experts; ++expert) {
      const int64_t num_rows = counts.of(rank, expert);
      mine.outgoing.push_back({owner_rank(expert, counts.per_rank()), sent, num_rows});
      sent += num_rows;
    }
    for (int source = 0; source < counts.num_ranks; ++source) {
      for (int i = 0; i < counts.per_rank(); ++i) {
        const int expert = rank * counts.per_rank() + i;
        mine.incoming.push_back(
            {source, counts.slot_begin(source, expert), counts.of(source, expert)}
        );
      }
    }
  }
}

void fill_per_rank(
    std::vector<RivalLists>& lists,
    const RivalCase& shape,
    const SlotTable& slots,
    std::span<const RouteTable> routes
) {
  const int num_ranks = shape.num_ranks;
  const int width = std::min(shape.topk, num_ranks);
  std::vector<std::vector<int64_t>> rows(at(num_ranks), std::vector<int64_t>(at(num_ranks), 0));
  // Slots of each arrival, by [source][receiver], -1 filled up to topk.
  std::vector<std::vector<RowLists>> arrivals(
      at(num_ranks), std::vector<RowLists>(at(num_ranks), RowLists{shape.topk, {}})
  );
  std::vector<RowLists> sent(at(num_ranks), RowLists{width, {}});  // number in the pair so far
  std::vector<std::vector<int32_t>> receivers(at(num_ranks));      // beside `sent`
  for (int source = 0; source < num_ranks; ++source) {
    const RouteTable& table = routes[at(source)];
    for (int64_t token = 0; token < table.num_tokens; ++token) {
      for (int receiver = 0; receiver < num_ranks; ++receiver) {
        std::vector<int32_t> mine;
        for (int64_t i = token * table.topk; i < (token + 1) * table.topk; ++i) {
          const int32_t expert = table.expert[at(i)];
          if (expert >= 0 && owner_rank(expert, shape.num_experts / num_ranks) == receiver) {
            mine.push_back(slots.slot[at(source)][at(i)]);
          }
        }
        if (mine.empty()) {
          continue;
        }
        std::ranges::sort(mine);
        mine.resize(at(shape.topk), -1);
        auto& list = arrivals[at(source)][at(receiver)].rows;
        list.insert(list.end(), mine.begin(), mine.end());
        sent[at(source)].rows.push_back(static_cast<int32_t>(rows[at(source)][at(receiver)]++));
        receivers[at(source)].push_back(receiver);
      }
      sent[at(source)].rows.resize(at((token + 1) * width), -1);
      receivers[at(source)].resize(at((token + 1) * width), -1);
    }
  }
  add_messages(lists, rows);
  for (int rank = 0; rank < num_ranks; ++rank) {
    RivalLists& mine = lists[at(rank)];
    mine.permute = sent[at(rank)];
    for (size_t i = 0; i < mine.permute.rows.size(); ++i) {
      if (const int32_t receiver = receivers[at(rank)][i]; receiver >= 0) {
        mine.permute.rows[i] += static_cast<int32_t>(mine.outgoing[at(receiver)].row);
      }
    }
    mine.place.width = shape.topk;
    for (int source = 0; source < num_ranks; ++source) {
      const auto& list = arrivals[at(source)][at(rank)].rows;
      mine.place.rows.insert(mine.place.rows.end(), list.begin(), list.end());
    }
  }
}

}  // namespace

int64_t RowLists::num_entries() const {
  return std::ranges::count_if(rows, [](int32_t row) { return row >= 0; });
}

SlotTable make_slots(const RivalCase& shape, std::span<const RouteTable> routes) {
  const Counts counts = count(shape, routes);
  return {
      number_routes(
          counts, routes, [&](int rank, int expert) { return counts.slot_begin(rank, expert); }
      ),
      counts.num_rows};
}

std::vector<RivalLists> make_lists(
    const RivalCase& shape, std::span<const RouteTable> routes, RivalWay way
) {
  const Counts counts = count(shape, routes);
  const SlotTable slots = make_slots(shape, routes);
  std::vector<RivalLists> lists(at(shape.num_ranks));
  if (way == RivalWay::kPerRank) {
    fill_per_rank(lists, shape, slots, routes);
  } else {
    fill_per_route(lists, counts, routes);
  }
  if (way == RivalWay::kPerExpert) {
    cut_by_expert(lists, counts);
  }
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    lists[at(rank)].num_rows = slots.num_rows[at(rank)];
    lists[at(rank)].padding = padding_of(slots, shape, rank, routes);
  }
  return lists;
}

}  // namespace weft::bench
