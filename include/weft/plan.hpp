// SPDX-License-Identifier: Apache-2.0
// Everything derived from routing before a byte of payload moves. Previous: routing.hpp; next:
// calls.hpp.
//
// A Plan is immutable, owns its memory and touches no peer: keep as many as you like, use them in
// any order. A plan made on a GPU lies there; questions about more than its shape and number of
// rows copy it to the host once.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

// The rule that gives each route its slot in the receiver's output.
enum class Layout : uint8_t {
  kRankMajor,    // one row per arrival: by source rank, then token
  kExpertMajor,  // one row per route: by local expert (padded), then source rank, then token, then
                 // k
  kExpertStrided,  // as kExpertMajor, each expert's block starting at expert * expert_stride
};

[[nodiscard]] std::string_view layout_name(Layout layout);

// Treatment of routes that do not fit a row budget or an expert stride.
enum class Overflow : uint8_t {
  kDrop,   // last slots first: the routes give zeros and zero gradients, Plan::overflow() is set
  kError,  // plan() throws on every rank, naming the first rank that lacks room
};

// The order in which combine adds up a token's rows, always in fp32.
enum class SumOrder : uint8_t {
  // First the token's rows on each rank, rounded, then its ranks' sums, ascending, rounded; one row
  // returns from each rank. Between domains see exchange.hpp.
  kRank,
  // All of its rows, in the order of its choices, rounded once: the same bits whatever the number
  // of ranks and domains. A row returns for each route; on CPUs a rank that has all topk routes of
  // a token adds them up itself, which is the same. Not for kRankMajor, whose rows are sums of a
  // rank's experts, nor among GPUs of several hosts.
  kTopk,
};

[[nodiscard]] std::string_view order_name(SumOrder order);

inline constexpr int kMostReplicas = 16;  // places for them on a rank

// Replicas of popular experts on other ranks, so that all ranks have about as many rows
// (docs/balance.md). A rank has its own experts, the masters, then places for replicas: these
// *physical experts* are the experts of every layout. The caller puts the weights there. Lost ranks
// take no rows (PeerLoss): an expert's rows all go to its other places, and no replica is planned
// whose master cannot give the weights.
struct Balancing {
  int replicas = 0;      // places on each rank, at most kMostReplicas; 0: no balancing
  int64_t min_rows = 1;  // a planned replica has at least so many
  // [num_ranks, replicas] expert of each place, -1: none; only other ranks' experts, each once a
  // rank. Empty: each call places replicas by its own counts.
  std::vector<int32_t> placement = {};
  // Above 1: an expert's replicas by ascending rank, then its master take intervals of its rows by
  // source rank, then token, and replicas whole blocks of so many; the last replica stands in for a
  // master that is lost. At most 1024.
  int64_t block_rows = 1;
  // Cost of the weights of a planned replica, in rows; 0: nothing. A call has no replicas where
  // they spare the busiest rank no more than they cost the rank that sends or gets most of them.
  int64_t replica_rows = 0;
  friend bool operator==(const Balancing&, const Balancing&) = default;
};

// All ranks pass the same options, except `row_budget`, which is each rank's own.
struct PlanOptions {
  Layout layout = Layout::kExpertMajor;
  int64_t pad_multiple = 1;  // each expert's rows are rounded up to this; not for kRankMajor
  // kExpertStrided only, in rows. 0: the largest (padded) expert of the whole group, so that
  // nothing is dropped.
  int64_t expert_stride = 0;
  // Rows of this rank's output. Absent: exactly what is needed. Not for kExpertStrided, whose
  // stride is the budget.
  std::optional<int64_t> row_budget = {};
  Overflow overflow = Overflow::kDrop;
  SumOrder order = SumOrder::kRank;  // of combine
  Balancing balance = {};            // not among GPUs of several hosts
  friend bool operator==(const PlanOptions&, const PlanOptions&) = default;
};

struct PlanData;

class Plan {
 public:
  explicit Plan(std::shared_ptr<const PlanData> data);

  // Shape.
  [[nodiscard]] int rank() const;
  [[nodiscard]] int num_ranks() const;
  [[nodiscard]] int num_experts() const;  // that tokens choose among
  // Blocks of this rank's output: its own experts, then its places for replicas.
  [[nodiscard]] int num_local_experts() const;
  [[nodiscard]] int num_physical_experts() const;  // of all ranks
  [[nodiscard]] int num_replicas() const;          // places for them on each rank
  [[nodiscard]] int64_t num_tokens() const;        // of this rank
  [[nodiscard]] int topk() const;  // columns of topk_idx; ExchangeConfig::max_topk for a map
  [[nodiscard]] Layout layout() const;
  [[nodiscard]] SumOrder order() const;
  [[nodiscard]] int64_t pad_multiple() const;
  [[nodiscard]] bool from_map() const;  // weights are then [num_tokens, num_experts] at the source

