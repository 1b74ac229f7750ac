// SPDX-License-Identifier: Apache-2.0
// Bad input to plan() on one rank: one error on every rank, and the exchange stays usable.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "refusal.hpp"

namespace weft::test {
namespace {

// Rank 1 plans with routing and options that `spoil` has changed.
void expect_refused(
    const std::string& reason, const std::function<void(Routing&, PlanOptions&)>& spoil
) {
  expect_refusal_of_rank_1("plan", reason, [&](RefusalRank& own) {
    Routing routing = own.routing();
    PlanOptions options = own.options();
    if (own.rank == 1) {
      spoil(routing, options);
    }
    static_cast<void>(own.exchange.plan(routing, options));
  });
}

// Rank 1 plans with another index matrix.
void expect_indices_refused(const std::string& reason, const std::vector<int64_t>& indices) {
  expect_refused(reason, [&](Routing& routing, PlanOptions&) {
    routing = {.topk_idx = matrix(indices.data(), static_cast<int64_t>(indices.size()) / 2, 2)};
  });
}

TEST(BadPlanTest, RefusesAnIndexOutOfRange) {
  expect_indices_refused(
      "plan: topk_idx[1, 0] = 6 is out of range (num_experts = 6, -1 = no route)", {0, 1, 6, 0}
  );
  expect_indices_refused(
      "plan: topk_idx[2, 1] = -2 is out of range (num_experts = 6, -1 = no route)",
      {0, 1, -1, 0, 5, -2}
  );
  expect_indices_refused(
      "plan: topk_idx[0, 0] = 4294967296 is out of range (num_experts = 6, -1 = no route)",
      {int64_t{1} << 32, 0}
  );
}

TEST(BadPlanTest, RefusesMoreTokensThanTheCapacity) {
  expect_indices_refused(
      "plan: 33 tokens are too many (max_tokens = 32)", std::vector<int64_t>(66, 0)
  );
}

TEST(BadPlanTest, RefusesTooManyChoicesPerToken) {
  const std::vector<int64_t> indices(33, 0);
  expect_refused(
      "plan: topk_idx has 33 columns (1 to max_topk = 4)",
      [&](Routing& routing, PlanOptions&) { routing = {.topk_idx = matrix(indices.data(), 1, 33)}; }
  );
}

TEST(BadPlanTest, RefusesAnythingButOneFormOfRouting) {
  const std::array<bool, 6> map = {};
  expect_refused(
      "plan: neither topk_idx nor map is given (exactly one is needed)",
      [](auto& routing, auto&) { routing = {}; }
  );
  expect_refused(
      "plan: topk_idx and map are both given (exactly one is needed)",
      [&](auto& routing, auto&) { routing.map = matrix(map.data(), 1, 6); }
  );
}

TEST(BadPlanTest, RefusesATensorOfAnotherKind) {
  expect_refused(
      "plan: topk_idx has dtype float32 (expected int64 or int32)",
      [](auto& routing, auto&) { routing.topk_idx.dtype = DType::kFloat32; }
  );
  expect_refused("plan: topk_idx is on cuda 3 (the exchange is on cpu)", [](auto& routing, auto&) {
    routing.topk_idx.device = {Device::Kind::kCuda, 3};
  });
  expect_refused(
      "plan: topk_idx has row stride 3 (expected 2: rows must be adjacent)",
      [](auto& routing, auto&) { routing.topk_idx.row_stride = 3; }
  );
  expect_refused("plan: topk_idx has a null pointer (shape [32, 2])", [](auto& routing, auto&) {
    routing.topk_idx.data = nullptr;
  });
  expect_refused(
      "plan: topk_idx has shape [-1, 2] (sizes cannot be negative)",
      [](auto& routing, auto&) { routing.topk_idx.rows = -1; }
  );
}

TEST(BadPlanTest, RefusesWeightsOfAnotherShapeOrKind) {
  expect_refused("plan: weights has shape [31, 2] (expected [32, 2])", [](auto& routing, auto&) {
    routing.weights.rows = 31;
  });
  expect_refused("plan: weights has dtype bfloat16 (expected float32)", [](auto& routing, auto&) {
    routing.weights.dtype = DType::kBFloat16;
  });
}

TEST(BadPlanTest, RefusesABadMap) {
  const std::array<bool, 12> map = {
      true, true, false, true, false, false, true, true, true, true, true, false};
  expect_refused("plan: map has shape [1, 5] (expected [1, 6])", [&](auto& routing, auto&) {
    routing = {.map = matrix(map.data(), 1, 5)};
  });
  expect_refused("plan: map[1] names 5 experts (max_topk = 4)", [&](auto& routing, auto&) {
    routing = {.map = matrix(map.data(), 2, 6)};
  });
}

TEST(BadPlanTest, RefusesOptionsThatMakeNoSense) {
  expect_refused(
      "plan: pad_multiple = 0 is out of range (1 to 2147483647)",
      [](auto&, auto& options) { options.pad_multiple = 0; }
  );
  expect_refused(
      "plan: expert_stride = 5 with expert_major (only expert_strided has a stride)",
      [](auto&, auto& options) { options.expert_stride = 5; }
  );
  expect_refused(
      "plan: row_budget = -1 is out of range (0 to 2147483647)",
      [](auto&, auto& options) { options.row_budget = -1; }
  );
  expect_refused(
      "plan: pad_multiple = 8 (must be 1 with rank_major, whose rows have no expert blocks)",
      [](auto&, auto& options) {
        options.layout = Layout::kRankMajor;
        options.pad_multiple = 8;
      }
  );
}

// Every rank refuses by itself: from the same counts, so with the same words.
TEST(BadPlanTest, NamesTheRankWhoseBudgetIsTooSmall) {
  int64_t required = 0;
  const std::vector<std::string> texts = refused_texts([&](RefusalRank& own) {
    PlanOptions options = own.options();
    options.overflow = Overflow::kError;
    if (own.rank == 1) {
      required = own.plan.required_rows();
      options.row_budget = required - 1;
    }
    static_cast<void>(own.exchange.plan(own.routing(), options));
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(
        texts[static_cast<size_t>(rank)],
        fmt::format(
            "plan: rank 1 needs {} rows (row_budget = {}) [rank {}/3, loopback]",
            required,
            required - 1,
            rank
        )
    );
  }
}

TEST(BadPlanTest, NamesTheExpertThatOutgrowsItsStride) {
  const std::vector<std::string> texts = refused_texts([&](RefusalRank& own) {
    const std::vector<int64_t> indices = {5, 5, 5, 0, 5, 1};
    PlanOptions options;
    options.layout = Layout::kExpertStrided;
    options.expert_stride = 11;
    options.overflow = Overflow::kError;
    static_cast<void>(own.exchange.plan({.topk_idx = matrix(indices.data(), 3, 2)}, options));
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(
        texts[static_cast<size_t>(rank)],
        fmt::format(
            "plan: expert 5 on rank 2 needs 12 rows (expert_stride = 11) [rank {}/3, loopback]",
            rank
        )
    );
  }
}

}  // namespace
}  // namespace weft::test
