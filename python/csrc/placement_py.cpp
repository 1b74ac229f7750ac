// SPDX-License-Identifier: Apache-2.0
// Placements of replicas that are made of counts, for weft/placement.py.
#include <algorithm>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <optional>
#include <string>
#include <vector>

#include "bind.hpp"
#include "plan/balance/routing.hpp"
#include "plan/balance/search.hpp"
#include "plan/file/routing_file.hpp"

namespace weft::py {
namespace {

std::vector<int32_t> replicas_for(
    const std::vector<int64_t>& counts, int num_ranks, int replicas, int64_t min_rows
) {
  const auto num_experts = static_cast<int>(counts.size());
  const Context nobody;
  WEFT_CHECK_ARG(
      nobody,
      num_ranks > 0 && num_experts > 0 && num_experts % num_ranks == 0,
      "placement: counts of {} experts for {} ranks (expected as many for each)",
      num_experts,
      num_ranks
  );
  const int64_t least = std::ranges::min(counts);
  WEFT_CHECK_ARG(nobody, least >= 0, "placement: a count is {} (at least 0)", least);
  check_balancing({.replicas = replicas, .min_rows = min_rows}, num_ranks, num_experts, nobody);
  const BalanceOptions options = {.replicas = replicas, .min_rows = min_rows};
  return Balance{.placement = place_replicas(counts, num_ranks, options), .quotas = {}}.replicas();
}

void check_replicas(
    const std::vector<int32_t>& placement, int num_ranks, int num_experts, int replicas
) {
  const Balancing given = {.replicas = replicas, .min_rows = 1, .placement = placement};
  check_balancing(given, num_ranks, num_experts, {});
}

std::vector<int64_t> count_routing_file(const std::string& path, std::optional<int> layer) {
  RoutingFileReader file(path);
  std::vector<int64_t> counts(static_cast<size_t>(file.shape().num_experts), 0);
  for (int64_t i = 0; i < file.num_records(); ++i) {
    const RoutingRecord record = file.read(i);
    if (record.layer != layer.value_or(record.layer)) {
      continue;
    }
    for (const RouteTable& routes : record.routes) {
      for (const int32_t expert : routes.expert) {
        if (expert >= 0) {
          ++counts[static_cast<size_t>(expert)];
        }
      }
    }
  }
  return counts;
}

}  // namespace

void bind_placement(nb::module_& m) {
  using nb::arg;
  m.attr("BALANCE_FINENESS") = LimitSearch::kFineness;
  m.def(
      "replicas_for",
      &replicas_for,
      arg("counts"),
      arg("num_ranks"),
      arg("replicas"),
      arg("min_rows"),
      "[num_ranks * replicas] the expert of each replica for counts [experts], -1: none."
  );
  m.def(
      "check_replicas",
      &check_replicas,
      arg("placement"),
      arg("num_ranks"),
      arg("num_experts"),
      arg("replicas"),
      "Raises InvalidArgument unless the replicas may lie there."
  );
  m.def(
      "count_routing_file",
      &count_routing_file,
      arg("path"),
      arg("layer").none(),
      "[experts] routes to each in a routing file, of one layer or of all."
  );
}

}  // namespace weft::py
