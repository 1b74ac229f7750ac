// SPDX-License-Identifier: Apache-2.0
// plan, dispatch and combine with rows given beforehand, captured once in a CUDA graph and replayed
// with other routing and rows in the same memory.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "gpu/epochs.hpp"
#include "gpu/gpu_test.hpp"
#include "gpu/graph_rank.hpp"
#include "support/run_case.hpp"
#include "support/stream.hpp"
#include "support/watch.hpp"

namespace weft::test {
namespace {

constexpr uint64_t kNumCases = 20;

// Cases that differ in everything that a replay may change. `is_routed`: plan and dispatch are one
// call.
std::vector<CaseData> graph_cases(
    const ExchangeSetup& setup,
    Layout layout,
    OutputMemory output,
    const Balancing& balance = {},
    bool is_routed = false
) {
  std::vector<CaseData> cases;
  for (uint64_t i = 0; i < kNumCases + 1; ++i) {
    Case spec;
    spec.seed = 100 + i;
    spec.num_tokens.assign(static_cast<size_t>(setup.num_ranks), 40);
    spec.num_tokens.back() = 17;
    spec.topk = 3;
    spec.layout = layout;
    spec.output = output;
    spec.pad_multiple = layout == Layout::kRankMajor ? 1 : 4;
    spec.hole_fraction = i % 4 == 1 ? 0.5 : 0;
    spec.popularity = i % 5 == 2 ? Popularity::kOneExpert : Popularity::kUniform;
    spec.repeat_experts = true;
    spec.rows = layout == Layout::kExpertStrided ? 12 : 90;  // not always enough
    spec.scale = layout == Layout::kRankMajor ? CombineScale::kNone : CombineScale::kPlanWeights;
    spec.dtype = DType::kBFloat16;
    spec.balance = balance;
    spec.is_routed = is_routed;
    cases.push_back(make_case_data(setup, spec));
  }
  return cases;
}

// All ranks go on, or none.
bool are_all_good(const Group& group, const std::string& failure) {
  const std::byte is_bad{failure.empty() ? uint8_t{0} : uint8_t{1}};
  const auto blocks = group.all_gather({&is_bad, 1});
  return std::all_of(blocks.begin(), blocks.end(), [](const Bytes& block) {
    return block[0] == std::byte{0};
  });
}

// With `epochs` so many calls pass between two replays as far as the GPUs know.
std::string replay_all(
    const Group& group, const std::vector<CaseData>& cases, Watch& watch, uint64_t epochs = 0
) {
  static const uint64_t num_replays = number_from_env("WEFT_GRAPH_REPLAYS", kNumCases);
  const auto own = static_cast<size_t>(group.rank());
  watch.enter(own, "makes its exchange");
  Exchange exchange(group, cases[0].setup.config(group.rank()));
  watch.enter(own, "makes its tensors");
  const TestStream stream(exchange.config().device);
  GraphRank rank(exchange, cases[0]);
  watch.enter(own, "makes its first calls");
  rank.make_calls(cases[0], stream.get());  // all memory that the calls need
  watch.enter(own, "waits for its first calls");
  stream.wait();
  exchange.check();
  std::string failure = rank.difference(cases[0]);
  watch.enter(own, "makes its graph");
  const Graph graph(stream, [&] { rank.make_calls(cases[0], stream.get()); });
  for (uint64_t i = 1; i <= num_replays; ++i) {
    watch.enter(own, "waits for the others' hosts");
    if (!are_all_good(group, failure)) {
      break;
    }
    const CaseData& data = cases[1 + (i - 1) % kNumCases];
    watch.enter(own, "loads");
    rank.load(data);
    if (epochs > 0) {
      set_epoch(exchange, i * epochs - 2);
      group.barrier();
    }
    watch.enter(own, "launches");
    graph.launch();
    watch.enter(own, "waits for its stream");
    stream.wait();
    exchange.check();
    watch.enter(own, "compares");
    failure = rank.difference(data);
    if (i % 7 == 0) {  // ordinary calls in between
      watch.enter(own, "makes ordinary calls");
      const std::string between = run_cases(exchange, {cases.data(), 1});
      failure = failure.empty() ? between : failure;
    }
  }
  return failure;
}

class GpuGraphTest : public GpuParamTest<int> {};

TEST_P(GpuGraphTest, ReplaysWithChangingRouting) {
  FailureCount failures;
  for (const int gpus : gpu_counts()) {
    for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
      for (const OutputMemory output : {OutputMemory::kDirect, OutputMemory::kStaged}) {
        ExchangeSetup setup = gpu_setup(GetParam(), gpus);
        setup.mover = output == OutputMemory::kDirect ? movers_here().back() : Mover::kVector;
        setup.copy_engines = output == OutputMemory::kStaged;
        const auto cases = graph_cases(setup, layout, output);
        std::vector<std::string> texts(static_cast<size_t>(setup.num_ranks));
        Watch watch(setup.num_ranks);
        run_threads(setup.num_ranks, [&](const Group& group) {
          auto& text = texts[static_cast<size_t>(group.rank())];
          try {
            text = replay_all(group, cases, watch);
          } catch (const Error& error) {
            text = fmt::format("{} {}", error.what(), describe(setup, cases[0].spec));
          }
        });
        for (const std::string& text : texts) {
          failures.add(text);
        }
        if (failures.are_too_many()) {
          return;
        }
      }
    }
  }
}

// Other experts are popular each time, so that replicas come and go.
class GpuReplicaGraphTest : public GpuParamTest<std::tuple<int, bool>> {};

TEST_P(GpuReplicaGraphTest, ReplaysWithReplicas) {
  const auto [num_ranks, is_routed] = GetParam();
  FailureCount failures;
  for (const int gpus : gpu_counts()) {
    for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
      const ExchangeSetup setup = gpu_setup(num_ranks, gpus);
      Balancing balance = {.replicas = 2};
      if (layout == Layout::kExpertMajor) {  // the first expert of the next rank, and none
        for (int rank = 0; rank < setup.num_ranks; ++rank) {
          const int next = (rank + 1) % setup.num_ranks;
          balance.placement.push_back(next == rank ? -1 : 4 * next);
          balance.placement.push_back(-1);
        }
      }
      const auto cases = graph_cases(setup, layout, OutputMemory::kStaged, balance, is_routed);
      Watch watch(setup.num_ranks);
      std::vector<std::string> texts(static_cast<size_t>(setup.num_ranks));
      run_threads(setup.num_ranks, [&](const Group& group) {
        auto& text = texts[static_cast<size_t>(group.rank())];
        try {
          text = replay_all(group, cases, watch);
        } catch (const Error& error) {
          text = fmt::format("{} {}", error.what(), describe(setup, cases[0].spec));
        }
      });
      for (const std::string& text : texts) {
        failures.add(text);
      }
      if (failures.are_too_many()) {
        return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, GpuReplicaGraphTest, testing::Combine(testing::Values(1, 2, 4), testing::Bool())
);

// Every replay crosses a multiple of 2^28 calls, so that 2^31 and 2^32 are among them.
TEST_P(GpuGraphTest, ReplaysWhereEpochsComeRound) {
  const ExchangeSetup setup = gpu_setup(GetParam(), num_gpus());
  const auto cases = graph_cases(setup, Layout::kExpertMajor, OutputMemory::kStaged);
  Watch watch(setup.num_ranks);
  run_threads(setup.num_ranks, [&](const Group& group) {
    EXPECT_EQ(replay_all(group, cases, watch, uint64_t{1} << 28), "");
  });
}

// An eager call's plan is its own, whatever is replayed until it is used.
TEST_P(GpuGraphTest, AReplayLeavesPlansOfEagerCallsAlone) {
  for (const bool is_routed : {false, true}) {
    const ExchangeSetup setup = gpu_setup(GetParam(), num_gpus());
    const auto cases =
        graph_cases(setup, Layout::kExpertStrided, OutputMemory::kStaged, {}, is_routed);
    run_threads(setup.num_ranks, [&](const Group& group) {
      Exchange exchange(group, setup.config(group.rank()));
      const TestStream stream(exchange.config().device);
      GraphRank replayed(exchange, cases[0]);
      GraphRank eager(exchange, cases[0]);
      replayed.make_calls(cases[0], stream.get());
      stream.wait();
      const Graph graph(stream, [&] { replayed.make_calls(cases[0], stream.get()); });
      replayed.drop_plan();
      for (size_t i = 1; i <= 4; ++i) {
        eager.load(cases[i]);
        eager.send(cases[i], stream.get());
        replayed.load(cases[i + 4]);
        group.barrier();
        graph.launch();
        eager.bring(cases[i], stream.get());
        stream.wait();
        exchange.check();
        EXPECT_EQ(eager.difference(cases[i]), "");
      }
      EXPECT_EQ(exchange.stats().num_captured, is_routed ? 2 : 3);
      group.barrier();
    });
  }
}

// Two graphs share a plan's memory once the host has dropped it; out of order they fail by name.
TEST_P(GpuGraphTest, RefusesAPlanThatAnotherGraphHasWrittenOver) {
  const ExchangeSetup setup = gpu_setup(GetParam(), num_gpus());
  const auto cases = graph_cases(setup, Layout::kExpertStrided, OutputMemory::kStaged);
  run_threads(setup.num_ranks, [&](const Group& group) {
    Exchange exchange(group, setup.config(group.rank()));
    const TestStream stream(exchange.config().device);
    GraphRank rank(exchange, cases[0]);
    GraphRank other(exchange, cases[0]);
    rank.make_calls(cases[0], stream.get());
    stream.wait();
    const Graph sends(stream, [&] { rank.send(cases[0], stream.get()); });
    const Graph brings(stream, [&] { rank.bring(cases[0], stream.get()); });
    const auto replay = [&](std::initializer_list<const Graph*> graphs) {
      group.barrier();
      for (const Graph* graph : graphs) {
        graph->launch();
      }
      stream.wait();
    };
    const auto expect_refused = [&] {
      try {
        exchange.check();
        ADD_FAILURE() << "nothing was refused";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
        EXPECT_NE(
            std::string(error.what()).find("another plan lies in the memory"), std::string::npos
        ) << error.what();
      }
      group.barrier();
    };
    replay({&brings});  // before its plan was ever made
    expect_refused();
    rank.drop_plan();
    const Graph all(stream, [&] { other.make_calls(cases[0], stream.get()); });
    other.drop_plan();
    rank.load(cases[1]);
    other.load(cases[2]);
    replay({&sends, &brings, &all, &sends, &brings});
    exchange.check();
    replay({&sends, &all, &brings});
    expect_refused();
    rank.load(cases[3]);
    replay({&sends, &brings});
    exchange.check();
    rank.make_calls(cases[3], stream.get());
    stream.wait();
    EXPECT_EQ(rank.difference(cases[3]), "");
    group.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(All, GpuGraphTest, testing::Values(1, 2, 4));

}  // namespace
}  // namespace weft::test
