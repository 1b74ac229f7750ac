// SPDX-License-Identifier: Apache-2.0
// Bad input to dispatch() and combine() on one rank: one error on every rank, nothing written, and
// the exchange stays usable. tests/unit/call/validate_test.cpp has the text of every check.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <unistd.h>

#include "refusal.hpp"

namespace weft::test {
namespace {

void expect_dispatch_refused(
    const std::string& reason, const std::function<void(DispatchInput&, DispatchOutput&)>& spoil
) {
  expect_refusal_of_rank_1("dispatch", reason, [&](RefusalRank& own) {
    DispatchInput in = own.dispatch_input();
    DispatchOutput out = own.scratch.dispatch_output();
    if (own.rank == 1) {
      spoil(in, out);
    }
    own.exchange.dispatch(own.plan, in, out);
  });
}

void expect_combine_refused(
    const std::string& reason, const std::function<void(CombineInput&, CombineOutput&)>& spoil
) {
  expect_refusal_of_rank_1("combine", reason, [&](RefusalRank& own) {
    CombineInput in = own.combine_input();
    CombineOutput out = own.scratch.combine_output();
    if (own.rank == 1) {
      spoil(in, out);
    }
    own.exchange.combine(own.plan, in, out);
  });
}

TEST(BadCallTest, RefusesAWrongShape) {
  expect_dispatch_refused(
      "dispatch: x has shape [31, 32] (expected [32, 32])", [](auto& in, auto&) { in.x.rows = 31; }
  );
  expect_combine_refused("combine: x has shape [32, 16] (expected [32, 32])", [](auto&, auto& out) {
    out.x.cols = 16;
  });
}

TEST(BadCallTest, RefusesAWrongDtype) {
  expect_dispatch_refused(
      "dispatch: x has dtype int64 (expected bfloat16 or float16 or float32 or byte)",
      [](auto& in, auto&) { in.x.dtype = DType::kInt64; }
  );
  expect_combine_refused("combine: x has dtype float16 (expected float32)", [](auto&, auto& out) {
    out.x.dtype = DType::kFloat16;
  });
}

TEST(BadCallTest, RefusesAWrongDevice) {
  expect_dispatch_refused(
      "dispatch: rows is on cuda 0 (the exchange is on cpu)",
      [](auto&, auto& out) {
        out.rows.device = {Device::Kind::kCuda, 0};
      }
  );
  expect_combine_refused(
      "combine: rows is on cuda 0 (the exchange is on cpu)",
      [](auto& in, auto&) {
        in.rows.device = {Device::Kind::kCuda, 0};
      }
  );
}

TEST(BadCallTest, RefusesAWrongStride) {
  expect_dispatch_refused(
      "dispatch: x has row stride 48 (expected 32: rows must be adjacent)",
      [](auto& in, auto&) { in.x.row_stride = 48; }
  );
  expect_combine_refused(
      "combine: x has row stride 31 (expected 32: rows must be adjacent)",
      [](auto&, auto& out) { out.x.row_stride = 31; }
  );
}

TEST(BadCallTest, RefusesAWrongRowSize) {
  expect_dispatch_refused(
      "dispatch: x has rows of 20 bytes (expected a positive multiple of 16)",
      [](auto& in, auto& out) {
        in.x.dtype = DType::kByte;
        in.x.cols = 20;
        out.rows.dtype = DType::kByte;
        out.rows.cols = 20;
      }
  );
}

TEST(BadCallTest, RefusesToDispatchByRoutingWithoutANumberOfRows) {
  expect_refusal_of_rank_1(
      "plan",
      "dispatch: the number of rows is open while the output is given (row_budget or "
      "expert_stride must be given, with overflow drop, where it is not one launch)",
      [](RefusalRank& own) {
        PlanOptions options = own.options();
        options.row_budget.reset();
        if (own.rank != 1) {
          options.row_budget = own.scratch.rows.view().rows;
        }
        static_cast<void>(own.exchange.dispatch(
            own.routing(), options, own.dispatch_input(), own.scratch.dispatch_output()
        ));
      }
  );
}

TEST(BadCallTest, HasNoRowsToPlaceWhereTheyAreInTheOutput) {
  const RefusalWorld world;
  run_threads(3, [&](const Group& group) {
    Exchange exchange(group, world.setup.config());
    const auto rank = static_cast<size_t>(group.rank());
    const RankRouting& routing = world.good.routing[rank];
    const Plan plan = exchange.plan(routing.routing(), routing.options);
    RankCall scratch = world.good.calls[0][rank];
    const auto thrown = thrown_by([&] {
      exchange.place_rows(
          plan, world.good.calls[0][rank].dispatch_input(), scratch.dispatch_output()
      );
    });
    EXPECT_TRUE(text_of(thrown).starts_with("place_rows: the plan is not of the last call"));
    EXPECT_EQ(thrown->code, ErrorCode::kInvalidArgument);
    group.barrier();
  });
}

TEST(BadCallTest, RefusesAPlanOfAnotherExchange) {
  // All ranks pass it: each refuses by itself.
  const RefusalWorld world;
  run_threads(3, [&](const Group& group) {
    Exchange other(group, world.setup.config());
    Exchange exchange(group, world.setup.config());
    const auto rank = static_cast<size_t>(group.rank());
    const RankRouting& routing = world.good.routing[rank];
    const Plan plan = other.plan(routing.routing(), routing.options);
    RankCall scratch = world.good.calls[0][rank];
    EXPECT_EQ(
        text_of(thrown_by([&] {
          exchange.dispatch(
              plan, world.good.calls[0][rank].dispatch_input(), scratch.dispatch_output()
          );
        })),
        fmt::format(
            "dispatch: plan belongs to another exchange (expected one that this exchange made) "
            "[rank {}/3, loopback]",
            rank
        )
    );
  });
}

TEST(BadCallTest, RefusesAPlanFromAFile) {
  const std::string path =
      (std::filesystem::temp_directory_path() / fmt::format("weft_plan_{}.json", ::getpid()))
          .string();
  expect_refusal_of_rank_1(
      "dispatch",
      "dispatch: plan belongs to no exchange: it was loaded from a file or built alone (expected "
      "one that this exchange made)",
      [&](RefusalRank& own) {
        if (own.rank == 1) {
          own.plan.save(path);
          const Plan loaded = Plan::load(path);
          EXPECT_EQ(loaded, own.plan);
          own.plan = loaded;
        }
        own.exchange.dispatch(own.plan, own.dispatch_input(), own.scratch.dispatch_output());
      }
  );
  std::filesystem::remove(path);
}

TEST(BadCallTest, RefusesAnAllocationThatCannotBe) {
  const RefusalWorld world;
  constexpr int64_t kHuge = int64_t{1} << 31;
  run_threads(3, [&](const Group& group) {
    Exchange exchange(group, world.setup.config());
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{-1, 4}, {kHuge, kHuge}}) {
      EXPECT_EQ(
          text_of(thrown_by([&, rows = rows, cols = cols] {
            static_cast<void>(exchange.allocate(rows, cols, DType::kFloat32));
          })),
          fmt::format(
              "allocate: shape [{}, {}] (expected no negative size, and less than 2^62 B) "
              "[rank {}/3, loopback]",
              rows,
              cols,
              group.rank()
          )
      );
    }
  });
}

