// SPDX-License-Identifier: Apache-2.0
#include "cpu/protocol/staging.hpp"

#include "plan/domain_traffic.hpp"

namespace weft {
namespace {

// Rows and weights that one peer writes here, weights of routes that it hands in, and inter-node
// tokens.
struct PeerCounts {
  int64_t rows = 0;
  int64_t routes = 0;
  int64_t source_routes = 0;
  int64_t crossings = 0;
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
    add(staging.rows, counts.rows, bytes.rows);
    add(staging.scales, counts.rows, bytes.scales);
    add(staging.weights, counts.routes, bytes.weights);
    add(staging.source_weights, counts.source_routes, bytes.source_weights);
    add(staging.crossing_rows, counts.crossings, bytes.crossing_rows);
    add(staging.crossing_scales, counts.crossings, bytes.crossing_scales);
  }
  return staging;
}

// Sets offsets of handed-on sources: in their forwarder's area.
void place_handed_on(const PlanData& plan, const StagedRowBytes& bytes, Staging& staging) {
  for (int source = 0; source < plan.shape.num_ranks; ++source) {
    const int forwarder = plan.between->domains->between(source);
    if (forwarder >= 0) {
      const auto s = static_cast<size_t>(source);
      const auto c = static_cast<size_t>(forwarder);
      const auto first = static_cast<uint64_t>(plan.between->first_row[s]);
      staging.rows[s] = staging.rows[c] + first * bytes.rows;
      staging.scales[s] = staging.scales[c] + first * bytes.scales;
    }
  }
}

}  // namespace

Staging dispatch_staging(const PlanData& plan, const StagedRowBytes& bytes) {
  Staging staging = lay_out(plan, bytes, [&](size_t source) -> PeerCounts {
    return {
        .rows = rows_from(plan, source),
        .routes = plan.received[source].num_routes(),
        .crossings = crossings_from(plan, source)};
  });
  if (plan.between) {
    place_handed_on(plan, bytes, staging);
  }
  return staging;
}

Staging combine_staging(const PlanData& plan, const StagedRowBytes& bytes) {
  return lay_out(plan, bytes, [&](size_t peer) -> PeerCounts {
    return {
        .rows = returned_from(plan, peer),
        .routes = plan.sent[peer].num_routes(),
        .source_routes = plan.received[peer].num_routes(),
        .crossings = crossing_sums_from(plan, peer)};
  });
}

}  // namespace weft
