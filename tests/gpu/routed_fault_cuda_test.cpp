// SPDX-License-Identifier: Apache-2.0
// What goes wrong in a call that plans and dispatches, whose rows are on their way before anybody
// knows of it.
#include "gpu/fault_world.hpp"

namespace weft::test {
namespace {

constexpr const char* kKind = "plan: kind of the rows that go with it (0: none)";

class GpuRoutedFaultTest : public GpuTest {};

TEST_F(GpuRoutedFaultTest, RefusesAnIndexOutOfRange) {
  expect_bad_index_is_refused(num_gpus(), [](FaultRank& own) { own.plan_and_dispatch(); });
}

TEST_F(GpuRoutedFaultTest, RefusesWrongArguments) {
  expect_refusal(
      num_gpus(),
      "plan",
      "dispatch: x has shape [31, 32] (expected [32, 32])",
      [](FaultRank& own) {
        if (own.rank == 1) {
          own.dispatch_in.x.rows = 31;
        }
        own.plan_and_dispatch();
      }
  );
}

TEST_F(GpuRoutedFaultTest, NamesTheRowsThatDiffer) {
  expect_disagreement(num_gpus(), kKind, {1001, 1}, [](FaultRank& own) {
    if (own.rank == 2) {
      own.dispatch_in.weights = {};
      own.dispatch_out.weights = {};
    }
    own.plan_and_dispatch();
  });
}

TEST_F(GpuRoutedFaultTest, NamesTheRankThatPlansAlone) {
  expect_disagreement(num_gpus(), kKind, {1001, 0}, [](FaultRank& own) {
    own.options.row_budget = own.dispatch_out.rows.rows;
    own.rank == 2 ? own.make_plan() : own.plan_and_dispatch();
  });
}

TEST_F(GpuRoutedFaultTest, NamesTheRankThatDoesNotCome) {
  expect_timeout(
      num_gpus(), "plan", 1, [](FaultRank&) {}, [](FaultRank& own) { own.plan_and_dispatch(); }
  );
}

}  // namespace
}  // namespace weft::test
