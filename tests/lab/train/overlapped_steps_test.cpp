// SPDX-License-Identifier: Apache-2.0
// Micro-batches that overlap give the bits of those that follow each other.
#include <gtest/gtest.h>

#include <numeric>
#include <tuple>

#include "step_rig.hpp"
#include "train/lanes/schedule.hpp"
#include "train/step_model.hpp"

namespace weft::moe {
namespace {

constexpr OverlapConfig kSequential = {};
constexpr OverlapConfig kOverlapped = {.is_on = true};
constexpr OverlapConfig kDelayed = {.is_on = true, .delays_weight_gradients = true};

struct StepResult {
  std::vector<float> grads;
  LossShare share;
  bool operator==(const StepResult& other) const {
    return grads == other.grads && share.cross_entropy == other.share.cross_entropy &&
           share.balance == other.share.balance;
  }
};

// Runs the step `num_times` in one model, to show what a step leaves behind. Results are by rank.
std::vector<StepResult> run_step(int num_ranks, const StepOptions& options, int num_times = 2) {
  std::vector<StepResult> results(static_cast<size_t>(num_ranks));
  run_threads(num_ranks, [&](Group& group) {
    StepRig rig(group, options);
    StepModel model(
        {group, rig.context(), rig.micro_batches(), rig.overlap(), rig.layout(), rig.memory()}
    );
    StepResult& result = results[static_cast<size_t>(group.rank())];
    for (int i = 0; i < num_times; ++i) {
      rig.clear_grads();
      result.share = model.forward_backward(rig.batches());
    }
    result.grads = rig.grads();
  });
  return results;
}

class OverlappedStepTest : public testing::TestWithParam<std::tuple<int, int, DType>> {};

TEST_P(OverlappedStepTest, HasTheGradientsOfTheSequentialOne) {
  const auto [num_ranks, num_micro_batches, dtype] = GetParam();
  StepOptions options = {.num_micro_batches = num_micro_batches, .dtype = dtype};
  const auto expected = run_step(num_ranks, options, 1);
  const auto is_zero = [](float g) { return g == 0.0F; };
  EXPECT_FALSE(std::ranges::all_of(expected[0].grads, is_zero));
  for (const OverlapConfig& overlap : {kOverlapped, kDelayed}) {
    options.overlap = overlap;
    EXPECT_TRUE(run_step(num_ranks, options) == expected)
        << "delayed " << overlap.delays_weight_gradients;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    OverlappedStepTest,
    testing::Combine(
        testing::Values(1, 2, 4),
        testing::Values(2, 3, 4),
        testing::Values(DType::kFloat32, DType::kBFloat16)
    )
);

TrainConfig config_of(int num_micro_batches, const OverlapConfig& overlap) {
  TrainConfig config = small_config();
  config.num_micro_batches = num_micro_batches;
  config.overlap = overlap;
  return config;
}

TEST(OverlappedTrainingTest, HasTheLossesAndParametersOfTheSequentialOne) {
  for (const int num_micro_batches : {2, 3, 4}) {
    const TrainingRun expected = train(1, config_of(num_micro_batches, kSequential), 3);
    for (const int num_ranks : {1, 2, 4}) {
      for (const OverlapConfig& overlap : {kSequential, kOverlapped, kDelayed}) {
        const TrainingRun run = train(num_ranks, config_of(num_micro_batches, overlap), 3);
        EXPECT_EQ(run.fingerprint, expected.fingerprint)
            << num_micro_batches << " micro-batches, " << num_ranks << " ranks, overlap "
            << overlap.is_on << ", delayed " << overlap.delays_weight_gradients;
        for (size_t i = 0; i < run.reports.size(); ++i) {
          EXPECT_EQ(run.reports[i].loss, expected.reports[i].loss) << "step " << i;
          EXPECT_EQ(run.reports[i].routes, expected.reports[i].routes) << "step " << i;
        }
      }
    }
  }
}

// Both runs have the same tokens and sums in another order: only rounding differs.
TEST(OverlappedTrainingTest, FollowsTheRunThatIsNotCut) {
  const TrainingRun whole = train(2, small_config(), 10);
  const TrainingRun cut = train(2, config_of(4, kDelayed), 10);
  for (size_t i = 0; i < whole.reports.size(); ++i) {
    const double expected = whole.reports[i].loss;
    EXPECT_NEAR(cut.reports[i].loss, expected, 0.01 * expected) << "step " << i;
  }
}

TEST(OverlappedTrainingTest, WorksWithMicroBatchesOfNoTokensOnARank) {
  TrainConfig config = config_of(3, kSequential);
  config.global_batch = 3;
  const TrainingRun expected = train(1, config, 3);
  config.overlap = kDelayed;
  EXPECT_EQ(train(4, config, 3).fingerprint, expected.fingerprint);
}

TEST(OverlappedTrainingTest, ReportsLanesAndPhases) {
  train(2, config_of(3, kDelayed), 1, {}, [&](Trainer& trainer) {
    const StepReport report = trainer.step();
    EXPECT_EQ(report.dispatch.calls, 12);  // two blocks, three micro-batches, forward and backward
    EXPECT_EQ(report.combine.calls, 12);
    EXPECT_EQ(std::reduce(report.routes.begin(), report.routes.end()), 67 * 2 * 2);
    EXPECT_EQ(trainer.last_topk_idx(1).size(), static_cast<size_t>(trainer.num_tokens() * 2));
    std::array<int, overlap::kNumLanes> num_spans = {};
    for (const overlap::Span& span : report.trace.spans) {
      num_spans[overlap::lane_idx(span.lane)] += span.end_ns > span.begin_ns ? 1 : 0;
    }
    EXPECT_EQ(num_spans[1], 24);
    EXPECT_GE(num_spans[0], 3 * (2 + 2 + 2 * 5));  // ends of the chunk, and five nodes of a block
    // Times that phases count lie in the spans of their lane; the rest of the step lies in none.
    const overlap::LaneTimes times = overlap::lane_times(report.trace);
    const auto seconds = [](int64_t ns) { return static_cast<double>(ns) / 1e9; };
    const auto of = [&](Phase phase) { return report.phase_seconds[static_cast<size_t>(phase)]; };
    EXPECT_LE(
        of(Phase::kPlan) + of(Phase::kDispatch) + of(Phase::kCombine), seconds(times.busy_ns[1])
    );
    EXPECT_LE(of(Phase::kExperts), seconds(times.busy_ns[0]));
    EXPECT_LE(seconds(times.wall_ns) + of(Phase::kReduce) + of(Phase::kOptimizer), report.seconds);
    EXPECT_LE(times.exposed_ns, times.busy_ns[1]);
    EXPECT_LE(times.exposed_ns + times.busy_ns[0], times.wall_ns);
  });
}

TEST(MicroBatchTest, ShareOutTheGlobalBatchTheSameWayForAnyNumberOfRanks) {
  for (const int num : {1, 2, 3, 5}) {
    const auto alone = make_micro_batches(67, num, 0, 1);
    ASSERT_EQ(alone.size(), static_cast<size_t>(num));
    int64_t end = 0;
    for (const MicroBatch& micro_batch : alone) {
      EXPECT_EQ(micro_batch.tokens.begin, end);
      EXPECT_GT(micro_batch.tokens.size(), 0);
      end = micro_batch.tokens.end;
    }
    EXPECT_EQ(end, 67);
    for (const int num_ranks : {2, 3, 8}) {
      for (size_t nth = 0; nth < alone.size(); ++nth) {
        std::vector<int64_t> ends;  // of shards, in the global batch
        for (int rank = 0; rank < num_ranks; ++rank) {
          const MicroBatch own = make_micro_batches(67, num, rank, num_ranks)[nth];
          for (const Range& shard : own.shards) {
            ends.push_back(own.tokens.begin + shard.end);
          }
        }
        std::vector<int64_t> expected;
        for (const Range& shard : alone[nth].shards) {
          expected.push_back(alone[nth].tokens.begin + shard.end);
        }
        EXPECT_EQ(ends, expected) << num << " micro-batches, " << num_ranks << " ranks";
      }
    }
  }
}

}  // namespace
}  // namespace weft::moe
