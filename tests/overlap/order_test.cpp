// SPDX-License-Identifier: Apache-2.0
// The order of issue, name by name.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "overlap/check_schedule.hpp"
#include "overlap/chunk_order.hpp"
#include "overlap/no_pipelining.hpp"
#include "overlap/plain_nodes.hpp"
#include "support/errors.hpp"

namespace weft::overlap::test {
namespace {

using weft::test::text_of;
using weft::test::thrown_by;

using Names = std::vector<std::string>;

// The forward of chunk f with the backward of chunk b, whose forward came before. Its steps only.
Names run_of_chunks(
    const PlainChunk& forward, const PlainChunk& backward, const OverlapOptions& options = {}
) {
  Schedule schedule;
  ChunkPlan f(schedule, plain_nodes(forward), "f", 1);
  ChunkPlan b(schedule, plain_nodes(backward), "b", 0);
  issue_chunks(&b, nullptr, options);
  const size_t num_before = schedule.steps().size();
  issue_chunks(&f, &b, options);
  check_schedule(schedule);
  Names names = step_names(schedule);
  names.erase(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(num_before));
  return names;
}

// One pair of layers with all five nodes, b's not the last of its backward.
const Names kLayerPair = {
    "b.Lj.mtp_post_process.bwd",
    "b.Lj.moe_combine.bwd",
    "f.Li.pre_dispatch.fwd",
    "b.Lj.mlp.bwd",
    "f.Li.moe_dispatch.fwd",
    "b.Lj.mlp.backward_dw",
    "b.Lj.moe_dispatch.bwd",
    "f.Li.mlp.fwd",
    "f.Li.moe_combine.fwd",
    "b.Lj.pre_dispatch.bwd",
    "f.Li.mtp_post_process.fwd",
    "b.Lj.pre_dispatch.backward_dw",
};

const Names kEarlyLayerPair = {
    "b.Lj.mtp_post_process.bwd",
    "b.Lj.moe_combine.bwd",
    "f.Li.pre_dispatch.fwd",
    "b.Lj.mlp.bwd",
    "f.Li.moe_dispatch.fwd",
    "b.Lj.mlp.backward_dw",
    "b.Lj.moe_dispatch.bwd",
    "b.Lj.pre_dispatch.bwd",
    "f.Li.mlp.fwd",
    "f.Li.moe_combine.fwd",
    "f.Li.mtp_post_process.fwd",
    "b.Lj.pre_dispatch.backward_dw",
};

// A pair of the list above with its indices; -1: that side is not there.
void append_pair(Names& names, const Names& pair, int f_layer, int b_layer) {
  for (std::string name : pair) {
    const bool is_forward = name[0] == 'f';
    const int layer = is_forward ? f_layer : b_layer;
    const bool is_left_for_later =
        !is_forward && layer == 0 && name.ends_with("dispatch.backward_dw");
    if (layer >= 0 && !is_left_for_later) {
      names.push_back(name.replace(3, 1, std::to_string(layer)));
    }
  }
}

Names expected_run(int f_layers, int b_layers, const Names& pair) {
  Names names = {"f.pre_forward", "f.pre_process.fwd", "b.pre_backward", "b.post_process.bwd"};
  const int both = std::min(f_layers, b_layers);
  for (int idx = 0; idx < both; ++idx) {
    append_pair(names, pair, idx, b_layers - 1 - idx);
  }
  for (int idx = both; idx < b_layers; ++idx) {
    append_pair(names, pair, -1, b_layers - 1 - idx);
  }
  for (int idx = both; idx < f_layers; ++idx) {
    append_pair(names, pair, idx, -1);
  }
  names.insert(
      names.end(),
      {"f.post_forward",
       "b.post_backward",
       "b.L0.pre_dispatch.backward_dw",
       "f.post_process.fwd",
       "b.pre_process.bwd",
       "b.release_state"}
  );
  return names;
}

TEST(OverlapOrderTest, WeavesOneLayerIntoAnother) {
  const PlainChunk chunk = {1, Kind::kMoe, true, false};
  const Names expected = {
      "b.L0.moe_combine.bwd",
      "f.L0.pre_dispatch.fwd",
      "b.L0.mlp.bwd",
      "f.L0.moe_dispatch.fwd",
      "b.L0.mlp.backward_dw",
      "b.L0.moe_dispatch.bwd",
      "f.L0.mlp.fwd",
      "f.L0.moe_combine.fwd",
      "b.L0.pre_dispatch.bwd",
      "b.L0.pre_dispatch.backward_dw",
      "b.release_state",
  };
  EXPECT_EQ(run_of_chunks(chunk, chunk), expected);
}

TEST(OverlapOrderTest, LeavesOutWhatADenseLayerHasNot) {
  const PlainChunk chunk = {1, Kind::kDense, false, false};
  const Names expected = {
      "f.L0.pre_dispatch.fwd",
      "b.L0.mlp.bwd",
      "f.L0.mlp.fwd",
      "b.L0.pre_dispatch.bwd",
      "b.release_state",
  };
  EXPECT_EQ(run_of_chunks(chunk, chunk), expected);
}

TEST(OverlapOrderTest, PairsLayersFromBothEnds) {
  for (int f_layers = 1; f_layers <= 4; ++f_layers) {
    for (int b_layers = 1; b_layers <= 4; ++b_layers) {
      SCOPED_TRACE(fmt::format("{} with {}", f_layers, b_layers));
      const PlainChunk f = {f_layers, Kind::kMtp, true, true, true};
      const PlainChunk b = {b_layers, Kind::kMtp, true, true, true};
      EXPECT_EQ(run_of_chunks(f, b), expected_run(f_layers, b_layers, kLayerPair));
    }
  }
}

TEST(OverlapOrderTest, ReleasesTheAttentionEarlyIfAsked) {
  for (int layers = 1; layers <= 4; ++layers) {
    SCOPED_TRACE(layers);
    const PlainChunk chunk = {layers, Kind::kMtp, true, true, true};
    EXPECT_EQ(
        run_of_chunks(chunk, chunk, {.early_attention_release = true}),
        expected_run(layers, layers, kEarlyLayerPair)
    );
  }
}

TEST(OverlapOrderTest, GivesEveryRankTheSameOrderOfExchanges) {
  Schedule schedule = schedule_overlapped({2, [](int) { return plain_nodes({2}); }});
  const Names expected = {
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

// Dense layers without ends: one micro-batch is two steps forward and two back.
Names forward_of(int m) {
  const std::string name = fmt::format("m{}", m);
  return {name + ".L0.pre_dispatch.fwd", name + ".L0.mlp.fwd", name + ".join"};
}

Names backward_of(int m) {
  const std::string name = fmt::format("m{}", m);
  return {name + ".L0.mlp.bwd", name + ".L0.pre_dispatch.bwd", name + ".release_state"};
}

Names pair_of(int f, int b) {
  const std::string forward = fmt::format("m{}", f);
  const std::string backward = fmt::format("m{}", b);
  return {
      forward + ".L0.pre_dispatch.fwd",
      backward + ".L0.mlp.bwd",
      forward + ".L0.mlp.fwd",
      backward + ".L0.pre_dispatch.bwd",
      backward + ".release_state"};
}

Names joined(const std::vector<Names>& parts) {
  Names names;
  for (const Names& part : parts) {
    names.insert(names.end(), part.begin(), part.end());
  }
  return names;
}

MicroBatches dense_batches(int num) {
  const Work nothing = [](const LaneContext&) {};
  return {num, [](int) { return plain_nodes({1, Kind::kDense, false, false}); }, nothing, nothing};
}

TEST(OverlapOrderTest, RunsTheLastBackwardWithSynchronisation) {
  EXPECT_EQ(
      step_names(schedule_overlapped(dense_batches(1))), joined({forward_of(0), backward_of(0)})
  );
  EXPECT_EQ(
      step_names(schedule_overlapped(dense_batches(2))),
      joined({forward_of(0), {"enter_no_sync"}, pair_of(1, 0), {"exit_no_sync"}, backward_of(1)})
  );
  EXPECT_EQ(
      step_names(schedule_overlapped(dense_batches(4))),
      joined(
          {forward_of(0),
           {"enter_no_sync"},
           pair_of(1, 0),
           pair_of(2, 1),
           pair_of(3, 2),
           {"exit_no_sync"},
           backward_of(3)}
      )
  );
}

TEST(OverlapOrderTest, KnowsTheSequentialOrder) {
  EXPECT_EQ(
      step_names(schedule_sequential(dense_batches(2))),
      joined(
          {{"enter_no_sync"},
           forward_of(0),
           backward_of(0),
           forward_of(1),
           {"exit_no_sync"},
           backward_of(1)}
      )
  );
}

TEST(OverlapOrderTest, RefusesNodesThatDoNotFit) {
  const auto schedule_with = [](const std::function<void(ChunkNodes&)>& change) {
    return text_of(thrown_by([&] {
      MicroBatches batches = {1, [&](int) {
                                ChunkNodes nodes = plain_nodes({1});
                                change(nodes);
                                return nodes;
                              }};
      static_cast<void>(schedule_overlapped(batches));
    }));
  };
  EXPECT_EQ(
      schedule_with([](ChunkNodes& nodes) { nodes.layers[0].mlp.backward = {}; }),
      "schedule: m0.L0.mlp has only one of forward and backward (both or neither)"
  );
  EXPECT_EQ(
      schedule_with([](ChunkNodes& nodes) {
        nodes.post_process.weight_gradient = nodes.post_process.forward;
      }),
      "schedule: m0.post_process has a weight gradient of its own (only pre_dispatch and mlp may "
      "defer it)"
  );
  EXPECT_EQ(
      schedule_with([](ChunkNodes& nodes) { nodes = ChunkNodes(); }),
      "schedule: m0 has no nodes (at least one)"
  );
}

}  // namespace
}  // namespace weft::overlap::test
