// SPDX-License-Identifier: Apache-2.0
#include "plan_compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string_view>

#include "plan/plan_data.hpp"

namespace weft::program {
namespace {

class Differences {
 public:
  template <class T>
  void value(std::string_view name, const T& a, const T& b) {
    if (a != b) {
      lines_.push_back(fmt::format("{}: {} and {}", name, a, b));
    }
  }

  template <class T>
  void list(std::string_view name, std::span<const T> a, std::span<const T> b) {
    const auto [in_a, in_b] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    if (in_a == a.end() && in_b == b.end()) {
      return;
    }
    const auto text = [](auto at, auto end) {
      return at == end ? std::string("nothing") : fmt::format("{}", *at);
    };
    lines_.push_back(fmt::format(
        "{}[{}]: {} and {}", name, in_a - a.begin(), text(in_a, a.end()), text(in_b, b.end())
    ));
  }

  template <class T>
  void list(std::string_view name, const std::vector<T>& a, const std::vector<T>& b) {
    list(name, std::span<const T>(a), std::span<const T>(b));
  }

  void add(std::string line) { lines_.push_back(std::move(line)); }
  [[nodiscard]] bool is_empty() const { return lines_.empty(); }
  [[nodiscard]] std::vector<std::string> take() { return std::move(lines_); }

 private:
  std::vector<std::string> lines_;
};

void compare_shapes(const PlanShape& a, const PlanShape& b, Differences& out) {
  out.value("rank", a.rank, b.rank);
  out.value("num_ranks", a.num_ranks, b.num_ranks);
  out.value("num_experts", a.num_experts, b.num_experts);
  out.value("topk", a.topk, b.topk);
  out.value("num_tokens", a.num_tokens, b.num_tokens);
  out.value("from_map", a.from_map, b.from_map);
  out.value("has_weights", a.has_weights, b.has_weights);
  out.value("layout", layout_name(a.options.layout), layout_name(b.options.layout));
  out.value("pad_multiple", a.options.pad_multiple, b.options.pad_multiple);
  out.value("expert_stride", a.options.expert_stride, b.options.expert_stride);
  out.value("row_budget", a.options.row_budget.value_or(-1), b.options.row_budget.value_or(-1));
}

void compare_arrivals(
    std::string_view name,
    const std::vector<Arrivals>& a,
    const std::vector<Arrivals>& b,
    Differences& out
) {
  for (size_t rank = 0; rank < std::min(a.size(), b.size()); ++rank) {
    if (!(a[rank] == b[rank])) {
      out.add(fmt::format("{}: arrivals of the pair with rank {} differ", name, rank));
      return;
    }
  }
}

}  // namespace

std::vector<std::string> plan_differences(const Plan& a, const Plan& b) {
  Differences out;
  if (a == b) {
    return {};
  }
  const PlanData& x = a.data();
  const PlanData& y = b.data();
  compare_shapes(x.shape, y.shape, out);
  out.value("num_rows", x.num_rows, y.num_rows);
  out.value("required_rows", x.required_rows, y.required_rows);
  out.value("overflow", x.overflow, y.overflow);
  out.list("global_routes", x.global_routes, y.global_routes);
  out.list("rows_per_expert", x.rows_per_expert, y.rows_per_expert);
  out.list("padded_rows_per_expert", x.padded_rows_per_expert, y.padded_rows_per_expert);
  out.list("expert_begin", x.expert_begin, y.expert_begin);
  out.list("topk_idx", x.route_expert, y.route_expert);
  out.list("route_slots", x.route_slot, y.route_slot);
  compare_arrivals("sent", x.sent, y.sent, out);
  compare_arrivals("received", x.received, y.received, out);
  if (out.is_empty()) {
    out.add("the plans differ in what follows from their routes");
  }
  return out.take();
}

}  // namespace weft::program
