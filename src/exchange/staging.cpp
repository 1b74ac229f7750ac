// SPDX-License-Identifier: Apache-2.0
#include "exchange/staging.hpp"

namespace weft {
namespace {

// Arrivals and routes that one peer writes here, and routes whose weights it hands in.
struct PeerCounts {
  int64_t arrivals = 0;
  int64_t routes = 0;
  int64_t source_routes = 0;
};

template <class CountsOf>
Staging lay_out(const PlanData& plan, const StagedRowBytes& bytes, const CountsOf& counts_of) {
  Staging staging;
  const auto add = [&](std::vector<uint64_t>& offsets, int64_t count, uint64_t each) {
    offsets.push_back(staging.num_bytes);
    staging.num_bytes = align_up(staging.num_bytes + static_cast<uint64_t>(count) * each, 64);
  };
  for (int peer = 0; peer < plan.shape.num_ranks; ++peer) {
    const PeerCounts counts =
        peer == plan.shape.rank ? PeerCounts{} : counts_of(static_cast<size_t>(peer));
    add(staging.rows, counts.arrivals, bytes.rows);
    add(staging.scales, counts.arrivals, bytes.scales);
    add(staging.weights, counts.routes, bytes.weights);
    add(staging.source_weights, counts.source_routes, bytes.source_weights);
  }
  return staging;
}

}  // namespace

Staging dispatch_staging(const PlanData& plan, const StagedRowBytes& bytes) {
  return lay_out(plan, bytes, [&](size_t source) -> PeerCounts {
    return {plan.received[source].size(), plan.received[source].num_routes(), 0};
  });
}

Staging combine_staging(const PlanData& plan, const StagedRowBytes& bytes) {
  return lay_out(plan, bytes, [&](size_t peer) -> PeerCounts {
    return {plan.sent[peer].size(), plan.sent[peer].num_routes(), plan.received[peer].num_routes()};
  });
}

}  // namespace weft
