// SPDX-License-Identifier: Apache-2.0
// How long does one rank compute on a plan, step by step, without any communication?
#include <benchmark/benchmark.h>

#include <vector>

#include "plan/build.hpp"
#include "plan/random_routing.hpp"

namespace {

using namespace weft;

constexpr int kNumRanks = 4;

// Axes: tokens, experts, topk.
struct Case {
  explicit Case(const benchmark::State& state)
      : num_tokens(state.range(0)),
        num_experts(static_cast<int>(state.range(1))),
        topk(static_cast<int>(state.range(2))) {
    RandomRouting spec;
    spec.num_tokens = num_tokens;
    spec.num_experts = num_experts;
    spec.topk = topk;
    for (int rank = 0; rank < kNumRanks; ++rank) {
      routes.push_back(random_routing(spec, rank));
      counts.push_back(count_routes(routes.back(), num_experts, kNumRanks, options));
    }
  }

  int64_t num_tokens;
  int num_experts;
  int topk;
  PlanOptions options = {};
  std::vector<RouteTable> routes;
  std::vector<RankCounts> counts;
};

void set_rate(benchmark::State& state, const Case& c) {
  state.SetItemsProcessed(state.iterations() * c.num_tokens * c.topk);  // routes
}

void read_routing_of_one_rank(benchmark::State& state) {
  const Case c(state);
  Routing routing;
  routing.topk_idx = matrix(c.routes[0].expert.data(), c.num_tokens, c.topk);
  for ([[maybe_unused]] const auto iteration : state) {
    benchmark::DoNotOptimize(read_routing(routing, c.num_experts, c.topk, c.num_tokens, {}));
  }
  set_rate(state, c);
}

void count_routes_of_one_rank(benchmark::State& state) {
  const Case c(state);
  for ([[maybe_unused]] const auto iteration : state) {
    benchmark::DoNotOptimize(count_routes(c.routes[0], c.num_experts, kNumRanks, c.options));
  }
  set_rate(state, c);
}

void place_routes_of_one_rank(benchmark::State& state) {
  const Case c(state);
  for ([[maybe_unused]] const auto iteration : state) {
    benchmark::DoNotOptimize(place_routes(c.routes[0], c.counts, 0, c.options, {}));
  }
  set_rate(state, c);
}

void encode_and_decode_records(benchmark::State& state) {
  const Case c(state);
  const PlanData source = place_routes(c.routes[0], c.counts, 0, c.options, {});
  const PlanData receiver = place_routes(c.routes[1], c.counts, 1, c.options, {});
  for ([[maybe_unused]] const auto iteration : state) {
    const auto bytes = encode_records(source.sent[1]);
    const ArrivalBounds bounds(receiver.shape, source.shape.num_tokens, receiver.num_rows);
    benchmark::DoNotOptimize(decode_records(bytes, bounds, 0, {}));
  }
  set_rate(state, c);
}

void axes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"tokens", "experts", "topk"})
      ->Args({128, 64, 8})
      ->Args({2048, 64, 8})
      ->Args({4096, 256, 8})
      ->Unit(benchmark::kMicrosecond);
}

BENCHMARK(read_routing_of_one_rank)->Apply(axes);
BENCHMARK(count_routes_of_one_rank)->Apply(axes);
BENCHMARK(place_routes_of_one_rank)->Apply(axes);
BENCHMARK(encode_and_decode_records)->Apply(axes);

}  // namespace
