// SPDX-License-Identifier: Apache-2.0
// A woven run gives the bits of a sequential one.
#include <gtest/gtest.h>

#include <cstring>

#include "lab/lanes/numeric_model.hpp"

namespace weft::overlap::test {
namespace {

struct Result {
  Row losses;
  Row gradients;
  int num_live_cells = 0;
};

MicroBatches batches_of(NumericModel& model, const NumericOptions& options) {
  return {options.num_micro_batches, [&](int idx) { return model.nodes(idx); }};
}

Result result_of(const NumericModel& model) {
  return {model.losses(), model.gradients(), model.num_live_cells()};
}

Result run_in_turn(const NumericOptions& options) {
  NumericModel model(options);
  overlap::run_in_turn(batches_of(model, options));
  return result_of(model);
}

Result run_woven(const NumericOptions& options, bool early) {
  NumericModel model(options);
  const Schedule schedule = make_schedule(
      batches_of(model, options),
      pipeline_order({.num_micro_batches = options.num_micro_batches}),
      early
  );
  run_on_threads(schedule);
  return result_of(model);
}

bool same_bits(const Row& a, const Row& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class OverlapNumericTest : public testing::TestWithParam<int> {};

TEST_P(OverlapNumericTest, GivesTheBitsOfTheSequentialRun) {
  const int layers = GetParam();
  const Result expected = run_in_turn({layers, 4});
  ASSERT_GT(expected.losses[0], 0);
  ASSERT_NE(expected.losses[0], expected.losses[1]);
  for (int choice = 0; choice < 4; ++choice) {
    SCOPED_TRACE(choice);
    const bool defer = (choice & 1) != 0;
    const bool early = (choice & 2) != 0;
    for (int round = 0; round < 10; ++round) {
      const Result woven = run_woven({layers, 4, defer}, early);
      EXPECT_TRUE(same_bits(woven.losses, expected.losses));
      EXPECT_TRUE(same_bits(woven.gradients, expected.gradients));
      EXPECT_EQ(woven.num_live_cells, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, OverlapNumericTest, testing::Values(1, 2, 3, 4));

// Or equal bits would mean nothing.
TEST(OverlapNumericModelTest, SeesAnotherOrderOfMicroBatches) {
  const NumericOptions options = {2, 4};
  const Result expected = run_in_turn(options);
  NumericModel model(options);
  const auto reversed = [&](int idx) { return model.nodes(options.num_micro_batches - 1 - idx); };
  run_on_threads(schedule_overlapped({options.num_micro_batches, reversed}));
  EXPECT_TRUE(same_bits(model.losses(), expected.losses));
  EXPECT_FALSE(same_bits(model.gradients(), expected.gradients));
}

TEST(OverlapNumericModelTest, ThrowsWhenAReleasedValueIsRead) {
  NumericModel model({1, 1, true});
  const auto nodes = [&](int idx) {
    ChunkNodes made = model.nodes(idx);
    Node& node = made.at(NodeKind::kPreDispatch, 0);  // its weight gradient drops what this reads
    std::swap(node.backward, node.weight_gradient);
    return made;
  };
  EXPECT_THROW(run_on_threads(schedule_overlapped({1, nodes})), std::logic_error);
}

}  // namespace
}  // namespace weft::overlap::test
