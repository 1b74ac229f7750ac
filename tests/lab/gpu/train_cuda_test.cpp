// SPDX-License-Identifier: Apache-2.0
// Training on a GPU, ranks as threads that share it, against training on the host.
#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>
#include <set>
#include <string>
#include <unistd.h>

#include "lab/train/replicas_case.hpp"
#include "lab/train/training_runs.hpp"
#include "train/gpu/rank.hpp"
#include "train/lanes/schedule.hpp"
#include "train/trainer.hpp"
#include "train_gpu_test.hpp"

namespace weft::moe {
namespace {

TrainConfig gpu_config() {
  TrainConfig config = small_config();
  config.dtype = DType::kBFloat16;
  config.device = {Device::Kind::kCuda, 0};
  return config;
}

TrainConfig host_config() {
  TrainConfig config = gpu_config();
  config.device = {};
  return config;
}

TEST_F(TrainGpuTest, LossFollowsThatOfTheHost) {
  constexpr int kSteps = 20;
  const TrainingRun host = train(1, host_config(), kSteps);
  for (const int num_ranks : {1, 2, 4}) {
    const TrainingRun gpu = train(num_ranks, gpu_config(), kSteps);
    EXPECT_NEAR(gpu.reports[0].loss, host.reports[0].loss, 2e-3) << num_ranks << " ranks";
    EXPECT_NEAR(gpu.reports[0].balance_loss, host.reports[0].balance_loss, 0.02);
    for (size_t i = 0; i < kSteps; ++i) {
      const double expected = host.reports[i].loss;
      EXPECT_NEAR(gpu.reports[i].loss, expected, 0.03 * expected)
          << "step " << i << ", " << num_ranks << " ranks";
    }
  }
}

TEST_F(TrainGpuTest, Learns) {
  const TrainingRun run = train(2, gpu_config(), 100);
  EXPECT_GT(run.reports.front().loss, 5.0);
  EXPECT_LT(run.reports.back().loss, 2.0);
}

TEST_F(TrainGpuTest, TwoRunsAgreeBitForBit) {
  const TrainingRun first = train(4, gpu_config(), 20);
  const TrainingRun second = train(4, gpu_config(), 20);
  EXPECT_EQ(first.fingerprint, second.fingerprint);
  for (size_t i = 0; i < first.reports.size(); ++i) {
    EXPECT_EQ(first.reports[i].loss, second.reports[i].loss) << "step " << i;
  }
}

TEST_F(TrainGpuTest, WorksWithRanksThatHaveNoTokens) {
  TrainConfig config = gpu_config();
  config.global_batch = 3;
  const TrainingRun run = train(4, config, 3);
  EXPECT_NEAR(run.reports[0].loss, train(1, config, 1).reports[0].loss, 5e-3);
}

TEST_F(TrainGpuTest, ResumedRunGoesOnWithTheSameBits) {
  const std::string path = std::filesystem::temp_directory_path() /
                           ("weft-gpu-train-" + std::to_string(::getpid()) + ".ckpt");
  const auto save = [&](Trainer& trainer) { trainer.save(path); };
  const auto resume = [&](Trainer& trainer) { trainer.resume(path); };
  const TrainingRun whole = train(2, gpu_config(), 8);
  train(2, gpu_config(), 5, {}, save);
  const TrainingRun rest = train(2, gpu_config(), 3, resume);
  std::filesystem::remove(path);
  EXPECT_EQ(rest.fingerprint, whole.fingerprint);
  EXPECT_EQ(rest.reports.back().loss, whole.reports.back().loss);
}

TEST_F(TrainGpuTest, ReportsWhatAStepDid) {
  train(2, gpu_config(), 1, {}, [&](Trainer& trainer) {
    const StepReport report = trainer.step();
    EXPECT_EQ(report.dispatch.calls, 4);
    EXPECT_EQ(report.combine.calls, 4);
    EXPECT_GT(report.dispatch.wire_bytes, 0);
    ASSERT_EQ(report.routes.size(), 16U);
    EXPECT_EQ(std::reduce(report.routes.begin(), report.routes.end()), 67 * 2 * 2);
    EXPECT_EQ(trainer.last_topk_idx(1).size(), static_cast<size_t>(trainer.num_tokens() * 2));
  });
}

TrainConfig micro_batched(int num_micro_batches, const OverlapConfig& overlap) {
  TrainConfig config = gpu_config();
  config.num_micro_batches = num_micro_batches;
  config.overlap = overlap;
  return config;
}

TEST_F(TrainGpuTest, OverlapChangesNoBit) {
  constexpr int kSteps = 5;
  for (const int num_ranks : {1, 2, 4}) {
    for (const int num_micro_batches : {2, 3, 4}) {
      const TrainingRun expected = train(num_ranks, micro_batched(num_micro_batches, {}), kSteps);
      for (const bool delays : {false, true}) {
        const OverlapConfig overlap = {.is_on = true, .delays_weight_gradients = delays};
        const TrainingRun run = train(num_ranks, micro_batched(num_micro_batches, overlap), kSteps);
        EXPECT_EQ(run.fingerprint, expected.fingerprint)
            << num_ranks << " ranks, " << num_micro_batches << " micro-batches, delayed " << delays;
        for (size_t i = 0; i < kSteps; ++i) {
          EXPECT_EQ(run.reports[i].loss, expected.reports[i].loss) << "step " << i;
          EXPECT_EQ(run.reports[i].balance_loss, expected.reports[i].balance_loss) << "step " << i;
          EXPECT_EQ(run.reports[i].routes, expected.reports[i].routes) << "step " << i;
        }
      }
    }
  }
}

TEST_F(TrainGpuTest, CopyEnginesChangeNoBit) {
  constexpr int kSteps = 3;
  for (const int num_ranks : {2, 4}) {
    const TrainingRun expected = train(num_ranks, micro_batched(3, {}), kSteps);
    const OverlapConfig overlap = {
        .is_on = true, .delays_weight_gradients = true, .copy_engines = CopyEngines::kAlways};
    const auto finish = [&](const Trainer& trainer) {
      const ExchangeStats stats = trainer.exchange().stats();
      EXPECT_EQ(stats.num_dispatches, kSteps * 2 * 2 * 3);  // blocks, directions, micro-batches
      EXPECT_EQ(
          stats.num_copied, kSteps * 2 * 2 * 4
      );  // but of the first forward, the last backward
    };
    const TrainingRun run = train(num_ranks, micro_batched(3, overlap), kSteps, {}, finish);
    EXPECT_EQ(run.fingerprint, expected.fingerprint) << num_ranks << " ranks";
  }
}

// Only rounding differs.
TEST_F(TrainGpuTest, MicroBatchesFollowTheRunThatIsNotCut) {
  const TrainingRun whole = train(2, gpu_config(), 10);
  const TrainingRun cut = train(2, micro_batched(4, {}), 10);
  for (size_t i = 0; i < whole.reports.size(); ++i) {
    const double expected = whole.reports[i].loss;
    EXPECT_NEAR(cut.reports[i].loss, expected, 0.03 * expected) << "step " << i;
  }
}

TEST_F(TrainGpuTest, OverlappedRanksMayHaveNoTokens) {
  TrainConfig config = micro_batched(3, {});
  config.global_batch = 3;
  const TrainingRun expected = train(4, config, 3);
  config.overlap.is_on = true;
  EXPECT_EQ(train(4, config, 3).fingerprint, expected.fingerprint);
}

TEST_F(TrainGpuTest, ReportsTheLanesOfAnOverlappedStep) {
  const OverlapConfig overlap = {.is_on = true, .delays_weight_gradients = true};
  train(2, micro_batched(3, overlap), 1, {}, [&](Trainer& trainer) {
    const StepReport report = trainer.step();
    EXPECT_EQ(report.dispatch.calls, 12);  // two blocks, three micro-batches, forward and backward
    EXPECT_EQ(report.combine.calls, 12);
    EXPECT_EQ(std::reduce(report.routes.begin(), report.routes.end()), 67 * 2 * 2);
    EXPECT_EQ(trainer.last_topk_idx(1).size(), static_cast<size_t>(trainer.num_tokens() * 2));
    const overlap::LaneTimes times = overlap::lane_times(report.trace);
    const auto seconds = [](int64_t ns) { return static_cast<double>(ns) / 1e9; };
    const auto of = [&](Phase phase) { return report.phase_seconds[static_cast<size_t>(phase)]; };
    EXPECT_GT(times.busy_ns[0], 0);
    EXPECT_LE(times.exposed_ns, times.busy_ns[1]);
    EXPECT_LE(times.exposed_ns + times.busy_ns[0], times.wall_ns);
    // Marks lie within the spans; both clocks count in half a microsecond.
    const double slack = 1e-6 * static_cast<double>(report.trace.spans.size());
    const double exchange = of(Phase::kPlan) + of(Phase::kDispatch) + of(Phase::kCombine);
    EXPECT_GT(exchange, 0);
    EXPECT_LE(exchange, seconds(times.busy_ns[1]) + slack);
    EXPECT_LE(of(Phase::kExperts), seconds(times.busy_ns[0]) + slack);
    EXPECT_LE(seconds(times.wall_ns), report.seconds);
  });
}

TEST_F(TrainGpuTest, ReplicasHaveTheirMastersWeightsAndGiveThemTheirGradients) {
  for (const int num_ranks : {1, 2, 4}) {
    SCOPED_TRACE(testing::Message() << num_ranks << " ranks");
    check_replicas<GpuRank>(num_ranks, gpu_config());
  }
}

TEST_F(TrainGpuTest, ReplicasMakeRanksEvenAndKeepTheLoss) {
  constexpr int kSteps = 20;
  TrainConfig config = gpu_config();
  for (const int num_ranks : {1, 2, 4}) {
    config.replicas = 0;
    const TrainingRun plain = train(num_ranks, config, kSteps);
    config.replicas = 2;
    const TrainingRun balanced = train(num_ranks, config, kSteps);
    EXPECT_EQ(train(num_ranks, config, kSteps).fingerprint, balanced.fingerprint);
    EXPECT_NEAR(balanced.reports[0].loss, plain.reports[0].loss, 2e-3) << num_ranks << " ranks";
    double spared = 0;
    for (size_t i = 0; i < kSteps; ++i) {
      const StepReport& report = balanced.reports[i];
      const double expected = plain.reports[i].loss;
      EXPECT_NEAR(report.loss, expected, 0.03 * expected) << "step " << i;
      EXPECT_DOUBLE_EQ(report.mean_load, 2 * 67 * 2.0 / num_ranks);  // blocks, tokens, top-k
      EXPECT_GE(report.busiest, report.mean_load);
      spared += report.unbalanced - report.busiest;
    }
    EXPECT_EQ(spared > 0, num_ranks > 1) << num_ranks << " ranks";
  }
}

TEST_F(TrainGpuTest, OverlapChangesNoBitWithReplicas) {
  constexpr int kSteps = 5;
  for (const int num_ranks : {1, 2, 4}) {
    TrainConfig config = micro_batched(3, {});
    config.replicas = 2;
    const TrainingRun expected = train(num_ranks, config, kSteps);
    config.overlap.is_on = true;
    for (const bool delays : {false, true}) {
      for (const CopyEngines copies : {CopyEngines::kNever, CopyEngines::kAlways}) {
        config.overlap.delays_weight_gradients = delays;
        config.overlap.copy_engines = copies;
        const TrainingRun run = train(num_ranks, config, kSteps);
        EXPECT_EQ(run.fingerprint, expected.fingerprint)
            << num_ranks << " ranks, delayed " << delays;
        for (size_t i = 0; i < kSteps; ++i) {
          EXPECT_EQ(run.reports[i].loss, expected.reports[i].loss) << "step " << i;
          EXPECT_EQ(run.reports[i].busiest, expected.reports[i].busiest) << "step " << i;
        }
      }
    }
  }
}

TEST_F(TrainGpuTest, CountsARowForEachOtherRankThatATokenGoesTo) {
  train(4, gpu_config(), 0, {}, [](Trainer& trainer) {
    const StepReport report = trainer.step();
    int64_t rows = 0;
    for (const int block : {0, 1}) {
      const auto topk_idx = trainer.last_topk_idx(block);
      for (size_t token = 0; token < topk_idx.size(); token += 2) {
        std::set<int> ranks = {topk_idx[token] / 2, topk_idx[token + 1] / 2};  // 2 experts on each
        ranks.erase(trainer.exchange().rank());
        rows += static_cast<int64_t>(ranks.size());
      }
    }
    const int64_t row_bytes = gpu_config().model.hidden * dtype_bytes(DType::kBFloat16);
    EXPECT_EQ(report.dispatch.wire_bytes, 2 * rows * row_bytes);  // forward and backward
  });
}

TEST_F(TrainGpuTest, RefusesRowsInFloat32) {
  TrainConfig config = gpu_config();
  config.dtype = DType::kFloat32;
  EXPECT_THROW(train(1, config, 0), Error);
}

}  // namespace
}  // namespace weft::moe
