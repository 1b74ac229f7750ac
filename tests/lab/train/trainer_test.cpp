// SPDX-License-Identifier: Apache-2.0
#include "train/trainer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "training_runs.hpp"
#include "weft/error.hpp"

namespace weft::moe {
namespace {

TEST(TrainerTest, LossAgreesForOneTwoAndFourRanks) {
  constexpr int kSteps = 50;
  const TrainingRun one = train(1, small_config(), kSteps);
  for (const int num_ranks : {2, 4}) {
    const TrainingRun many = train(num_ranks, small_config(), kSteps);
    for (size_t i = 0; i < kSteps; ++i) {
      const double expected = one.reports[i].loss;
      EXPECT_NEAR(many.reports[i].loss, expected, 1e-4 * expected)
          << "step " << i << ", " << num_ranks << " ranks";
      EXPECT_NEAR(many.reports[i].balance_loss, one.reports[i].balance_loss, 1e-3);
    }
  }
}

// Stronger than the above. With more than two experts to a token, or rows in bf16, combine rounds
// by the ranks that experts share.
TEST(TrainerTest, OneToEightRanksAgreeBitForBit) {
  const TrainingRun one = train(1, small_config(), 20);
  for (const int num_ranks : {2, 4, 8}) {
    const TrainingRun many = train(num_ranks, small_config(), 20);
    EXPECT_EQ(many.fingerprint, one.fingerprint) << num_ranks << " ranks";
    EXPECT_EQ(many.reports.back().loss, one.reports.back().loss) << num_ranks << " ranks";
  }
}

TEST(TrainerTest, TwoRunsAgreeBitForBit) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    TrainConfig config = small_config();
    config.dtype = dtype;
    const TrainingRun first = train(4, config, 20);
    const TrainingRun second = train(4, config, 20);
    EXPECT_EQ(first.fingerprint, second.fingerprint);
    for (size_t i = 0; i < first.reports.size(); ++i) {
      EXPECT_EQ(first.reports[i].loss, second.reports[i].loss) << "step " << i;
    }
  }
}

TEST(TrainerTest, AnotherSeedGivesAnotherRun) {
  TrainConfig config = small_config();
  const TrainingRun first = train(1, config, 1);
  ++config.seed;
  EXPECT_NE(train(1, config, 1).fingerprint, first.fingerprint);
}

TEST(TrainerTest, StartsFromTheSameParametersForAnyNumberOfRanks) {
  const uint64_t expected = train(1, small_config(), 0).fingerprint;
  for (const int num_ranks : {2, 4, 8}) {
    EXPECT_EQ(train(num_ranks, small_config(), 0).fingerprint, expected) << num_ranks << " ranks";
  }
}

class TrainerDtypeTest : public testing::TestWithParam<DType> {};

TEST_P(TrainerDtypeTest, Learns) {
  TrainConfig config = small_config();
  config.dtype = GetParam();
  const TrainingRun run = train(2, config, 100);
  EXPECT_GT(run.reports.front().loss, 5.0);
  EXPECT_LT(run.reports.back().loss, 2.0);
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes, TrainerDtypeTest, testing::Values(DType::kFloat32, DType::kBFloat16)
);

TEST(TrainerTest, WorksWithRanksThatHaveNoTokens) {
  TrainConfig config = small_config();
  config.global_batch = 3;
  const TrainingRun run = train(4, config, 3);
  EXPECT_NEAR(run.reports[0].loss, train(1, config, 1).reports[0].loss, 1e-4);
}

