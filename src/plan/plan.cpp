// SPDX-License-Identifier: Apache-2.0
#include "weft/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <ostream>

#include "core/check.hpp"
#include "plan/balance/balance.hpp"
#include "plan/domain_traffic.hpp"
#include "plan/plan_data.hpp"

namespace weft {
namespace {

size_t checked_rank(int rank, const PlanData& data, std::string_view verb) {
  WEFT_CHECK_ARG(
      (Context{data.shape.rank, data.shape.num_ranks}),
      rank >= 0 && rank < data.shape.num_ranks,
      "{}: rank {} is out of range (num_ranks = {})",
      verb,
      rank,
      data.shape.num_ranks
  );
  return static_cast<size_t>(rank);
}

std::string layout_text(const PlanShape& shape) {
  std::string text(layout_name(shape.options.layout));
  if (shape.options.pad_multiple > 1) {
    text += fmt::format(", padded to {}", shape.options.pad_multiple);
  }
  if (shape.options.layout == Layout::kExpertStrided) {
    text += fmt::format(", stride {}", shape.options.expert_stride);
  }
  if (shape.options.order != SumOrder::kRank) {
    text += fmt::format(", sums in order {}", order_name(shape.options.order));
  }
  return text;
}

int64_t num_arrivals(const std::vector<Arrivals>& pairs) {
  const auto add = [](int64_t sum, const Arrivals& pair) { return sum + pair.size(); };
  return std::accumulate(pairs.begin(), pairs.end(), int64_t{0}, add);
}

}  // namespace

std::string_view layout_name(Layout layout) {
  static constexpr std::string_view kNames[] = {"rank_major", "expert_major", "expert_strided"};
  return name_of(layout, kNames);
}

std::string_view order_name(SumOrder order) {
  static constexpr std::string_view kNames[] = {"rank", "topk"};
  return name_of(order, kNames);
}

// Compares weights by bits: a NaN equals itself.
bool operator==(const Arrivals& a, const Arrivals& b) {
  const auto same_bits = [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  };
  return a.one_row == b.one_row && a.token == b.token && a.route_begin == b.route_begin &&
         a.slot == b.slot && a.k == b.k && a.expert == b.expert &&
         std::ranges::equal(a.weight, b.weight, same_bits);
}

bool operator==(const PlanData& a, const PlanData& b) {
  return a.shape == b.shape && a.num_rows == b.num_rows && a.required_rows == b.required_rows &&
         a.overflow == b.overflow && a.rows_per_expert == b.rows_per_expert &&
         a.padded_rows_per_expert == b.padded_rows_per_expert && a.expert_begin == b.expert_begin &&
         a.row_experts == b.row_experts && a.global_routes == b.global_routes &&
         a.route_expert == b.route_expert && a.route_slot == b.route_slot && a.sent == b.sent &&
         a.received == b.received && a.token_begin == b.token_begin &&
         a.token_arrivals == b.token_arrivals && a.padding == b.padding;
}

int64_t num_used_rows(const PlanData& plan) {
  int64_t rows = 0;
  for (const Arrivals& from : plan.received) {
    rows += from.one_row ? from.size() : from.num_routes();
  }
  return rows;
}

int64_t num_returned_rows(const PlanShape& shape, const Arrivals& pair) {
  int64_t rows = 0;
  for (int64_t i = 0; i < pair.size(); ++i) {
    rows += returned_rows(shape, pair, i);
  }
  return rows;
}

Plan::Plan(std::shared_ptr<const PlanData> data) : data_(std::move(data)) {}

const PlanData& Plan::data() const {
  return data_->device ? data_->device->on_host() : *data_;
}

const PlanData& contents_of(const Plan& plan) {
  return plan.data();
}

const PlanData& header_of(const Plan& plan) {
  return *plan.data_;
}

const PlanData& Plan::output_shape() const {
  return data_->has_output_shape ? *data_ : data_->device->shape_on_host();
}

Plan::OnDevice Plan::on_device() const {
  return data_->device ? data_->device->on_device() : OnDevice{};
}

int Plan::rank() const {
  return data_->shape.rank;
}
int Plan::num_ranks() const {
  return data_->shape.num_ranks;
}
int Plan::num_experts() const {
  return data_->shape.num_chosen_experts();
}
int Plan::num_local_experts() const {
  return data_->shape.num_local_experts();
}
int Plan::num_physical_experts() const {
  return data_->shape.num_experts;
}
int Plan::num_replicas() const {
  return data_->shape.options.balance.replicas;
}
int64_t Plan::num_tokens() const {
  return data_->shape.num_tokens;
}
int Plan::topk() const {
  return data_->shape.topk;
}
Layout Plan::layout() const {
  return data_->shape.options.layout;
}
SumOrder Plan::order() const {
  return data_->shape.options.order;
}
int64_t Plan::pad_multiple() const {
  return data_->shape.options.pad_multiple;
}
bool Plan::from_map() const {
  return data_->shape.from_map;
}

int64_t Plan::num_rows() const {
  return data_->num_rows;
}
int64_t Plan::required_rows() const {
  return output_shape().required_rows;
}
bool Plan::overflow() const {
  return output_shape().overflow;
}
std::span<const int64_t> Plan::rows_per_expert() const {
  return output_shape().rows_per_expert;
}
std::span<const int64_t> Plan::padded_rows_per_expert() const {
  return output_shape().padded_rows_per_expert;
}
std::span<const int64_t> Plan::expert_begin() const {
  return output_shape().expert_begin;
}
std::span<const int32_t> Plan::row_experts() const {
  return data().row_experts;
}
int Plan::row_weight_cols() const {
  return layout() == Layout::kRankMajor ? topk() : 1;
}

int64_t Plan::sent_arrivals(int to_rank) const {
  const size_t to = checked_rank(to_rank, *data_, "sent_arrivals");
  return data_->num_sent.empty() ? data().sent[to].size() : data_->num_sent[to];
}

int64_t Plan::received_arrivals(int from_rank) const {
  return data().received[checked_rank(from_rank, *data_, "received_arrivals")].size();
}

int64_t Plan::wire_bytes(int64_t row_bytes) const {
  const PlanData& plan = data();
  int64_t rows = 0;
  for (int peer = 0; peer < num_ranks(); ++peer) {
    rows += peer == rank() ? 0 : rows_to(plan, static_cast<size_t>(peer));
  }
  return rows * row_bytes + crossing_bytes(row_bytes);
}

int64_t Plan::returned_bytes(int64_t row_bytes) const {
  const PlanData& plan = data();
  if (order() == SumOrder::kRank) {
    return wire_bytes(row_bytes);
  }
  int64_t rows = 0;
  for (size_t peer = 0; peer < plan.sent.size(); ++peer) {
    const Arrivals& pair = plan.sent[peer];
    if (peer != static_cast<size_t>(rank())) {
      rows += data_->device ? pair.num_routes() : num_returned_rows(plan.shape, pair);
    }
  }
  return rows * row_bytes;
}

int64_t Plan::crossing_bytes(int64_t row_bytes) const {
  return count_sent(data()).rows * row_bytes;
}

int64_t Plan::logical_bytes(int64_t row_bytes) const {
  return num_used_rows(data()) * row_bytes;
}

std::span<const int64_t> Plan::global_routes_per_expert() const {
  return output_shape().global_routes;
}
std::span<const int32_t> Plan::route_slots() const {
  return data().route_slot;
}

std::vector<int32_t> Plan::route_ranks() const {
  std::vector<int32_t> ranks = data().route_expert;
  for (int32_t& rank : ranks) {
    rank = rank < 0 ? -1 : rank / num_local_experts();
  }
  return ranks;
}

std::span<const int32_t> Plan::placement() const {
  const Balancing& known = data_->shape.options.balance;
  return known.replicas == 0 || !known.placement.empty()
             ? known.placement
             : output_shape().shape.options.balance.placement;
}

std::vector<int64_t> Plan::routes_per_expert() const {
  std::vector<int64_t> routes(static_cast<size_t>(num_experts()), 0);
  const std::span<const int64_t> physical = global_routes_per_expert();
  for (size_t p = 0; p < physical.size(); ++p) {
    if (physical[p] > 0) {
      const int32_t expert = expert_of(output_shape().shape, static_cast<int32_t>(p));
      routes[static_cast<size_t>(expert)] += physical[p];
    }
  }
  return routes;
}

Plan::Load Plan::load() const {
  const std::vector<int>& lost = data_->shape.lost;
  // Returns the largest sum of one rank's numbers, laid out by rank.
  const auto most = [&](std::span<const int64_t> routes) {
    const size_t each = routes.size() / static_cast<size_t>(num_ranks());
    int64_t found = 0;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      const auto of_rank = routes.subspan(static_cast<size_t>(rank) * each, each);
      const int64_t here = std::reduce(of_rank.begin(), of_rank.end());
      found = is_among(lost, rank) ? found : std::max(found, here);
    }
    return found;
  };
  const std::span<const int64_t> routes = global_routes_per_expert();
  const auto sum = static_cast<double>(std::reduce(routes.begin(), routes.end()));
  const std::vector<int64_t> chosen = routes_per_expert();
  const int num_left = num_ranks() - static_cast<int>(lost.size());
  Load load = {.busiest = most(routes), .unbalanced = most(chosen), .mean = sum / num_left};
  load.if_free = load.busiest;
  const Balancing& balance = data_->shape.options.balance;
  if (balance.replica_rows > 0 && load.busiest == load.unbalanced) {
    const BalanceOptions free = {
        .replicas = balance.replicas,
        .min_rows = balance.min_rows,
        .block_rows = balance.block_rows,
        .lost = lost};
    load.if_free = place_replicas(chosen, num_ranks(), free).busiest();
  }
  return load;
}

