// SPDX-License-Identifier: Apache-2.0
// Ranks that ask for different things: every rank names the field, both values and the other rank.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "refusal.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

// Rank 2 differs from 0 and 1.
void expect_disagreement(
    const std::string& field,
    const std::pair<std::string, std::string>& values,
    const RefusalCall& call
) {
  const std::vector<std::string> texts = refused_texts(call);
  for (int rank = 0; rank < 3; ++rank) {
    const bool is_odd_one = rank == 2;
    EXPECT_EQ(
        texts[static_cast<size_t>(rank)],
        fmt::format(
            "{} = {} here and {} on rank {} (must be equal on all ranks) [rank {}/3, loopback]",
            field,
            is_odd_one ? values.second : values.first,
            is_odd_one ? values.first : values.second,
            is_odd_one ? 0 : 2,
            rank
        )
    );
  }
}

void expect_plan_disagreement(
    const std::string& field,
    const std::pair<std::string, std::string>& values,
    const std::function<void(Routing&, PlanOptions&)>& change
) {
  expect_disagreement("plan: " + field, values, [&](RefusalRank& own) {
    Routing routing = own.routing();
    PlanOptions options = own.options();
    if (own.rank == 2) {
      change(routing, options);
    }
    static_cast<void>(own.exchange.plan(routing, options));
  });
}

TEST(DisagreementTest, NamesEveryPlanOption) {
  expect_plan_disagreement("layout", {"expert_major", "rank_major"}, [](auto&, auto& options) {
    options.layout = Layout::kRankMajor;
  });
  expect_plan_disagreement("pad_multiple", {"1", "16"}, [](auto&, auto& options) {
    options.pad_multiple = 16;
  });
  expect_plan_disagreement("overflow", {"drop", "error"}, [](auto&, auto& options) {
    options.overflow = Overflow::kError;
  });
  expect_plan_disagreement("order", {"rank", "topk"}, [](auto&, auto& options) {
    options.order = SumOrder::kTopk;
  });
  expect_plan_disagreement("has_weights", {"true", "false"}, [](auto& routing, auto&) {
    routing.weights = {};
  });
}

TEST(DisagreementTest, NamesTheExpertStride) {
  expect_disagreement("plan: expert_stride", {"7", "8"}, [](RefusalRank& own) {
    PlanOptions options;
    options.layout = Layout::kExpertStrided;
    options.expert_stride = own.rank == 2 ? 8 : 7;
    static_cast<void>(own.exchange.plan(own.routing(), options));
  });
}

TEST(DisagreementTest, NamesTheFormOfRouting) {
  const std::vector<int64_t> indices = {0, 1, 2};
  const std::array<bool, 6> map = {};
  expect_plan_disagreement("topk", {"2", "3"}, [&](auto& routing, auto&) {
    routing = {.topk_idx = matrix(indices.data(), 1, 3)};
  });
  expect_disagreement("plan: from_map", {"false", "true"}, [&](RefusalRank& own) {
    const std::vector<int64_t> four = {0, 1, 2, 3};
    const Routing routing = own.rank == 2 ? Routing{.map = matrix(map.data(), 1, 6)}
                                          : Routing{.topk_idx = matrix(four.data(), 1, 4)};
    static_cast<void>(own.exchange.plan(routing, own.options()));
  });
}

TEST(DisagreementTest, NamesEveryDifferenceOfADispatch) {
  const auto dispatch = [](RefusalRank& own, const auto& change) {
    DispatchInput in = own.dispatch_input();
    DispatchOutput out = own.scratch.dispatch_output();
    if (own.rank == 2) {
      change(in, out);
    }
    own.exchange.dispatch(own.plan, in, out);
  };
  expect_disagreement("dispatch: dtype of x", {"float32", "byte"}, [&](RefusalRank& own) {
    dispatch(own, [](auto& in, auto& out) {
      in.x.dtype = DType::kByte;
      in.x.cols = 128;
      out.rows.dtype = DType::kByte;
      out.rows.cols = 128;
    });
  });
  expect_disagreement("dispatch: row bytes of scales", {"4", "2"}, [&](RefusalRank& own) {
    dispatch(own, [](auto& in, auto& out) {
      in.scales.cols = 2;
      out.scales.cols = 2;
    });
  });
  expect_disagreement("dispatch: row bytes of scales", {"4", "none"}, [&](RefusalRank& own) {
    dispatch(own, [](auto& in, auto& out) {
      in.scales = {};
      out.scales = {};
    });
  });
  expect_disagreement("dispatch: has_weights", {"true", "false"}, [&](RefusalRank& own) {
    dispatch(own, [](auto& in, auto& out) {
      in.weights = {};
      out.weights = {};
    });
  });
  expect_disagreement("dispatch: row bytes of x", {"64", "32"}, [](RefusalRank& own) {
    DispatchInput in = own.dispatch_input();
    DispatchOutput out = own.scratch.dispatch_output();
    in.x.dtype = DType::kByte;
    out.rows.dtype = DType::kByte;
    in.x.cols = own.rank == 2 ? 32 : 64;
    out.rows.cols = in.x.cols;
    own.exchange.dispatch(own.plan, in, out);
  });
}

