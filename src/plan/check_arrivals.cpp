// SPDX-License-Identifier: Apache-2.0
#include "plan/check_arrivals.hpp"

#include <fmt/format.h>

namespace weft {
namespace {

std::string sizes_fault(const Arrivals& a) {
  const size_t routes = a.slot.size();
  if (a.route_begin.size() != a.token.size() + 1) {
    return fmt::format(
        "route_begin has {} entries ({} arrivals need {})",
        a.route_begin.size(),
        a.token.size(),
        a.token.size() + 1
    );
  }
  if (a.k.size() != routes || a.expert.size() != routes) {
    return fmt::format(
        "slot, k and expert have {}, {} and {} entries (must be equal)",
        routes,
        a.k.size(),
        a.expert.size()
    );
  }
  if (!a.weight.empty() && a.weight.size() != routes) {
    return fmt::format("weight has {} entries ({} routes)", a.weight.size(), routes);
  }
  if (a.route_begin.front() != 0 || a.route_begin.back() != static_cast<int64_t>(routes)) {
    return fmt::format(
        "route_begin runs from {} to {} (0 to {})",
        a.route_begin.front(),
        a.route_begin.back(),
        routes
    );
  }
  return {};
}

std::string tokens_fault(const Arrivals& a, const ArrivalBounds& bounds) {
  int64_t previous = -1;
  for (size_t i = 0; i < a.token.size(); ++i) {
    const int64_t token = a.token[i];
    if (token <= previous || token >= bounds.num_tokens) {
      return fmt::format(
          "token[{}] = {} is out of order or range ({} to {})",
          i,
          token,
          previous + 1,
          bounds.num_tokens - 1
      );
    }
    previous = token;
    const int64_t first = a.route_begin[i];
    const int64_t last = a.route_begin[i + 1];
    if (last <= first || last - first > bounds.topk || last > a.num_routes()) {
      return fmt::format(
          "arrival {} has routes {} to {} (1 to topk = {} of them)", i, first, last, bounds.topk
      );
    }
  }
  return {};
}

std::string range_fault(
    std::string_view name, size_t i, int64_t value, int64_t end, std::string_view bound
) {
  if (value >= 0 && value < end) {
    return {};
  }
  return fmt::format("{}[{}] = {} is out of range ({} = {})", name, i, value, bound, end);
}

// Text is made only for a route that is at fault: this runs on every record that arrives.
std::string routes_fault(const Arrivals& a, const ArrivalBounds& bounds) {
  const auto is_in = [](int64_t value, int64_t end) { return value >= 0 && value < end; };
  for (size_t i = 0; i < a.slot.size(); ++i) {
    if (is_in(a.slot[i], bounds.num_rows) && is_in(a.k[i], bounds.topk) &&
        is_in(a.expert[i], bounds.num_local_experts)) [[likely]] {
      continue;
    }
    std::string fault = range_fault("slot", i, a.slot[i], bounds.num_rows, "num_rows");
    if (fault.empty()) {
      fault = range_fault("k", i, a.k[i], bounds.topk, "topk");
    }
    if (fault.empty()) {
      fault = range_fault("expert", i, a.expert[i], bounds.num_local_experts, "num_local_experts");
    }
    return fault;
  }
  return {};
}

// Inside an arrival slots ascend, or all routes share one; each k comes once.
std::string order_fault(const Arrivals& a) {
  for (size_t i = 0; i < a.token.size(); ++i) {
    const auto first = static_cast<size_t>(a.route_begin[i]);
    const auto last = static_cast<size_t>(a.route_begin[i + 1]);
    uint64_t seen_k = 0;
    for (size_t r = first; r < last; ++r) {
      const uint64_t k_bit = uint64_t{1} << a.k[r];
      if ((seen_k & k_bit) != 0) {
        return fmt::format("k[{}] = {} comes twice in its arrival", r, a.k[r]);
      }
      seen_k |= k_bit;
      if (a.one_row && a.slot[r] != a.slot[first]) {
        return fmt::format("slot[{}] = {} (its arrival has row {})", r, a.slot[r], a.slot[first]);
      }
      if (!a.one_row && r > first && a.slot[r] <= a.slot[r - 1]) {
        return fmt::format("slot[{}] = {} does not ascend (after {})", r, a.slot[r], a.slot[r - 1]);
      }
    }
  }
  return {};
}

}  // namespace

std::string arrivals_fault(const Arrivals& arrivals, const ArrivalBounds& bounds) {
  if (arrivals.one_row != bounds.one_row) {
    return fmt::format("one_row is {} (the layout says otherwise)", arrivals.one_row);
  }
  std::string fault = sizes_fault(arrivals);
  if (fault.empty()) {
    fault = tokens_fault(arrivals, bounds);
  }
  if (fault.empty()) {
    fault = routes_fault(arrivals, bounds);
  }
  if (fault.empty()) {
    fault = order_fault(arrivals);
  }
  return fault;
}

}  // namespace weft
