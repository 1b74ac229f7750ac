// SPDX-License-Identifier: Apache-2.0
#include "cuda/exchange/fault_text.hpp"

#include <gtest/gtest.h>

namespace weft::test {
namespace {

RankView some_rank() {
  RankView me;
  me.rank = 1;
  me.num_ranks = 3;
  me.map.num_experts = 8;
  me.timeout_ns = 500'000'000;
  me.stamp = 0xab00000005;
  return me;
}

FaultRecord fault_of(FaultKind kind, Op op) {
  FaultRecord fault;
  fault.kind = kind;
  fault.op = op;
  fault.epoch = epoch_base(some_rank().stamp) + 7;
  fault.peer = 2;
  fault.what = -1;
  return fault;
}

TEST(FaultTextTest, NamesWhatAnUnknownCallCannotBe) {
  FaultRecord fault = fault_of(FaultKind::kMismatch, Op::kPlan);
  const std::string why = " (all ranks make the same calls in the same order; this is call 7)";
  fault.seen = static_cast<int64_t>(Op::kCombine);
  EXPECT_EQ(fault_text(fault, some_rank()), "plan: rank 2 calls combine" + why);
  fault.seen = 77;
  EXPECT_EQ(fault_text(fault, some_rank()), "plan: rank 2 calls nothing known" + why);
}

TEST(FaultTextTest, SaysWhatTheHostFoundAfterATimeout) {
  FaultRecord fault = fault_of(FaultKind::kTimeout, Op::kDispatch);
  fault.wanted = fault.epoch;
  fault.control = 0x7f00;
  const std::string begin =
      "dispatch: rank 1 waited 500 ms for handshake of rank 2 in call 7 (seen 0, wanted 7";
  EXPECT_EQ(fault_text(fault, some_rank()), begin + ")");
  EXPECT_EQ(
      fault_text(fault, some_rank(), {{fault.epoch, 69, 0}, some_rank().stamp}),
      begin + "; handshakes of all ranks: 7 0x45 (of another exchange) 0)"
  );
  EXPECT_EQ(
      fault_text(fault, some_rank(), {{fault.epoch, 0, 0}, 4}),
      begin +
          "; handshakes of all ranks: 7 0 0; the control region at 0x7f00 has the stamp 0x4, this "
          "exchange 0xab00000005)"
  );
}

TEST(FaultTextTest, NamesWhatWasWaitedFor) {
  FaultRecord fault = fault_of(FaultKind::kTimeout, Op::kCombine);
  const auto text = [&](WaitFor what) {
    fault.waiting_for = what;
    return fault_text(fault, some_rank());
  };
  EXPECT_NE(text(WaitFor::kWhole).find("for the end of the call of rank 2"), std::string::npos);
  EXPECT_NE(text(WaitFor::kGrid).find("for blocks of its own of rank 2"), std::string::npos);
  EXPECT_NE(
      text(WaitFor::kStage).find("for rows in its shared memory of rank 2"), std::string::npos
  );
}

TEST(FaultTextTest, SaysWhyAPeerRefusedIfItsHostDid) {
  const FaultRecord fault = fault_of(FaultKind::kRefused, Op::kCombine);
  EXPECT_EQ(fault_text(fault, some_rank()), "combine: rank 2 refused the call");
  EXPECT_EQ(
      fault_text(fault, some_rank(), {.refusal = "rows is missing"}),
      "combine: rank 2 refused the call: rows is missing"
  );
}

TEST(FaultTextTest, CountsTheCopiesThatDidNotCome) {
  FaultRecord fault = fault_of(FaultKind::kTimeout, Op::kCombine);
  fault.waiting_for = WaitFor::kCopies;
  fault.seen = epoch_base(some_rank().stamp) + 2;
  fault.wanted = fault.seen + 1;
  EXPECT_EQ(
      fault_text(fault, some_rank()),
      "combine: rank 1 waited 500 ms for copies of rank 2 in call 7 (seen 2, wanted 3)"
  );
}

TEST(FaultTextTest, NamesTheBlockOfRowsThatIsNotWhole) {
  FaultRecord fault = fault_of(FaultKind::kTimeout, Op::kCombine);
  fault.waiting_for = WaitFor::kMark;
  fault.what = 5;
  fault.block = 2;
  fault.seen = 130;
  fault.wanted = 132;
  EXPECT_EQ(
      fault_text(fault, some_rank()),
      "combine: rank 1 waited 500 ms for block 2 of the rows of expert 5 in call 7 (its mark is "
      "130, wanted 132)"
  );
}

TEST(FaultTextTest, NamesTheChoiceThatIsNotThePlans) {
  FaultRecord fault = fault_of(FaultKind::kOtherChoice, Op::kCombine);
  fault.what = 1;
  fault.block = -1;
  fault.seen = 12;
  fault.wanted = 3;
  EXPECT_EQ(
      fault_text(fault, some_rank()),
      "combine: source_idx[12, 1] = 3 (the plan was made of -1 there; this was call 7)"
  );
}

TEST(FaultTextTest, NamesTheGlobalScale) {
  FaultRecord fault = fault_of(FaultKind::kBadGlobalScale, Op::kDispatch);
  fault.seen = 0xff800000U;
  EXPECT_EQ(
      fault_text(fault, some_rank()),
      "dispatch: global_scale = -inf (expected more than 0, and finite; this was call 7)"
  );
}

TEST(FaultTextTest, NamesBothStampsOfAStrangersWord) {
  FaultRecord fault = fault_of(FaultKind::kStranger, Op::kPlan);
  fault.seen = 0xab00000004;
  fault.wanted = 0xab00000005;
  fault.control = 0x7f00;
  EXPECT_EQ(
      fault_text(fault, some_rank()),
      "plan: the handshake of rank 2 in the control region at 0x7f00 is of another exchange (stamp "
      "0xab00000004, expected 0xab00000005)"
  );
}

TEST(FaultTextTest, CountsCallsOfPlansAsTheirCallerDoes) {
  FaultRecord fault = fault_of(FaultKind::kMismatch, Op::kCombine);
  fault.what = 0;
  fault.seen = 0;
  fault.wanted = epoch_base(some_rank().stamp) + 6;
  EXPECT_EQ(
      fault_text(fault, some_rank()),
      "combine: plan number = 6 here and 0 on rank 2 (must be equal on all ranks)"
  );
  fault.op = Op::kPlan;
  fault.seen = int64_t{3} << 32;
  fault.wanted = int64_t{2} << 32;
  EXPECT_EQ(
      fault_text(fault, some_rank()),
      "plan: layout = expert_strided here and 3 on rank 2 (must be equal on all ranks)"
  );
}

TEST(FaultTextTest, NamesAnyFieldAndAnyRegion) {
  FaultRecord fault = fault_of(FaultKind::kMismatch, Op::kPlan);
  fault.what = kSignatureWords + 3;
  EXPECT_EQ(
      fault_text(fault, some_rank()),
      "plan: a field without a name = 0 here and 0 on rank 2 (must be equal on all ranks)"
  );
  fault.kind = FaultKind::kUnmapped;
  fault.seen = 9;
  EXPECT_EQ(
      fault_text(fault, some_rank()), "plan: rank 2 names its region 9 (which is not mapped here)"
  );
}

}  // namespace
}  // namespace weft::test
