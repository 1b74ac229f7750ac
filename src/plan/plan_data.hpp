// SPDX-License-Identifier: Apache-2.0
// The contents of a Plan: what executors and transports follow. Only src/plan knows how a layout
// turns into slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "weft/plan.hpp"

namespace weft {

// The arrivals of one (source, receiver) pair, in token order. Both ends hold an equal copy.
//
//   arrival i: token[i], routes route_begin[i] .. route_begin[i + 1], each with its slot on the
//   receiver, its k at the source and its local expert on the receiver. Routes are in ascending
//   slot order (equal slots: ascending k), which is the order of combine's sum. An arrival all of
//   whose routes were dropped is not listed.
struct Arrivals {
  bool one_row = false;              // kRankMajor: all routes of an arrival share one row
  std::vector<int32_t> token;        // [num_arrivals] on the source
  std::vector<int32_t> route_begin;  // [num_arrivals + 1]
  std::vector<int32_t> slot;         // [num_routes]
  std::vector<int32_t> k;            // [num_routes]
  std::vector<int32_t> expert;       // [num_routes]
  std::vector<float> weight;         // [num_routes], or empty if the routing carried none

  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(token.size()); }
  [[nodiscard]] int64_t num_routes() const { return static_cast<int64_t>(slot.size()); }
  // Rows of arrival i in the receiver's output, ascending; the first is the primary one.
  [[nodiscard]] std::span<const int32_t> slots(int64_t i) const {
    const auto first = static_cast<size_t>(route_begin[static_cast<size_t>(i)]);
    const auto last = static_cast<size_t>(route_begin[static_cast<size_t>(i) + 1]);
    return {slot.data() + first, one_row ? 1 : last - first};
  }
  friend bool operator==(const Arrivals& a, const Arrivals& b);  // weights by their bits
};

// The inter-node tokens of one source to one domain (find_crossings in domain_traffic.hpp).
struct Crossings {
  size_t num_members = 0;        // ranks of the domain
  std::vector<int32_t> token;    // [num_crossings] ascending
  std::vector<int32_t> arrival;  // [num_crossings, num_members] in the pair with that member, or -1
  std::vector<std::vector<int32_t>> crossing;  // [num_members][arrivals of that pair]

  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(token.size()); }
  [[nodiscard]] int32_t arrival_at(int64_t i, size_t member) const {
    return arrival[static_cast<size_t>(i) * num_members + member];
  }
};

// Arrival of a token: number `index` of the pair (this rank, rank).
struct TokenArrival {
  int32_t rank = 0;
  int32_t index = 0;
  friend bool operator==(const TokenArrival&, const TokenArrival&) = default;
};

struct PlanShape {
  int rank = 0;
  int num_ranks = 1;
  int num_experts = 0;  // physical ones, where there are replicas
  int topk = 0;
  int64_t num_tokens = 0;
  bool from_map = false;
  bool has_weights = false;
  // expert_stride and the placement of replicas resolved, row_budget as given
  PlanOptions options = {};
  std::vector<int> lost = {};  // ranks that took no part, ascending

  [[nodiscard]] int num_local_experts() const { return num_experts / num_ranks; }
  // Experts that tokens choose among.
  [[nodiscard]] int num_chosen_experts() const {
    return num_experts - num_ranks * options.balance.replicas;
  }
  friend bool operator==(const PlanShape&, const PlanShape&) = default;
};

// Returns the expert whose rows a physical expert has; some are there.
[[nodiscard]] inline int32_t expert_of(const PlanShape& shape, int32_t physical) {
  const int32_t replicas = shape.options.balance.replicas;
  const int32_t rank = physical / shape.num_local_experts();
  const int32_t place = physical - (rank + 1) * (shape.num_local_experts() - replicas) -
                        rank * replicas;  // from the rank's first replica
  const int32_t replica = rank * replicas + place;
  return place < 0 ? physical - rank * replicas
                   : shape.options.balance.placement[static_cast<size_t>(replica)];
}

// Returns whether combine adds up arrival i of a pair where its rows are and returns the sum. With
// SumOrder::kTopk it does so only where these are all rows that a token can have.
[[nodiscard]] inline bool returns_sum(const PlanShape& shape, const Arrivals& pair, int64_t i) {
  const auto a = static_cast<size_t>(i);
  return shape.options.order == SumOrder::kRank ||
         pair.route_begin[a + 1] - pair.route_begin[a] == shape.topk;
}
// Rows that combine returns for arrival i.
[[nodiscard]] inline int64_t returned_rows(
    const PlanShape& shape, const Arrivals& pair, int64_t i
) {
  const auto a = static_cast<size_t>(i);
  return returns_sum(shape, pair, i) ? 1 : pair.route_begin[a + 1] - pair.route_begin[a];
}
// Makes a pair without arrivals.
[[nodiscard]] inline Arrivals no_arrivals(const PlanShape& shape) {
  Arrivals none;
  none.one_row = shape.options.layout == Layout::kRankMajor;
  none.route_begin = {0};
  return none;
}
// Rows that all arrivals of a pair return.
[[nodiscard]] int64_t num_returned_rows(const PlanShape& shape, const Arrivals& pair);

struct PlanData;
struct DomainTraffic;  // domain_traffic.hpp

