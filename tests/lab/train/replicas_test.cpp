// SPDX-License-Identifier: Apache-2.0
#include "train/replicas.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "replicas_case.hpp"
#include "training_runs.hpp"
#include "weft/error.hpp"

namespace weft::moe {
namespace {

TEST(ReplicasTest, HaveTheirMastersWeightsAndGiveThemTheirGradients) {
  for (const int num_ranks : {1, 2, 4}) {
    SCOPED_TRACE(testing::Message() << num_ranks << " ranks");
    check_replicas(num_ranks, small_config());
  }
}

// The gradients of an expert with replicas are sums of parts, rounded differently in the last bits
// of fp32; without the replicas' part, or with other weights there, the runs part at once.
TEST(ReplicasTest, LossIsThatOfTheRunWithoutThem) {
  for (const int num_micro_batches : {1, 3}) {
    for (const int num_ranks : {1, 2, 4}) {
      SCOPED_TRACE(testing::Message() << num_ranks << " ranks, " << num_micro_batches << " parts");
      TrainConfig config = small_config();
      config.num_micro_batches = num_micro_batches;
      const TrainingRun plain = train(num_ranks, config, 20);
      config.replicas = 2;
      const TrainingRun balanced = train(num_ranks, config, 20);
      EXPECT_EQ(balanced.reports[0].loss, plain.reports[0].loss);
      for (size_t i = 0; i < plain.reports.size(); ++i) {
        const double expected = plain.reports[i].loss;
        EXPECT_NEAR(balanced.reports[i].loss, expected, 1e-5 * expected) << "step " << i;
        EXPECT_NEAR(balanced.reports[i].balance_loss, plain.reports[i].balance_loss, 1e-3);
      }
    }
  }
}

TEST(ReplicasTest, MakeRanksEvenAndTwoRunsAgree) {
  TrainConfig config = small_config();
  config.replicas = 2;
  const TrainingRun run = train(4, config, 10);
  EXPECT_EQ(train(4, config, 10).fingerprint, run.fingerprint);
  for (const StepReport& report : run.reports) {
    EXPECT_DOUBLE_EQ(report.mean_load, 2 * 67 * 2 / 4.0);  // blocks, tokens, top-k; ranks
    EXPECT_LT(report.busiest, report.unbalanced);
    EXPECT_GE(report.busiest, report.mean_load);
  }
}

TEST(ReplicasTest, OverlapHasTheBitsOfTheSequentialRun) {
  for (const int num_micro_batches : {2, 3}) {
    for (const int num_ranks : {1, 2, 4}) {
      TrainConfig config = small_config();
      config.num_micro_batches = num_micro_batches;
      const TrainingRun plain = train(num_ranks, config, 1);
      config.replicas = 2;
      const TrainingRun expected = train(num_ranks, config, 10);
      config.overlap.is_on = true;
      for (const bool delays : {false, true}) {
        SCOPED_TRACE(
            testing::Message() << num_ranks << " ranks, " << num_micro_batches << " parts, delayed "
                               << delays
        );
        config.overlap.delays_weight_gradients = delays;
        for (int run = 0; run < 2; ++run) {
          const TrainingRun overlapped = train(num_ranks, config, 10);
          EXPECT_EQ(overlapped.reports[0].loss, plain.reports[0].loss);
          EXPECT_EQ(overlapped.fingerprint, expected.fingerprint);
          for (size_t i = 0; i < expected.reports.size(); ++i) {
            EXPECT_EQ(overlapped.reports[i].loss, expected.reports[i].loss) << "step " << i;
            EXPECT_EQ(overlapped.reports[i].busiest, expected.reports[i].busiest) << "step " << i;
          }
        }
      }
    }
  }
}

TEST(ReplicasTest, CheckpointsHaveNone) {
  const std::string path = testing::TempDir() + "/replicas_test.ckpt";
  TrainConfig config = small_config();
  config.replicas = 2;
  const auto save = [&](Trainer& trainer) { trainer.save(path); };
  const TrainingRun balanced = train(4, config, 3, {}, save);
  config.replicas = 0;
  const auto resume = [&](Trainer& trainer) { trainer.resume(path); };
  EXPECT_EQ(train(2, config, 0, resume).fingerprint, balanced.fingerprint);
  std::filesystem::remove(path);
}

TEST(ReplicasTest, RefusesWhatItCannotDo) {
  TrainConfig config = small_config();
  config.replicas = 17;
  EXPECT_THROW(train(1, config, 0), Error);
  config.replicas = -1;
  EXPECT_THROW(train(1, config, 0), Error);
}

}  // namespace
}  // namespace weft::moe