bool operator==(const Plan& a, const Plan& b) {
  return a.data() == b.data();
}

std::ostream& operator<<(std::ostream& out, const Plan& plan) {
  const PlanData& data = plan.data();
  const auto rows = plan.rows_per_expert();
  const auto own = static_cast<size_t>(plan.rank());
  const int64_t kept = plan.logical_bytes(1);
  const int64_t sent = num_arrivals(data.sent);
  const int64_t received = num_arrivals(data.received);
  const auto [least, most] = std::ranges::minmax(rows);
  const double mean =
      static_cast<double>(std::reduce(rows.begin(), rows.end())) / static_cast<double>(rows.size());

  out << fmt::format(
      "plan of rank {}/{}: {}\n", plan.rank(), plan.num_ranks(), layout_text(data.shape)
  );
  out << fmt::format(
      "  routing   {} tokens, top {} of {} experts, {} here{}\n",
      plan.num_tokens(),
      plan.topk(),
      plan.num_experts(),
      plan.num_local_experts(),
      plan.from_map() ? ", from a map" : ""
  );
  out << fmt::format(
      "  output    {} rows, {} with a token ({} required){}\n",
      plan.num_rows(),
      kept,
      plan.required_rows(),
      plan.overflow() ? ", routes to or from this rank were dropped" : ""
  );
  out << fmt::format(
      "  arrivals  {} sent, {} of them to other ranks; {} received, {} from other ranks\n",
      sent,
      sent - data.sent[own].size(),
      received,
      received - data.received[own].size()
  );
  if (plan.num_replicas() > 0) {
    const Plan::Load load = plan.load();
    const auto copies = std::ranges::count_if(plan.placement(), [](int32_t e) { return e >= 0; });
    out << fmt::format(
        "  balance   {} replicas; the busiest rank has {} rows, {} without them ({:.1f} on "
        "average)\n",
        copies,
        load.busiest,
        load.unbalanced,
        load.mean
    );
  }
  out << fmt::format("  experts   {} to {} rows, {:.1f} on average\n", least, most, mean);
  return out;
}

}  // namespace weft