// A plan whose contents lie on a GPU.
class DevicePlan {
 public:
  virtual ~DevicePlan() = default;
  // Returns the plan, copied on first use. Waits for the GPU; any thread.
  [[nodiscard]] virtual const PlanData& on_host() const = 0;
  // Returns the part of PlanData::has_output_shape, copied likewise; perhaps more.
  [[nodiscard]] virtual const PlanData& shape_on_host() const = 0;
  [[nodiscard]] virtual Plan::OnDevice on_device() const = 0;
};

struct PlanData {
  PlanShape shape;
  std::shared_ptr<DevicePlan> device;  // null: everything is below
  // Beside `device`: the first block below is filled in, and the placement of replicas is known.
  bool has_output_shape = true;
  // Arrivals to and from each rank, dropped ones included: [num_ranks] beside `device`; empty:
  // known only there.
  std::vector<int32_t> num_sent;
  std::vector<int32_t> num_received;
  uint64_t exchange_id = 0;  // which exchange made it; 0: a file or a test did
  uint64_t call = 0;         // number of the call that made it, the same on every rank

  // The receiver's output.
  int64_t num_rows = 0;
  int64_t required_rows = 0;
  bool overflow = false;
  std::vector<int64_t> rows_per_expert;         // [num_local_experts]
  std::vector<int64_t> padded_rows_per_expert;  // [num_local_experts]
  std::vector<int64_t> expert_begin;            // [num_local_experts]
  std::vector<int32_t> row_experts;             // [num_rows, topk], kRankMajor only
  std::vector<int64_t> global_routes;           // [num_experts]

  // The source's routes, in (token, k) order; a map's routes are its set experts, ascending, then
  // -1.
  std::vector<int32_t> route_expert;  // [num_tokens, topk], -1 = none
  std::vector<int32_t> route_slot;    // [num_tokens, topk], -1 = none or dropped

  std::vector<Arrivals> sent;      // [num_ranks] from this rank
  std::vector<Arrivals> received;  // [num_ranks] to this rank

  // Arrivals of each of this rank's tokens, ascending rank: the order of combine's sum.
  std::vector<int32_t> token_begin;  // [num_tokens + 1]
  std::vector<TokenArrival> token_arrivals;

  // Rows of this rank's output that are padding, as [begin, end) pairs in order; kept rows and
  // slack are elsewhere.
  std::vector<std::pair<int64_t, int64_t>> padding;

  // Null in a group of one domain, and in a plan that no exchange made.
  std::shared_ptr<const DomainTraffic> between;

  // All but exchange_id, call, num_sent, num_received and between.
  friend bool operator==(const PlanData& a, const PlanData& b);
};

// Everything that a plan holds; the first call copies a GPU's plan to the host and waits for that.
[[nodiscard]] const PlanData& contents_of(const Plan& plan);
// The part known without a copy: the shape and num_rows.
[[nodiscard]] const PlanData& header_of(const Plan& plan);

// Rows of this rank's output that carry a token.
[[nodiscard]] int64_t num_used_rows(const PlanData& plan);
// Calls visit(row, source rank, token there) for each used row.
template <class Visit>
void for_each_row(const PlanData& plan, const Visit& visit) {
  for (size_t source = 0; source < plan.received.size(); ++source) {
    const Arrivals& pair = plan.received[source];
    for (int64_t i = 0; i < pair.size(); ++i) {
      for (const int32_t row : pair.slots(i)) {
        visit(row, static_cast<int32_t>(source), pair.token[static_cast<size_t>(i)]);
      }
    }
  }
}

// Calls visit(row, k at the source, expert on this rank) for each kept route.
template <class Visit>
void for_each_route(const PlanData& plan, const Visit& visit) {
  for (const Arrivals& pair : plan.received) {
    for (size_t i = 0; i < pair.token.size(); ++i) {
      const auto last = static_cast<size_t>(pair.route_begin[i + 1]);
      for (auto j = static_cast<size_t>(pair.route_begin[i]); j < last; ++j) {
        visit(pair.slot[j], pair.k[j], pair.expert[j]);
      }
    }
  }
}

// Groups ascending lists of tokens by token: token t has the entries [begin[t], begin[t + 1]),
// lists ascending; make(list, i) is the entry of a list's i-th token.
template <class Entry, class Make>
void group_by_token(
    std::span<const std::span<const int32_t>> lists,
    int64_t num_tokens,
    std::vector<int32_t>& begin,
    std::vector<Entry>& entries,
    const Make& make
) {
  begin.assign(static_cast<size_t>(num_tokens) + 1, 0);
  for (const std::span<const int32_t> tokens : lists) {
    for (const int32_t token : tokens) {
      ++begin[static_cast<size_t>(token) + 1];
    }
  }
  for (size_t t = 1; t < begin.size(); ++t) {
    begin[t] += begin[t - 1];
  }
  std::vector<int32_t> next(begin.begin(), begin.end() - 1);
  entries.resize(static_cast<size_t>(begin.back()));
  for (size_t list = 0; list < lists.size(); ++list) {
    for (size_t i = 0; i < lists[list].size(); ++i) {
      const auto place = next[static_cast<size_t>(lists[list][i])]++;
      entries[static_cast<size_t>(place)] = make(list, i);
    }
  }
}

}  // namespace weft
