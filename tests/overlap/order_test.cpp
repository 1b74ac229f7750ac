// SPDX-License-Identifier: Apache-2.0
// The order of issue, name by name.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "weft/overlap.hpp"

namespace weft::overlap::test {
namespace {

using Names = std::vector<std::string>;

// "f.L0.mlp.forward", "b.release"
std::string name_of(const PairStep& step) {
  const auto action = kActionNames[static_cast<size_t>(step.action)];
  const std::string layer = step.layer < 0 ? "" : fmt::format(".L{}", step.layer);
  const std::string node =
      step.action <= Action::kWeightGradient ? fmt::format(".{}", node_name(step.node)) : "";
  return fmt::format("{}{}{}.{}", step.is_backward ? 'b' : 'f', layer, node, action);
}

Names names_of(const PairShape& shape) {
  Names names;
  for (const PairStep& step : pair_order(shape)) {
    names.push_back(name_of(step));
  }
  return names;
}

// One pair of layers, b's not the last of its backward.
const Names kLayerPair = {
    "b.Lj.mtp_post_process.backward",
    "b.Lj.moe_combine.backward",
    "f.Li.pre_dispatch_computation.forward",
    "b.Lj.mlp.backward",
    "f.Li.moe_dispatch.forward",
    "b.Lj.mlp.backward_dw",
    "b.Lj.moe_dispatch.backward",
    "f.Li.mlp.forward",
    "f.Li.moe_combine.forward",
    "b.Lj.pre_dispatch_computation.backward",
    "f.Li.mtp_post_process.forward",
    "b.Lj.pre_dispatch_computation.backward_dw",
    "b.Lj.release_layer",
};

const Names kEarlyLayerPair = {
    "b.Lj.mtp_post_process.backward",
    "b.Lj.moe_combine.backward",
    "f.Li.pre_dispatch_computation.forward",
    "b.Lj.mlp.backward",
    "f.Li.moe_dispatch.forward",
    "b.Lj.mlp.backward_dw",
    "b.Lj.moe_dispatch.backward",
    "b.Lj.pre_dispatch_computation.backward",
    "f.Li.mlp.forward",
    "f.Li.moe_combine.forward",
    "f.Li.mtp_post_process.forward",
    "b.Lj.pre_dispatch_computation.backward_dw",
    "b.Lj.release_layer",
};

// A pair of the lists above with its indices; -1: that side is not there.
void append_pair(Names& names, const Names& pair, int f_layer, int b_layer) {
  for (std::string name : pair) {
    const bool is_forward = name[0] == 'f';
    const int layer = is_forward ? f_layer : b_layer;
    const bool is_left_for_later =
        !is_forward && layer == 0 && name.ends_with("computation.backward_dw");
    if (layer >= 0 && !is_left_for_later) {
      names.push_back(name.replace(3, 1, std::to_string(layer)));
    }
  }
}

Names expected_order(int f_layers, int b_layers, const Names& pair) {
  Names names = {
      "f.pre_forward",
      "f.pre_process.forward",
      "b.pre_backward",
      "b.post_process.backward",
      "b.post_process.backward_dw"};
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
       "b.L0.pre_dispatch_computation.backward_dw",
       "f.post_process.forward",
       "b.pre_process.backward",
       "b.pre_process.backward_dw",
       "f.join",
       "b.join",
       "b.release"}
  );
  return names;
}

TEST(PairOrderTest, PairsLayersFromBothEnds) {
  for (int f_layers = 1; f_layers <= 4; ++f_layers) {
    for (int b_layers = 1; b_layers <= 4; ++b_layers) {
      SCOPED_TRACE(fmt::format("{} with {}", f_layers, b_layers));
      EXPECT_EQ(names_of({f_layers, b_layers}), expected_order(f_layers, b_layers, kLayerPair));
    }
  }
}

TEST(PairOrderTest, ReleasesTheAttentionEarlyIfAsked) {
  for (int layers = 1; layers <= 4; ++layers) {
    SCOPED_TRACE(layers);
    EXPECT_EQ(names_of({layers, layers, true}), expected_order(layers, layers, kEarlyLayerPair));
  }
}

TEST(PairOrderTest, LeavesOutASideThatIsNotThere) {
  for (const bool is_backward : {false, true}) {
    const Names both = expected_order(2, 2, kLayerPair);
    Names expected;
    std::ranges::copy_if(both, std::back_inserter(expected), [&](const std::string& name) {
      return (name[0] == 'b') == is_backward;
    });
    const PairShape shape = is_backward ? PairShape{{}, 2} : PairShape{2, {}};
    EXPECT_EQ(names_of(shape), expected);
  }
  EXPECT_TRUE(pair_order({}).empty());
}

TEST(PairOrderTest, WorksWithoutLayers) {
  const Names expected = {
      "f.pre_forward",
      "f.pre_process.forward",
      "f.post_forward",
      "f.post_process.forward",
      "f.join"};
  EXPECT_EQ(names_of({.forward_layers = 0}), expected);
}

TEST(OverlapSettingsTest, CallsTakeAPartOfTheGpu) {
  EXPECT_EQ(overlapped_sms(132, true), 64);
  EXPECT_EQ(overlapped_sms(132, false), 32);
  EXPECT_EQ(overlapped_sms(4, true), 2);
}

}  // namespace
}  // namespace weft::overlap::test
