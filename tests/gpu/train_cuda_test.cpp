// SPDX-License-Identifier: Apache-2.0
// Training on a GPU, ranks as threads that share it, against training on the host.
#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>
#include <string>
#include <unistd.h>

#include "gpu/train_gpu_test.hpp"
#include "moe/trainer.hpp"
#include "unit/moe/training_runs.hpp"

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
    EXPECT_EQ(trainer.last_topk_weights(1).size(), trainer.last_topk_idx(1).size());
  });
}

TEST_F(TrainGpuTest, RefusesRowsInFloat32) {
  TrainConfig config = gpu_config();
  config.dtype = DType::kFloat32;
  EXPECT_THROW(train(1, config, 0), Error);
}

}  // namespace
}  // namespace weft::moe
