// SPDX-License-Identifier: Apache-2.0
#include "call/signature.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <utility>

namespace weft {
namespace {

constexpr int kPeer = 5;

// Returns what is told of two calls that differ; empty if they are the same.
std::string difference(const Call& mine, const Call& theirs) {
  const Signature a = signature_of(mine);
  const Signature b = signature_of(theirs);
  for (size_t word = 0; word < kSignatureWords; ++word) {
    if (a.words[word] != b.words[word]) {
      const std::string text = difference_text(mine.op, word, a.words[word], b.words[word], kPeer);
      const std::string end = " on rank 5 (must be equal on all ranks)";
      EXPECT_TRUE(text.ends_with(end)) << text;
      return text.substr(0, text.size() - end.size());
    }
  }
  return {};
}

struct Change {
  std::function<void(Call&)> change;
  std::string text;
};

// Each change by itself is told, and none is told of equal calls.
void expect_told(const Call& call, const std::vector<Change>& changes) {
  EXPECT_EQ(difference(call, call), "");
  for (const Change& one : changes) {
    Call changed = call;
    one.change(changed);
    EXPECT_EQ(difference(call, changed), one.text);
  }
}

TEST(SignatureTest, TellsEveryFieldOfAPlan) {
  const Call plan = {
      .op = Op::kPlan,
      .number = 41,
      .plan_number = 9,
      .options = {.layout = Layout::kExpertStrided, .pad_multiple = 16, .expert_stride = 1 << 20},
      .topk = 32,
      .from_map = true,
      .has_weights = true,
      .payload = {
          DType::kFloat16, Quantise::kE5M2, ScaleRule::kPowerOfTwo, int64_t{1} << 32, 448, 4}};
  expect_told(
      plan,
      {{[](Call& c) { c.options.layout = Layout::kRankMajor; },
        "layout = expert_strided here and rank_major"},
       {[](Call& c) { c.options.overflow = Overflow::kError; }, "overflow = drop here and error"},
       {[](Call& c) { c.options.order = SumOrder::kTopk; }, "order = rank here and topk"},
       {[](Call& c) { c.topk = 8; }, "topk = 32 here and 8"},
       {[](Call& c) { c.from_map = false; }, "from_map = true here and false"},
       {[](Call& c) { c.has_weights = false; }, "has_weights = true here and false"},
       {[](Call& c) { c.payload.dtype = DType::kBFloat16; },
        "dtype of x in the same call = float16 here and bfloat16"},
       {[](Call& c) { c.payload.quantise = Quantise::kE4M3; },
        "quantise in the same call = e5m2 here and e4m3"},
       {[](Call& c) { c.payload.scale_rule = ScaleRule::kUe8m0; },
        "scale_rule in the same call = power_of_two here and ue8m0"},
       {[](Call& c) { c.payload.weight_bytes = 0; },
        "has_weights of x in the same call = true here and false"},
       {[](Call& c) { c.number = 42; }, "the caller's number of this call = 41 here and 42"},
       {[](Call& c) { c.options.pad_multiple = 1; }, "pad_multiple = 16 here and 1"},
       {[](Call& c) { c.options.expert_stride = 7; }, "expert_stride = 1048576 here and 7"},
       {[](Call& c) { c.options.balance.replicas = 2; }, "replicas = 0 here and 2"},
       {[](Call& c) { c.options.balance.min_rows = int64_t{1} << 30; },
        "min_rows of a replica = 1 here and 1073741824"},
       {[](Call& c) { c.payload.row_bytes = 64; },
        "row bytes of x in the same call = 4294967296 here and 64"},
       {[](Call& c) { c.payload.scale_bytes = 0; },
        "row bytes of scales in the same call = 448 here and none"},
       {[](Call& c) { c.plan_number = 10; }, "number of the imported plan = 9 here and 10"},
       {[](Call& c) { c.payload = {}; }, "dtype of x in the same call = float16 here and none"}}
  );
}

TEST(SignatureTest, TellsPlacementsApart) {
  const Call planned = {.op = Op::kPlan, .options = {.balance = {.replicas = 2}}};
  Call one = planned;
  one.options.balance.placement = {3, -1};
  Call other = planned;
  other.options.balance.placement = {-1, 3};
  Call dearer = planned;
  dearer.options.balance.replica_rows = 7;
  for (const auto& [a, b] :
       {std::pair(planned, one), std::pair(one, other), std::pair(planned, dearer)}) {
    EXPECT_TRUE(difference(a, b).starts_with("checksum of the placement and replica_rows = "))
        << difference(a, b);
  }
}

TEST(SignatureTest, TellsEveryFieldOfADispatch) {
  const Call dispatch = {
      .op = Op::kDispatch,
      .plan_number = 3,
      .payload = {DType::kBFloat16, Quantise::kNone, ScaleRule::kExact, 14336, 224, 32}};
  expect_told(
      dispatch,
      {{[](Call& c) { c.plan_number = 1; }, "plan number = 3 here and 1"},
       {[](Call& c) { c.payload.dtype = DType::kByte; }, "dtype of x = bfloat16 here and byte"},
       {[](Call& c) { c.payload.weight_bytes = 0; }, "has_weights = true here and false"},
       {[](Call& c) { c.payload.quantise = Quantise::kE4M3; }, "quantise = none here and e4m3"},
       {[](Call& c) { c.payload.scale_rule = ScaleRule::kClamped; },
        "scale_rule = exact here and clamped"},
       {[](Call& c) { c.has_copies = true; }, "copy_engines = false here and true"},
       {[](Call& c) { c.number = 1; }, "the caller's number of this call = 0 here and 1"},
       {[](Call& c) { c.payload.row_bytes = 64; }, "row bytes of x = 14336 here and 64"},
       {[](Call& c) { c.payload.scale_bytes = 0; }, "row bytes of scales = 224 here and none"},
       {[](Call& c) { c.token_room = 4096; }, "memory to be made for a token = none here and 4096"}}
  );
}

TEST(SignatureTest, TellsEveryFieldOfACombine) {
  const Call combine = {
      .op = Op::kCombine, .plan_number = 3, .payload = {.row_bytes = 14336, .weight_bytes = 32}};
  expect_told(
      combine,
      {{[](Call& c) { c.plan_number = 1; }, "plan number = 3 here and 1"},
       {[](Call& c) { c.payload.dtype = DType::kFloat32; },
        "dtype of rows = bfloat16 here and float32"},
       {[](Call& c) { c.payload.weight_bytes = 0; }, "has_weights = true here and false"},
       {[](Call& c) { c.scale = CombineScale::kSourceWeights; },
        "scale = none here and source_weights"},
       {[](Call& c) { c.payload.wire = Wire::kLogFmt10; }, "wire = none here and logfmt10"},
       {[](Call& c) { c.has_copies = true; }, "copy_engines = false here and true"},
       {[](Call& c) { c.is_by_route = true; },
        "is received later or by marks = false here and true"},
       {[](Call& c) { c.number = 1; }, "the caller's number of this call = 0 here and 1"},
       {[](Call& c) { c.payload.row_bytes = 64; }, "row bytes of rows = 14336 here and 64"},
       {[](Call& c) { c.token_room = 4096; }, "memory to be made for a token = none here and 4096"}}
  );
}

// A count that has gone on beyond the bits of its field begins again, and touches no other field.
TEST(SignatureTest, TheCallersNumberWrapsRound) {
  const Call first = {.op = Op::kPlan, .number = 3, .has_weights = true};
  Call later = first;
  later.number += int64_t{1} << 28;
  EXPECT_EQ(difference(first, later), "");
  later.number -= 4;
  EXPECT_EQ(difference(first, later), "the caller's number of this call = 3 here and 268435455");
}

// Devices write that word themselves.
TEST(SignatureTest, ThePlanNumberHasAWordOfItsOwn) {
  for (const Op op : {Op::kDispatch, Op::kCombine}) {
    const Call call = {.op = op, .plan_number = -2, .payload = {.row_bytes = 16}};
    EXPECT_EQ(signature_of(call).words[kPlanNumberWord], -2);
  }
}

// A rank that must make room first names what makes its call larger than the others'.
TEST(SignatureTest, WhatMakesACallLargerIsToldBeforeItsMemory) {
  Call small = {.op = Op::kDispatch, .plan_number = 1, .payload = {.row_bytes = 1024}};
  Call large = small;
  large.payload = {.dtype = DType::kFloat32, .row_bytes = 2048};
  large.token_room = 2048;
  EXPECT_EQ(difference(small, large), "dtype of x = bfloat16 here and float32");
}

TEST(SignatureTest, AForeignNumberStaysANumber) {
  EXPECT_EQ(
      difference_text(Op::kPlan, 0, 0, int64_t{3} << 32, 1),
      "layout = rank_major here and 3 on rank 1 (must be equal on all ranks)"
  );
  EXPECT_EQ(
      difference_text(Op::kCombine, 5, 7, 0, 1),
      "a field without a name = 7 here and 0 on rank 1 (must be equal on all ranks)"
  );
}

TEST(PayloadTest, HoldsTheBytesOfARow) {
  std::byte data = {};
  const DispatchInput in = {
      .x = {&data, DType::kBFloat16, 3, 1024},
      .weights = {&data, DType::kFloat32, 3, 8},
      .quantise = Quantise::kE4M3,
      .scale_rule = ScaleRule::kUe8m0};
  const DispatchOutput out = {
      .rows = {&data, DType::kByte, 3, 1024}, .scales = {&data, DType::kFloat32, 3, 7}};
  const PayloadFormat payload = payload_of(in, out, 8);
  EXPECT_EQ(payload.scale_rule, ScaleRule::kUe8m0);
  EXPECT_EQ(payload.row_bytes, 2048);
  EXPECT_EQ(payload.out_row_bytes(), 1024);
  EXPECT_EQ(payload.scale_bytes, 28);
  EXPECT_EQ(payload.staged_scale_bytes(), 32);
  EXPECT_EQ(payload.in_scale_bytes(), 0);
  EXPECT_EQ(payload.weight_bytes, 32);
}

// Ranks that quantise nothing agree, whatever rule they name.
TEST(PayloadTest, HasNoScaleRuleWithoutQuantise) {
  const DispatchInput in = {.x = {}, .scale_rule = ScaleRule::kUe8m0};
  EXPECT_EQ(payload_of(in, {}, 8).scale_rule, ScaleRule::kExact);
}

}  // namespace
}  // namespace weft
