// SPDX-License-Identifier: Apache-2.0
// A piece of an overlapped step throws on one rank: both its lanes stop, every rank's caller hears
// of it before the deadlines are over, and the group serves the next exchange.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>
#include <ostream>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "lab/train/step_rig.hpp"
#include "support/errors.hpp"
#include "train/lanes/schedule.hpp"
#include "train/step_model.hpp"

namespace weft::moe {
namespace {

using overlap::Schedule;
using test::Thrown;

constexpr int kNumRanks = 4;
constexpr int kBadRank = 1;
constexpr StepOptions kOptions = {
    .num_micro_batches = 3,
    .overlap = {.is_on = true, .delays_weight_gradients = true},
    .timeout = std::chrono::seconds(2)};

// Step of the second micro-batch's second block that throws.
struct BadPiece {
  const char* name;
  const char* step;
};
void PrintTo(const BadPiece& piece, std::ostream* out) {
  *out << piece.name;
}

constexpr BadPiece kBadPieces[] = {
    {"pre_dispatch", "m1.L1.pre_dispatch_computation.fwd"},
    {"moe_dispatch", "m1.L1.moe_dispatch.fwd"},
    {"mlp_backward", "m1.L1.mlp.bwd"},
    {"weight_gradient", "m1.L1.mlp.backward_dw"},
    {"combine_backward", "m1.L1.moe_combine.bwd"},
};

// Throws in the step of that name.
class FaultyModel : public StepModel {
 public:
  FaultyModel(const StepModelParts& parts, std::string_view bad) : StepModel(parts), bad_(bad) {}

  LossShare forward_backward(std::span<const Batch> batches) override {
    run(batches, [&](const Schedule& good) {
      Schedule schedule;
      for (overlap::Step step : good) {
        if (step.name == bad_) {
          step.work = [](const overlap::LaneContext&) { throw std::runtime_error("as wanted"); };
        }
        schedule.push_back(std::move(step));
      }
      return overlap::run_on_threads(schedule);
    });
    return share();
  }

 private:
  std::string_view bad_;
};

// One step with own models; on the bad rank with the bad piece.
void run_step(const Group& group, const BadPiece* bad) {
  StepRig rig(group, kOptions);
  FaultyModel model(
      {group, rig.context(), rig.micro_batches(), rig.overlap(), rig.layout(), rig.memory()},
      bad != nullptr && group.rank() == kBadRank ? bad->step : ""
  );
  const auto held_before = rig.context().exchange.footprint().buffer_bytes;
  try {
    static_cast<void>(model.forward_backward(rig.batches()));
  } catch (...) {
    EXPECT_EQ(rig.context().exchange.footprint().buffer_bytes, held_before);
    throw;
  }
}

class OverlappedFaultTest : public testing::TestWithParam<BadPiece> {};

TEST_P(OverlappedFaultTest, ReachesTheCallerOnEveryRank) {
  const BadPiece bad = GetParam();
  run_threads(kNumRanks, [&](Group& group) {
    if (group.rank() == kBadRank) {
      try {
        run_step(group, &bad);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "as wanted");
      }
    } else {
      const std::optional<Thrown> thrown = test::thrown_by([&] { run_step(group, &bad); });
      const std::string text = test::text_of(thrown);
      ASSERT_TRUE(thrown && (thrown->is_peer_error || thrown->is_timeout)) << text;
    }
    group.barrier();
    EXPECT_EQ(test::text_of(test::thrown_by([&] { run_step(group, nullptr); })), "nothing");
  });
}

INSTANTIATE_TEST_SUITE_P(
    Pieces,
    OverlappedFaultTest,
    testing::ValuesIn(kBadPieces),
    [](const testing::TestParamInfo<BadPiece>& param) { return param.param.name; }
);

// A call that the exchange refuses is refused on all ranks, in the exchange lane of each.
TEST(OverlappedRefusalTest, ReachesTheCallerAndLeavesTheExchangeUsable) {
  run_threads(kNumRanks, [&](Group& group) {
    StepRig rig(group, kOptions);
    std::vector<MicroBatch> wrong = rig.micro_batches();
    std::vector<Batch> batches = rig.batches();
    if (group.rank() == kBadRank) {  // more tokens than the exchange was made for
      const Batch one = batches[1];
      for (int i = 0; i < 20; ++i) {
        batches[1].windows.insert(batches[1].windows.end(), one.windows.begin(), one.windows.end());
        batches[1].targets.insert(batches[1].targets.end(), one.targets.begin(), one.targets.end());
      }
      wrong[1].shards = one_shard(static_cast<int64_t>(batches[1].targets.size()));
    }
    const auto run = [&](const std::vector<MicroBatch>& parts, const std::vector<Batch>& tokens) {
      StepModel model({group, rig.context(), parts, rig.overlap(), rig.layout(), rig.memory()});
      static_cast<void>(model.forward_backward(tokens));
    };
    const auto thrown = test::thrown_by([&] { run(wrong, batches); });
    ASSERT_TRUE(thrown);
    EXPECT_EQ(thrown->code, ErrorCode::kInvalidArgument) << thrown->text;
    EXPECT_EQ(
        test::text_of(test::thrown_by([&] { run(rig.micro_batches(), rig.batches()); })), "nothing"
    );
  });
}

}  // namespace
}  // namespace weft::moe
