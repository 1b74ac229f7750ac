// SPDX-License-Identifier: Apache-2.0
#include "weft/plan.hpp"

#include <algorithm>
#include <bit>

#include "core/check.hpp"
#include "plan/domain_traffic.hpp"
#include "plan/plan_data.hpp"

namespace weft {
namespace {

bool same_options(const PlanOptions& a, const PlanOptions& b) {
  return a.layout == b.layout && a.pad_multiple == b.pad_multiple &&
         a.expert_stride == b.expert_stride && a.row_budget == b.row_budget &&
         a.overflow == b.overflow;
}

bool same_shape(const PlanShape& a, const PlanShape& b) {
  return a.rank == b.rank && a.num_ranks == b.num_ranks && a.num_experts == b.num_experts &&
         a.topk == b.topk && a.num_tokens == b.num_tokens && a.from_map == b.from_map &&
         a.has_weights == b.has_weights && same_options(a.options, b.options);
}

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

}  // namespace

std::string_view layout_name(Layout layout) {
  switch (layout) {
    case Layout::kRankMajor:
      return "rank_major";
    case Layout::kExpertMajor:
      return "expert_major";
    case Layout::kExpertStrided:
      return "expert_strided";
  }
  return "unknown";
}

// Weights by their bits: a NaN equals itself.
bool operator==(const Arrivals& a, const Arrivals& b) {
  const auto same_bits = [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  };
  return a.one_row == b.one_row && a.token == b.token && a.route_begin == b.route_begin &&
         a.slot == b.slot && a.k == b.k && a.expert == b.expert &&
         std::ranges::equal(a.weight, b.weight, same_bits);
}

bool operator==(const PlanData& a, const PlanData& b) {
  return same_shape(a.shape, b.shape) && a.num_rows == b.num_rows &&
         a.required_rows == b.required_rows && a.overflow == b.overflow &&
         a.rows_per_expert == b.rows_per_expert &&
         a.padded_rows_per_expert == b.padded_rows_per_expert && a.expert_begin == b.expert_begin &&
         a.row_experts == b.row_experts && a.global_routes == b.global_routes &&
         a.route_expert == b.route_expert && a.route_slot == b.route_slot && a.sent == b.sent &&
         a.received == b.received && a.token_begin == b.token_begin &&
         a.token_arrivals == b.token_arrivals && a.padding == b.padding;
}

Plan::Plan(std::shared_ptr<const PlanData> data) : data_(std::move(data)) {}

const PlanData& Plan::data() const {
  return data_->device ? data_->device->on_host() : *data_;
}

const PlanData& Plan::output_shape() const {
  return data_->has_output_shape ? *data_ : data();
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
  return data_->shape.num_experts;
}
int Plan::num_local_experts() const {
  return data_->shape.num_local_experts();
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
  return data().sent[checked_rank(to_rank, *data_, "sent_arrivals")].size();
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

int64_t Plan::crossing_bytes(int64_t row_bytes) const {
  return count_sent(data()).rows * row_bytes;
}

int64_t Plan::logical_bytes(int64_t row_bytes) const {
  int64_t rows = 0;
  for (const Arrivals& from : data().received) {
    rows += from.one_row ? from.size() : from.num_routes();
  }
  return rows * row_bytes;
}

std::span<const int64_t> Plan::global_routes_per_expert() const {
  return output_shape().global_routes;
}
std::span<const int32_t> Plan::route_slots() const {
  return data().route_slot;
}

bool operator==(const Plan& a, const Plan& b) {
  return a.data() == b.data();
}

}  // namespace weft
