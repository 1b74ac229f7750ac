// SPDX-License-Identifier: Apache-2.0
// One domain, simulated, against what an exchange on the CPU does with the same routing: rows,
// bytes, memory, and every signal as its peers have raised it.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <tuple>

#include "exchange/exchange_cpu.hpp"
#include "plan/build.hpp"
#include "unit/simulate/simulate_cases.hpp"

namespace weft::sim {
namespace {

// Signals [first, first + count) of this rank: how many have grown, and by how much in all.
struct Grown {
  int64_t signals = 0;
  int64_t raises = 0;
};

Grown grown(const CpuExchange& exchange, uint32_t first, uint32_t count) {
  Grown grown;
  for (uint32_t signal = first; signal < first + count; ++signal) {
    const uint64_t value = exchange.transport->signal_value(signal);
    grown.signals += value > 0 ? 1 : 0;
    grown.raises += static_cast<int64_t>(value);
  }
  return grown;
}

using Param = std::tuple<int, std::string, bool>;  // ranks, transport, output in shared memory

class AgreementTest : public testing::TestWithParam<Param> {
 protected:
  AgreementTest() {
    scenario_ = small_scenario();
    scenario_.num_ranks = std::get<0>(GetParam());
    scenario_.ranks_per_domain = scenario_.num_ranks;
    scenario_.pad_multiple = 8;
  }

  // Each rank's exchange after one plan, dispatch and combine, and the rank's plan.
  void run(
      const std::vector<RouteTable>& routes,
      const std::function<void(const CpuExchange&, const Plan&)>& look
  ) {
    run_threads(scenario_.num_ranks, [&](const Group& group) {
      const int64_t hidden = scenario_.row_bytes / 2;
      ExchangeConfig config;
      config.hidden = hidden;
      config.max_tokens = scenario_.max_tokens;
      config.num_experts = scenario_.num_experts;
      config.max_topk = scenario_.topk;
      config.transport = std::get<1>(GetParam());
      config.num_threads = 1;
      config.fan_out = FanOut::kReceiver;
      CpuExchange exchange(group, config);
      const RouteTable& own = routes[static_cast<size_t>(group.rank())];
      const std::vector<float> weights(own.expert.size(), 0.5F);
      PlanOptions options;
      options.pad_multiple = scenario_.pad_multiple;
      Routing routing;
      routing.topk_idx = matrix(own.expert.data(), own.num_tokens, own.topk);
      routing.weights = matrix(weights.data(), own.num_tokens, own.topk);
      const Plan plan = exchange.make_plan(routing, options, {});
      std::vector<uint16_t> x(static_cast<size_t>(own.num_tokens * hidden));
      std::vector<uint16_t> rows(static_cast<size_t>(plan.num_rows() * hidden));
      const auto tensor = [&](std::vector<uint16_t>& values, int64_t count) {
        return Tensor{reinterpret_cast<std::byte*>(values.data()), DType::kBFloat16, count, hidden};
      };
      Tensor out = tensor(rows, plan.num_rows());
      const Buffer buffer = exchange.allocate(out);
      if (std::get<2>(GetParam())) {
        out = buffer.tensor();
      }
      const Tensor tokens = tensor(x, own.num_tokens);
      exchange.dispatch(plan, {.x = tokens}, {.rows = out}, {});
      exchange.combine(plan, {.rows = out}, {.x = tokens}, {});
      group.barrier();
      look(exchange, plan);
      group.barrier();
    });
  }

  Scenario scenario_;
};

TEST_P(AgreementTest, ARealExchangeMovesTheSameRowsAndRaisesTheSameSignals) {
  for (const double skew : {0.0, 1.0}) {
    const RoutingChoice choice = {
        .skew = skew, .hole_fraction = 0.1, .has_uneven_tokens = skew > 0};
    const auto routes = make_routes(scenario_, choice);
    const Traffic traffic = count_traffic(scenario_, 8, routes);
    run(routes, [&](const CpuExchange& exchange, const Plan& plan) {
      SCOPED_TRACE("rank " + std::to_string(exchange.rank()));
      const RankTraffic& own = traffic.ranks[static_cast<size_t>(exchange.rank())];
      EXPECT_EQ(own.num_rows, plan.num_rows());
      EXPECT_EQ(own.link_out * scenario_.row_bytes, plan.wire_bytes(scenario_.row_bytes));
      EXPECT_EQ(own.routes * scenario_.row_bytes, plan.logical_bytes(scenario_.row_bytes));
      EXPECT_EQ(own.card_out + own.card_in + own.messages_out, 0);
      int64_t received = 0;
      for (int from = 0; from < scenario_.num_ranks; ++from) {
        EXPECT_EQ(traffic.arrivals(from, exchange.rank()), plan.received_arrivals(from));
        received += from == exchange.rank() ? 0 : plan.received_arrivals(from);
      }
      EXPECT_EQ(own.link_in, received);

      const SignalMap& map = exchange.signals;
      const uint32_t chunks = map.num_ranks * map.max_chunks;
      const Grown dispatched = grown(exchange, map.dispatch(0, 0), chunks);
      EXPECT_EQ(own.dispatch_signals, dispatched.signals);
      EXPECT_EQ(own.dispatch_raises, dispatched.raises);
      const Grown combined = grown(exchange, map.combine(0, 0), chunks);
      EXPECT_EQ(own.combine_signals, combined.signals);
      EXPECT_EQ(own.combine_raises, combined.raises);
      EXPECT_GT(dispatched.raises + combined.raises, 0);
    });
  }
}

TEST_P(AgreementTest, ARealExchangeReservesTheSameMemory) {
  const auto routes = make_routes(scenario_, {.skew = 1, .has_uneven_tokens = true});
  const Traffic traffic = count_traffic(scenario_, 8, routes);
  run(routes, [&](const CpuExchange& exchange, const Plan& plan) {
    SCOPED_TRACE("rank " + std::to_string(exchange.rank()));
    const Memory memory = memory_of(scenario_, traffic, exchange.rank());
    const Footprint footprint = exchange.footprint();
    EXPECT_EQ(memory.cpu.control(), static_cast<uint64_t>(footprint.control_bytes));
    EXPECT_EQ(memory.cpu.signals, exchange.signals.size() * sizeof(uint64_t));
    EXPECT_EQ(memory.output, static_cast<uint64_t>(plan.num_rows() * scenario_.row_bytes));
    uint64_t records = 0;
    for (int from = 0; from < scenario_.num_ranks; ++from) {
      const Arrivals& pair = plan.data().received[static_cast<size_t>(from)];
      records += from == exchange.rank() ? 0 : encode_records(pair).size();
    }
    EXPECT_EQ(memory.cpu.records_used, records);
    if (!std::get<2>(GetParam())) {  // else combine alone is staged
      EXPECT_EQ(memory.cpu.staging, static_cast<uint64_t>(footprint.staging_bytes));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    AgreementTest,
    testing::Combine(testing::Values(2, 3, 4), testing::Values("loopback", "shm"), testing::Bool()),
    [](const testing::TestParamInfo<Param>& param) {
      return std::to_string(std::get<0>(param.param)) + "_" + std::get<1>(param.param) +
             (std::get<2>(param.param) ? "_direct" : "_staged");
    }
);

}  // namespace
}  // namespace weft::sim
