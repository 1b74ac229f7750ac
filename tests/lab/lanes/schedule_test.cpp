// SPDX-License-Identifier: Apache-2.0
// Checks which step waits for which.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>

#include "lab/lanes/plain_nodes.hpp"

namespace weft::overlap::test {
namespace {

// reaches[a][b]: step a has ended before step b begins, whatever the lanes' speed.
using Reach = std::vector<std::vector<bool>>;

// Returns the order by transitive closure.
Reach order_of(const Schedule& steps) {
  Reach reaches(steps.size(), std::vector<bool>(steps.size(), false));
  std::array<int, kNumLanes> last = {-1, -1};
  for (size_t b = 0; b < steps.size(); ++b) {
    std::vector<int> before = steps[b].waits;
    if (int& previous = last[lane_idx(steps[b].lane)]; previous >= 0) {
      before.push_back(previous);
    }
    last[lane_idx(steps[b].lane)] = static_cast<int>(b);
    for (const int wait : before) {
      const auto direct = static_cast<size_t>(wait);
      reaches[direct][b] = true;
      for (size_t a = 0; a < steps.size(); ++a) {
        reaches[a][b] = reaches[a][b] || reaches[a][direct];
      }
    }
  }
  return reaches;
}

std::map<std::string, size_t> index_of_names(const Schedule& schedule) {
  std::map<std::string, size_t> idx;
  for (size_t step = 0; step < schedule.size(); ++step) {
    EXPECT_TRUE(idx.emplace(schedule[step].name, step).second);
  }
  return idx;
}

// The nodes of a micro-batch in the order of its forward, without the direction: "m0.L1.mlp".
std::vector<std::string> chain_of(int micro_batch, const PlainChunk& chunk) {
  std::vector<std::string> names;
  const auto add = [&](bool is_there, std::string_view layer, NodeKind node) {
    if (is_there) {
      names.push_back(fmt::format("m{}{}.{}", micro_batch, layer, node_name(node)));
    }
  };
  add(chunk.has_ends, "", NodeKind::kPreProcess);
  for (int idx = 0; idx < chunk.num_layers; ++idx) {
    const std::string layer = fmt::format(".L{}", idx);
    add(true, layer, NodeKind::kPreDispatch);
    add(chunk.is_moe, layer, NodeKind::kMoeDispatch);
    add(true, layer, NodeKind::kMlp);
    add(chunk.is_moe, layer, NodeKind::kMoeCombine);
  }
  add(chunk.has_ends, "", NodeKind::kPostProcess);
  return names;
}

// Nodes follow one another forward and back.
void expect_safe(const Schedule& schedule, const PlainChunk& chunk, int num_micro_batches) {
  const Reach reaches = order_of(schedule);
  const std::map<std::string, size_t> idx = index_of_names(schedule);
  const auto expect_order = [&](const std::string& first, const std::string& second) {
    EXPECT_TRUE(reaches[idx.at(first)][idx.at(second)]) << first << " and " << second;
  };
  for (int micro_batch = 0; micro_batch < num_micro_batches; ++micro_batch) {
    const std::vector<std::string> chain = chain_of(micro_batch, chunk);
    for (size_t node = 0; node < chain.size(); ++node) {
      const std::string last = chain[node] + ".bwd";
      if (node + 1 < chain.size()) {
        expect_order(chain[node] + ".fwd", chain[node + 1] + ".fwd");
        expect_order(chain[node + 1] + ".bwd", last);
      } else {
        expect_order(chain[node] + ".fwd", last);
      }
      if (idx.contains(chain[node] + ".backward_dw")) {
        expect_order(last, chain[node] + ".backward_dw");
      }
    }
  }
}

TEST(ScheduleTest, IsSafeForEveryShapeOfModel) {
  for (int choice = 0; choice < 16; ++choice) {
    const auto has = [&](int bit) { return (choice >> bit & 1) != 0; };
    for (int layers = 1; layers <= 4; ++layers) {
      SCOPED_TRACE(fmt::format("choice {}, {} layers", choice, layers));
      const PlainChunk chunk = {layers, has(0), has(1), has(2)};
      const MicroBatches batches = {3, [&](int) { return plain_nodes(chunk); }};
      expect_safe(
          make_schedule(batches, pipeline_order({.num_micro_batches = 3}), has(3)), chunk, 3
      );
    }
  }
}

TEST(ScheduleTest, LeavesOutWhatADenseLayerHasNot) {
  const PlainChunk chunk = {1, false, false, false};
  const std::vector<std::string> expected = {
      "m0.L0.pre_dispatch_computation.fwd",
      "m0.L0.mlp.fwd",
      "m0.join.fwd",
      "m1.L0.pre_dispatch_computation.fwd",
      "m0.L0.mlp.bwd",
      "m1.L0.mlp.fwd",
      "m0.L0.pre_dispatch_computation.bwd",
      "m1.join.fwd",
      "m0.join.bwd",
      "m1.L0.mlp.bwd",
      "m1.L0.pre_dispatch_computation.bwd",
      "m1.join.bwd",
  };
  const MicroBatches batches = {2, [&](int) { return plain_nodes(chunk); }};
  EXPECT_EQ(step_names(schedule_overlapped(batches)), expected);
}

TEST(ScheduleTest, GivesEveryRankTheSameOrderOfExchanges) {
  const Schedule schedule = schedule_overlapped({2, [](int) { return plain_nodes({2}); }});
  const std::vector<std::string> expected = {
      "m0.L0.moe_dispatch.fwd",
      "m0.L0.moe_combine.fwd",
      "m0.L1.moe_dispatch.fwd",
      "m0.L1.moe_combine.fwd",
      "m0.L1.moe_combine.bwd",
      "m1.L0.moe_dispatch.fwd",
      "m0.L1.moe_dispatch.bwd",
      "m1.L0.moe_combine.fwd",
      "m0.L0.moe_combine.bwd",
      "m1.L1.moe_dispatch.fwd",
      "m0.L0.moe_dispatch.bwd",
      "m1.L1.moe_combine.fwd",
      "m1.L1.moe_combine.bwd",
      "m1.L1.moe_dispatch.bwd",
      "m1.L0.moe_combine.bwd",
      "m1.L0.moe_dispatch.bwd",
  };
  EXPECT_EQ(step_names(schedule, Lane::kExchange), expected);
}

TEST(ScheduleTest, LetsExchangesRunWithTheOtherMicroBatch) {
  const Schedule schedule = schedule_overlapped({2, [](int) { return plain_nodes({2}); }});
  const Reach reaches = order_of(schedule);
  const std::map<std::string, size_t> idx = index_of_names(schedule);
  const auto are_free_of_each_other = [&](const char* a, const char* b) {
    return !reaches[idx.at(a)][idx.at(b)] && !reaches[idx.at(b)][idx.at(a)];
  };
  EXPECT_TRUE(are_free_of_each_other("m0.L1.moe_combine.bwd", "m1.L0.pre_dispatch_computation.fwd")
  );
  EXPECT_TRUE(are_free_of_each_other("m1.L0.moe_dispatch.fwd", "m0.L1.mlp.bwd"));
  EXPECT_TRUE(are_free_of_each_other("m0.L1.moe_dispatch.bwd", "m0.L1.mlp.backward_dw"));
  EXPECT_TRUE(are_free_of_each_other("m0.L1.moe_dispatch.bwd", "m1.L0.mlp.fwd"));
  EXPECT_TRUE(are_free_of_each_other("m1.L0.moe_combine.fwd", "m0.L1.pre_dispatch_computation.bwd")
  );
  EXPECT_FALSE(are_free_of_each_other("m0.L1.moe_dispatch.bwd", "m0.L1.mlp.bwd"));
}

}  // namespace
}  // namespace weft::overlap::test