TEST(TrainerTest, ReportsWhatAStepDid) {
  const TrainConfig config = small_config();
  train(2, config, 1, {}, [&](Trainer& trainer) {
    const StepReport report = trainer.step();
    EXPECT_EQ(report.step, 2);
    EXPECT_EQ(trainer.steps_done(), 2);
    EXPECT_EQ(report.global_tokens, 67);
    EXPECT_EQ(report.num_tokens, trainer.num_tokens());
    // Forward and backward of two blocks.
    EXPECT_EQ(report.dispatch.calls, 4);
    EXPECT_EQ(report.combine.calls, 4);
    EXPECT_GT(report.dispatch.wire_bytes, 0);
    EXPECT_GT(report.dispatch.logical_bytes, report.dispatch.wire_bytes / 2);
    ASSERT_EQ(report.routes.size(), 16U);
    EXPECT_EQ(std::reduce(report.routes.begin(), report.routes.end()), 67 * 2 * 2);
    const auto& phases = report.phase_seconds;
    EXPECT_NEAR(std::reduce(phases.begin(), phases.end()), report.seconds, 1e-9);
    EXPECT_EQ(trainer.last_topk_idx(1).size(), static_cast<size_t>(trainer.num_tokens() * 2));
  });
}

TEST(TrainerTest, CountsParameters) {
  train(2, small_config(), 0, {}, [](Trainer& trainer) {
    const int64_t experts = int64_t{2} * 8 * 3 * 16 * 16;
    const int64_t replicated = 4 * 256 * 16 + 256 * 16 + 2 * 8 * 16 + 3 * 16;
    EXPECT_EQ(trainer.num_parameters(), experts + replicated);
    EXPECT_LT(trainer.num_active_parameters(), trainer.num_parameters());
  });
}

struct BadConfig {
  const char* text;
  std::function<void(TrainConfig&)> spoil;
};

TEST(TrainerTest, RefusesWrongConfigurations) {
  const BadConfig cases[] = {
      {"train: window = 0 (at least 1)", [](auto& c) { c.model.window = 0; }},
      {"train: topk = 9 (at most 8 here)", [](auto& c) { c.model.topk = 9; }},
      {"train: num_experts = 7 (divisible by the number of ranks, 2)",
       [](auto& c) { c.model.num_experts = 7; }},
      {"train: hidden = 6 makes rows of 24 B (a multiple of 16 B in float32)",
       [](auto& c) { c.model.hidden = 6; }},
      {"train: dtype float16 (float32 or bfloat16)", [](auto& c) { c.dtype = DType::kFloat16; }},
      {"train: global_batch = 0 (at least 1)", [](auto& c) { c.global_batch = 0; }},
      {"train: num_experts = 1000000 (at most 65536)",
       [](auto& c) { c.model.num_experts = 1000000; }},
      {"train: num_blocks = 2000 (at most 1024)", [](auto& c) { c.model.num_blocks = 2000; }},
      {"train: learning_rate = 0 (above 0)", [](auto& c) { c.learning_rate = 0; }},
  };
  for (const BadConfig& bad : cases) {
    TrainConfig config = small_config();
    bad.spoil(config);
    try {
      train(2, config, 0);
      ADD_FAILURE() << "accepted: " << bad.text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(std::string(error.what()).rfind(bad.text, 0), 0U) << error.what();
    }
  }
}

TEST(TrainerTest, AllRanksRefuseDifferentConfigurations) {
  const auto text = make_text(1000);
  run_threads(2, [&](Group& group) {
    TrainConfig config = small_config();
    config.seed += static_cast<uint64_t>(group.rank());
    try {
      Trainer trainer(group, config, text);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("ranks 0 and 1 have different"), std::string::npos);
    }
  });
}

TEST(TrainerTest, AllRanksRefuseWhatOneRankRefuses) {
  const auto text = make_text(1000);
  run_threads(2, [&](Group& group) {
    TrainConfig config = small_config();
    config.model.topk = group.rank() == 1 ? 9 : 2;
    try {
      Trainer trainer(group, config, text);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find("topk = 9 (at most 8 here)"), std::string::npos) << what;
      EXPECT_NE(what.find("on rank 1"), std::string::npos) << what;
    }
  });
}

TEST(TrainerTest, RefusesATextThatIsTooShort) {
  const std::vector<std::byte> text(4);
  EXPECT_THROW(
      run_threads(1, [&](Group& group) { Trainer trainer(group, small_config(), text); }), Error
  );
}

}  // namespace
}  // namespace weft::moe
