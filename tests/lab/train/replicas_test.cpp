// SPDX-License-Identifier: Apache-2.0
// Replicas of popular experts change no bit of a training whose products are of blocks.
#include "train/layers/replicas.hpp"

#include <gtest/gtest.h>

#include "training_runs.hpp"

namespace weft::moe {
namespace {

// A few blocks of rows for each expert, and a token with choices whose sum depends on its order.
TrainConfig block_config() {
  TrainConfig config = small_config();
  config.model.topk = 3;
  config.global_batch = 6000;
  config.has_blocks = true;
  return config;
}

void expect_same(const TrainingRun& found, const TrainingRun& expected) {
  ASSERT_EQ(found.reports.size(), expected.reports.size());
  for (size_t i = 0; i < found.reports.size(); ++i) {
    EXPECT_EQ(found.reports[i].loss, expected.reports[i].loss) << "step " << i;
    EXPECT_EQ(found.reports[i].routes, expected.reports[i].routes) << "step " << i;
  }
  EXPECT_EQ(found.fingerprint, expected.fingerprint);
}

// Rows that rank 0 received in all steps, in bytes.
int64_t received(const TrainingRun& run) {
  int64_t sum = 0;
  for (const StepReport& report : run.reports) {
    sum += report.dispatch.logical_bytes;
  }
  return sum;
}

TEST(ReplicasTest, StepsHaveTheBitsOfThoseWithoutThem) {
  TrainConfig config = block_config();
  for (const int num_ranks : {2, 4, 8}) {
    SCOPED_TRACE(num_ranks);
    config.replicas = 0;
    const TrainingRun without = train(num_ranks, config, 2);
    config.replicas = 2;
    const TrainingRun with = train(num_ranks, config, 2);
    expect_same(with, without);
    EXPECT_NE(received(with), received(without));
  }
}

TEST(ReplicasTest, OverlapChangesNoBit) {
  TrainConfig config = block_config();
  config.num_micro_batches = 2;
  const TrainingRun expected = train(2, config, 3);
  config.overlap.is_on = true;
  for (const bool delays : {false, true}) {
    config.overlap.delays_weight_gradients = delays;
    config.replicas = 2;
    const TrainingRun with = train(2, config, 3);
    expect_same(with, expected);
    EXPECT_NE(received(with), received(expected));
  }
}

TEST(ReplicasTest, RowsInBf16HaveTheSameBits) {
  TrainConfig config = block_config();
  config.dtype = DType::kBFloat16;
  const TrainingRun expected = train(2, config, 3);
  config.replicas = 1;
  const TrainingRun with = train(2, config, 3);
  expect_same(with, expected);
  EXPECT_NE(received(with), received(expected));
}

}  // namespace
}  // namespace weft::moe
