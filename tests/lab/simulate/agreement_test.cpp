// SPDX-License-Identifier: Apache-2.0
// One domain or several, simulated, against what an exchange on the CPU does with the same routing:
// rows, bytes, memory, and every signal as its peers have raised it.
#include <gtest/gtest.h>

#include <functional>
#include <span>
#include <string>
#include <tuple>

#include "cpu/exchange.hpp"
#include "plan/build.hpp"
#include "plan/domain_traffic.hpp"
#include "simulate_cases.hpp"

namespace weft {

// Parts of an exchange that the simulator has to agree with.
struct CpuInside {
  const CpuExchange& exchange;
  [[nodiscard]] const SignalMap& signals() const { return exchange.signals_; }
  [[nodiscard]] const Transport& transport() const { return *exchange.transport_; }
  [[nodiscard]] const Domains& domains() const { return *exchange.domains_; }
};

}  // namespace weft

namespace weft::sim {
namespace {

// Every signal of this rank.
std::vector<uint64_t> signals_of(const CpuExchange& exchange) {
  std::vector<uint64_t> values;
  for (uint32_t signal = 0; signal < CpuInside{exchange}.signals().size(); ++signal) {
    values.push_back(CpuInside{exchange}.transport().signal_value(signal));
  }
  return values;
}

// Signals of chunks: how many have grown, and by how much in all.
struct Grown {
  int64_t signals = 0;
  int64_t raises = 0;
};

Grown grown(
    const SignalMap& map, std::span<const uint64_t> before, std::span<const uint64_t> after
) {
  Grown grown;
  for (uint32_t signal = map.dispatch(0, 0); signal < map.size(); ++signal) {
    grown.signals += after[signal] > before[signal] ? 1 : 0;
    grown.raises += static_cast<int64_t>(after[signal] - before[signal]);
  }
  return grown;
}

// Bytes that all others wrote into this rank's room for records.
uint64_t record_bytes(const CpuExchange& exchange, const PlanData& plan) {
  const Domains& domains = CpuInside{exchange}.domains();
  uint64_t bytes = 0;
  for (int from = 0; from < domains.num_ranks(); ++from) {
    const ForwardedSource* carried = plan.between ? plan.between->find_forwarded(from) : nullptr;
    if (carried != nullptr) {
      for (size_t m = 0; m < domains.near().size(); ++m) {
        bytes += sizeof(uint64_t) + encode_records(forwarded_pair(plan, *carried, m)).size();
      }
    } else if (from != exchange.context().rank) {
      bytes += encode_records(plan.received[static_cast<size_t>(from)]).size();
    }
  }
  return bytes;
}

struct Size {
  int num_ranks;
  int ranks_per_domain;
};

using Param = std::tuple<Size, std::string, bool>;  // transport, output in shared memory

class AgreementTest : public testing::TestWithParam<Param> {
 protected:
  AgreementTest() {
    scenario_ = small_scenario();
    scenario_.num_ranks = std::get<0>(GetParam()).num_ranks;
    scenario_.ranks_per_domain = std::get<0>(GetParam()).ranks_per_domain;
    scenario_.pad_multiple = 8;
  }

  [[nodiscard]] std::vector<std::vector<int>> domains() const {
    std::vector<std::vector<int>> domains(static_cast<size_t>(scenario_.num_domains()));
    for (int rank = 0; rank < scenario_.num_ranks; ++rank) {
      domains[static_cast<size_t>(scenario_.domain_of(rank))].push_back(rank);
    }
    return domains;
  }

  // Each rank after one plan, dispatch and combine.
  struct Done {
    const CpuExchange& exchange;
    const Plan& plan;
    Grown by_dispatch;
    Grown by_combine;
  };