  // Output of this rank: rows to allocate, padding and slack included.
  [[nodiscard]] int64_t num_rows() const;
  // Rows that would hold every route, padding included: the budget that would not have dropped.
  // kExpertStrided: with every block as large as the largest (padded) expert of the group.
  [[nodiscard]] int64_t required_rows() const;
  // True if any route to or from this rank was dropped. Always defined.
  [[nodiscard]] bool overflow() const;
  // [num_local_experts] rows that carry a token; with kRankMajor a row counts once for each of its
  // routes.
  [[nodiscard]] std::span<const int64_t> rows_per_expert() const;
  // [num_local_experts] rows of each expert's block, padding included; equal to the above with
  // kRankMajor.
  [[nodiscard]] std::span<const int64_t> padded_rows_per_expert() const;
  // [num_local_experts] first row of each expert's block; zeros with kRankMajor.
  [[nodiscard]] std::span<const int64_t> expert_begin() const;
  // [num_rows, topk] local expert ids, -1 where the route is another rank's; kRankMajor only, else
  // empty.
  [[nodiscard]] std::span<const int32_t> row_experts() const;
  // Columns of a row-weight tensor: topk with kRankMajor, otherwise 1.
  [[nodiscard]] int row_weight_cols() const;

  // Traffic.
  [[nodiscard]] int64_t sent_arrivals(int to_rank) const;
  [[nodiscard]] int64_t received_arrivals(int from_rank) const;
  // Bytes of rows that leave this rank for others in a dispatch. In a group of several domains: its
  // own tokens, once for each other rank of its domain and once for each other domain they go to,
  // and what it forwards in its domain for ranks of others.
  [[nodiscard]] int64_t wire_bytes(int64_t row_bytes) const;
  // Bytes of rows that combine brings back to this rank from others: as many as wire_bytes() with
  // SumOrder::kRank. With kTopk a row for each of its routes to another rank, straight from there;
  // on CPUs one for all topk routes of a token.
  [[nodiscard]] int64_t returned_bytes(int64_t row_bytes) const;
  // Bytes of wire_bytes() that leave this rank's domain; 0 in a group of one domain, and for a plan
  // from a file.
  [[nodiscard]] int64_t crossing_bytes(int64_t row_bytes) const;
  // Bytes of all rows that this rank receives, its own included, padding excluded.
  [[nodiscard]] int64_t logical_bytes(int64_t row_bytes) const;
  // [num_physical_experts] routes of all ranks to each, before dropping.
  [[nodiscard]] std::span<const int64_t> global_routes_per_expert() const;
  // [num_tokens, topk] slot on the expert's rank, -1 = no route or dropped.
  [[nodiscard]] std::span<const int32_t> route_slots() const;
  // [num_tokens, topk] the rank that each route goes to, that of a replica perhaps, -1 = no route.
  [[nodiscard]] std::vector<int32_t> route_ranks() const;

  // Balance.
  // [num_experts] routes of all ranks to each expert, wherever its rows go, before dropping.
  [[nodiscard]] std::vector<int64_t> routes_per_expert() const;
  // [num_ranks, num_replicas] the expert of each replica, -1: none.
  [[nodiscard]] std::span<const int32_t> placement() const;
  // Routes of the busiest rank, before dropping; of the busiest without replicas; of the mean rank;
  // and of the busiest if replicas cost nothing: less than `busiest` if this call has none because
  // they would have cost more. A row budget of at least `busiest` (and padding) holds all routes.
  struct Load {
    int64_t busiest = 0;
    int64_t unbalanced = 0;
    double mean = 0;
    int64_t if_free = 0;
  };
  [[nodiscard]] Load load() const;

  // Text. JSON holds the whole plan; load() throws Error (kFile) naming the file and the place of
  // the fault.
  [[nodiscard]] std::string to_json() const;
  [[nodiscard]] static Plan from_json(std::string_view text, std::string_view name = "text");
  void save(const std::string& path) const;
  [[nodiscard]] static Plan load(const std::string& path);
  friend std::ostream& operator<<(std::ostream& out, const Plan& plan);  // a summary of some lines

  // On a GPU: where the shape of the output lies in device memory while the plan is alive; all null
  // for a plan of the CPU. With kRankMajor rows_per_expert counts dropped routes too.
  struct OnDevice {
    const int64_t* num_rows = nullptr;
    const int64_t* required_rows = nullptr;
    const int32_t* overflow = nullptr;                // 0 or 1
    const int64_t* rows_per_expert = nullptr;         // [num_local_experts]
    const int64_t* padded_rows_per_expert = nullptr;  // [num_local_experts]
    const int64_t* expert_begin = nullptr;            // [num_local_experts]
    const int32_t* placement = nullptr;  // [num_ranks, num_replicas], null without replicas
  };
  [[nodiscard]] OnDevice on_device() const;

  // Same shape, routes, slots and weights; where the plan was made does not count.
  friend bool operator==(const Plan& a, const Plan& b);

 private:
  // For the library itself, see plan/plan_data.hpp.
  friend const PlanData& contents_of(const Plan& plan);
  friend const PlanData& header_of(const Plan& plan);

  [[nodiscard]] const PlanData& data() const;
  [[nodiscard]] const PlanData& output_shape() const;
  std::shared_ptr<const PlanData> data_;
};

}  // namespace weft