TEST(DisagreementTest, NamesEveryDifferenceOfACombine) {
  expect_disagreement("combine: has_weights", {"true", "false"}, [](RefusalRank& own) {
    CombineInput in = own.combine_input();
    CombineOutput out = own.scratch.combine_output();
    if (own.rank == 2) {
      in.weights = {};
      out.weights = {};
    }
    own.exchange.combine(own.plan, in, out);
  });
  expect_disagreement("combine: scale", {"none", "plan_weights"}, [](RefusalRank& own) {
    CombineInput in = own.combine_input();
    in.scale = own.rank == 2 ? CombineScale::kPlanWeights : CombineScale::kNone;
    own.exchange.combine(own.plan, in, own.scratch.combine_output());
  });
  expect_disagreement("combine: dtype of rows", {"float32", "bfloat16"}, [](RefusalRank& own) {
    CombineInput in = own.combine_input();
    CombineOutput out = own.scratch.combine_output();
    if (own.rank == 2) {
      in.rows.dtype = DType::kBFloat16;
      out.x.dtype = DType::kBFloat16;
    }
    own.exchange.combine(own.plan, in, out);
  });
}

TEST(DisagreementTest, NamesAnotherPlan) {
  expect_disagreement("dispatch: plan number", {"1", "2"}, [](RefusalRank& own) {
    const Plan second = own.exchange.plan(own.routing(), own.options());
    const Plan& plan = own.rank == 2 ? second : own.plan;
    own.exchange.dispatch(plan, own.dispatch_input(), own.scratch.dispatch_output());
  });
}

// A rank that has left a call out makes the next one in its place, which looks the same.
TEST(DisagreementTest, NamesCallsThatHaveComeOutOfStep) {
  const auto options = [](const RefusalRank& own) {
    return CallOptions{.number = own.rank == 2 ? 8 : 7};
  };
  const std::string field = "the caller's number of this call";
  expect_disagreement("plan: " + field, {"7", "8"}, [&](RefusalRank& own) {
    static_cast<void>(own.exchange.plan(own.routing(), own.options(), options(own)));
  });
  expect_disagreement("dispatch: " + field, {"7", "8"}, [&](RefusalRank& own) {
    own.exchange.dispatch(
        own.plan, own.dispatch_input(), own.scratch.dispatch_output(), options(own)
    );
  });
  expect_disagreement("combine: " + field, {"7", "8"}, [&](RefusalRank& own) {
    own.exchange.combine(own.plan, own.combine_input(), own.scratch.combine_output(), options(own));
  });
}

TEST(DisagreementTest, NamesTheRankThatMakesAnotherCall) {
  const std::vector<std::string> texts = refused_texts([](RefusalRank& own) {
    if (own.rank == 2) {
      own.exchange.combine(own.plan, own.combine_input(), own.scratch.combine_output());
    } else {
      own.exchange.dispatch(own.plan, own.dispatch_input(), own.scratch.dispatch_output());
    }
  });
  const std::string why =
      "(all ranks make the same calls in the same order; this is call 2) [rank ";
  EXPECT_EQ(texts[0], "dispatch: rank 2 calls combine " + why + "0/3, loopback]");
  EXPECT_EQ(texts[1], "dispatch: rank 2 calls combine " + why + "1/3, loopback]");
  EXPECT_EQ(texts[2], "combine: rank 0 calls dispatch " + why + "2/3, loopback]");
}

// Ranks whose configs differ get no exchange, and may try again.
void expect_config_texts(
    const std::function<void(ExchangeConfig&)>& change, const std::vector<std::string>& expected
) {
  const RefusalWorld world;
  run_threads(3, [&](const Group& group) {
    ExchangeConfig config = world.setup.config();
    if (group.rank() == 1) {
      change(config);
    }
    const std::string text = text_of(thrown_by([&] { const Exchange exchange(group, config); }));
    EXPECT_TRUE(text.starts_with(expected[static_cast<size_t>(group.rank())])) << text;
    Exchange exchange(group, world.setup.config());
    EXPECT_EQ(run_cases(exchange, {&world.good, 1}), "");
  });
}

TEST(DisagreementTest, NamesEveryDifferenceOfAConfig) {
  const auto expected = [](const std::string& field, int good, int bad) {
    const auto text = [&](int mine, int theirs, int rank) {
      return fmt::format(
          "exchange: {} = {} here and {} on rank {} (must be equal on all ranks) [rank ",
          field,
          mine,
          theirs,
          rank
      );
    };
    return std::vector{text(good, bad, 1), text(bad, good, 0), text(good, bad, 1)};
  };
  expect_config_texts([](auto& c) { c.hidden = 64; }, expected("hidden", 32, 64));
  expect_config_texts([](auto& c) { c.max_tokens = 5; }, expected("max_tokens", 32, 5));
  expect_config_texts([](auto& c) { c.num_experts = 9; }, expected("num_experts", 6, 9));
  expect_config_texts([](auto& c) { c.max_topk = 3; }, expected("max_topk", 4, 3));
}

TEST(DisagreementTest, TellsAllRanksOfOneBadConfig) {
  const std::string text =
      "exchange: num_experts = 7 (expected a multiple of num_ranks = 3), on rank 1";
  expect_config_texts([](auto& c) { c.num_experts = 7; }, {text, text, text});
}

TEST(DisagreementTest, NamesAnotherTransport) {
  const std::string text = "open: rank 1 asks for transport \"shm\" (rank 0 for \"loopback\")";
  expect_config_texts([](auto& c) { c.transport = "shm"; }, {text, text, text});
}

}  // namespace
}  // namespace weft::test