  void run(const std::vector<RouteTable>& routes, const std::function<void(const Done&)>& look)
      const {
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
      CpuExchange exchange(group, config, CpuPlace{.domains = domains()});
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
      const std::vector<uint64_t> planned = signals_of(exchange);
      exchange.dispatch(plan, {.x = tokens}, {.rows = out}, {});
      const std::vector<uint64_t> dispatched = signals_of(exchange);
      exchange.combine(plan, {.rows = out}, {.x = tokens}, {});
      const std::vector<uint64_t> combined = signals_of(exchange);
      look(
          {exchange,
           plan,
           grown(CpuInside{exchange}.signals(), planned, dispatched),
           grown(CpuInside{exchange}.signals(), dispatched, combined)}
      );
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
    run(routes, [&](const Done& done) {
      const int rank = done.exchange.context().rank;
      SCOPED_TRACE("rank " + std::to_string(rank));
      const RankTraffic& own = traffic.ranks[static_cast<size_t>(rank)];
      EXPECT_EQ(own.num_rows, done.plan.num_rows());
      const int64_t moved = own.link_out + own.card_out;
      EXPECT_EQ(moved * scenario_.row_bytes, done.plan.wire_bytes(scenario_.row_bytes));
      EXPECT_EQ(own.routes * scenario_.row_bytes, done.plan.logical_bytes(scenario_.row_bytes));
      const int64_t crossed = own.card_out + own.card_in;  // the latter as sums, on their way back
      EXPECT_EQ(crossed * scenario_.row_bytes, done.exchange.stats().crossing_bytes);
      EXPECT_EQ(crossed > 0, scenario_.num_domains() > 1);
      for (int from = 0; from < scenario_.num_ranks; ++from) {
        EXPECT_EQ(traffic.arrivals(from, rank), done.plan.received_arrivals(from));
      }
      EXPECT_EQ(own.dispatch_signals, done.by_dispatch.signals);
      EXPECT_EQ(own.dispatch_raises, done.by_dispatch.raises);
      EXPECT_EQ(own.combine_signals, done.by_combine.signals);
      EXPECT_EQ(own.combine_raises, done.by_combine.raises);
      EXPECT_GT(own.dispatch_raises + own.combine_raises, 0);
    });
  }
}

TEST_P(AgreementTest, ARealExchangeReservesTheSameMemory) {
  const auto routes = make_routes(scenario_, {.skew = 1, .has_uneven_tokens = true});
  const Traffic traffic = count_traffic(scenario_, 8, routes);
  run(routes, [&](const Done& done) {
    const int rank = done.exchange.context().rank;
    SCOPED_TRACE("rank " + std::to_string(rank));
    const Memory memory = memory_of(scenario_, traffic, rank);
    const Footprint footprint = done.exchange.footprint();
    EXPECT_EQ(memory.cpu.control(), static_cast<uint64_t>(footprint.control_bytes));
    EXPECT_EQ(memory.cpu.signals, CpuInside{done.exchange}.signals().size() * sizeof(uint64_t));
    EXPECT_EQ(memory.output, static_cast<uint64_t>(done.plan.num_rows() * scenario_.row_bytes));
    EXPECT_EQ(memory.cpu.records_used, record_bytes(done.exchange, contents_of(done.plan)));
    if (!std::get<2>(GetParam())) {  // else combine alone is staged, and rows for other ranks
      EXPECT_EQ(memory.cpu.staging, static_cast<uint64_t>(footprint.staging_bytes));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    AgreementTest,
    testing::Combine(
        testing::Values(Size{2, 2}, Size{3, 3}, Size{4, 4}, Size{4, 2}, Size{6, 2}, Size{6, 3}),
        testing::Values("loopback", "shm"),
        testing::Bool()
    ),
    [](const testing::TestParamInfo<Param>& param) {
      const Size size = std::get<0>(param.param);
      const bool has_several = size.ranks_per_domain < size.num_ranks;
      return std::to_string(size.num_ranks) +
             (has_several ? "_by_" + std::to_string(size.ranks_per_domain) : "") + "_" +
             std::get<1>(param.param) + (std::get<2>(param.param) ? "_direct" : "_staged");
    }
);

}  // namespace
}  // namespace weft::sim