// A rank that is wrong and a rank that is wrong in another way: each says its own.
TEST(BadCallTest, LetsEachRankSayItsOwnFault) {
  const std::vector<std::string> texts = refused_texts([](RefusalRank& own) {
    DispatchInput in = own.dispatch_input();
    if (own.rank == 0) {
      in.x.row_stride = 40;
    }
    if (own.rank == 2) {
      in.x.rows = 1;
    }
    own.exchange.dispatch(own.plan, in, own.scratch.dispatch_output());
  });
  EXPECT_TRUE(texts[0].starts_with("dispatch: x has row stride 40")) << texts[0];
  EXPECT_TRUE(texts[1].starts_with("dispatch: rank 0 refused the call: dispatch: x has row stride"))
      << texts[1];
  EXPECT_TRUE(texts[2].starts_with("dispatch: x has shape [1, 32]")) << texts[2];
}

// A caller that cannot make the call at all says why, instead of making it wrong.
TEST(BadCallTest, ARankRefusesWithoutACall) {
  using Refused = std::tuple<Op, std::string, std::function<void(RefusalRank&)>>;
  const std::vector<Refused> calls = {
      {Op::kPlan, "plan", [](auto& own) { static_cast<void>(own.exchange.plan(own.routing())); }},
      {Op::kDispatch,
       "dispatch",
       [](auto& own) {
         own.exchange.dispatch(own.plan, own.dispatch_input(), own.scratch.dispatch_output());
       }},
      {Op::kCombine,
       "combine",
       [](auto& own) {
         own.exchange.combine(own.plan, own.combine_input(), own.scratch.combine_output());
       }},
      {Op::kPlanAndDispatch, "plan", [](auto& own) {
         PlanOptions options = own.options();
         options.row_budget = own.plan.num_rows();
         static_cast<void>(own.exchange.dispatch(
             own.routing(), options, own.dispatch_input(), own.scratch.dispatch_output()
         ));
       }}};
  const std::string reason = "my rows are " + std::string(600, 'x');  // more than travels
  for (const auto& [op, name, call] : calls) {
    const std::vector<std::string> texts =
        refused_texts([&, op = op, call = call](RefusalRank& own) {
          if (own.rank == 1) {
            own.exchange.refuse(op, reason);
            throw Error(ErrorCode::kInvalidArgument, "as told", 1, "");
          }
          call(own);
        });
    EXPECT_EQ(texts[1], "as told");
    EXPECT_EQ(
        texts[0],
        name + ": rank 1 refused the call: " + reason.substr(0, 511) + " [rank 0/3, loopback]"
    );
  }
}

}  // namespace
}  // namespace weft::test
