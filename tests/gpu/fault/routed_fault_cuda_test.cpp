// SPDX-License-Identifier: Apache-2.0
// Faults in a call that plans and dispatches, whose rows are on their way before any rank knows of
// the fault.
#include <chrono>
#include <cstring>
#include <thread>

#include "core/gpu/device_memory.hpp"
#include "gpu/fault_world.hpp"
#include "support/stream.hpp"

namespace weft::test {
namespace {

class GpuRoutedFaultTest : public GpuTest {};

TEST_F(GpuRoutedFaultTest, RefusesAnIndexOutOfRange) {
  expect_bad_index_is_refused(num_gpus(), [](FaultRank& own) { own.plan_and_dispatch(); });
}

// One block plans all, and gives up before it comes to the tokens that are at fault.
TEST_F(GpuRoutedFaultTest, RefusesAnIndexOutOfRangeOnFewMultiprocessors) {
  expect_bad_index_is_refused(num_gpus(), [](FaultRank& own) {
    CallOptions call;
    call.num_sms = 2;
    own.plan_and_dispatch(call);
  });
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
  const std::string field = "plan: has_weights of x in the same call";
  expect_disagreement(num_gpus(), field, {"true", "false"}, [](FaultRank& own) {
    if (own.rank == 2) {
      own.dispatch_in.weights = {};
      own.dispatch_out.weights = {};
    }
    own.plan_and_dispatch();
  });
}

TEST_F(GpuRoutedFaultTest, NamesTheRankThatPlansAlone) {
  const std::string field = "plan: dtype of x in the same call";
  expect_disagreement(num_gpus(), field, {"bfloat16", "none"}, [](FaultRank& own) {
    own.options.row_budget = own.dispatch_out.rows.rows;
    own.rank == 2 ? own.make_plan() : own.plan_and_dispatch();
  });
}

// A slow rank is named by the time that others waited for it.
TEST_F(GpuRoutedFaultTest, CountsWaits) {
  const FaultWorld world(num_gpus());
  run_threads(3, [&](const Group& group) {
    Exchange exchange(group, world.setup.config(group.rank()));
    FaultRank own(exchange, world.good);
    own.make_plan();
    group.barrier();
    const double before = exchange.stats().wait_seconds[1];
    group.barrier();
    if (group.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    own.plan_and_dispatch();
    if (group.rank() != 1) {
      EXPECT_GT(exchange.stats().wait_seconds[1] - before, 0.05);
    }
    group.barrier();
  });
}

// With a stream nobody waits for the plan: ranks whose plan is good dispatch before they hear of
// the other's. All must count that call; copy engines make two calls of it, else it is one launch.
void expect_refusal_in_a_stream(int num_gpus, bool copy_engines, const FaultCall& spoil) {
  const std::vector<std::string> texts = fault_texts(num_gpus, [&](FaultRank& own) {
    const TestStream stream(own.exchange.config().device);
    const CallOptions call = {.stream = stream.get(), .copy_engines = copy_engines};
    own.options.row_budget = own.dispatch_out.rows.rows;
    if (own.rank == 1) {
      spoil(own);
    }
    own.plan.emplace(
        own.exchange.dispatch(own.routing, own.options, own.dispatch_in, own.dispatch_out, call)
    );
    stream.wait();
    own.exchange.check();
  });
  for (const int rank : {0, 2}) {
    const std::string& text = texts[static_cast<size_t>(rank)];
    EXPECT_NE(text.find("rank 1 refused the call: "), std::string::npos) << text;
  }
}

TEST_F(GpuRoutedFaultTest, CountsWhatARefusedPlanLeavesToOthers) {
  for (const bool copy_engines : {false, true}) {
    SCOPED_TRACE(copy_engines);
    expect_refusal_in_a_stream(num_gpus(), copy_engines, [](FaultRank& own) {
      own.routing.topk_idx.rows = 33;  // more than max_tokens
    });
  }
  // One launch may leave the number of rows open; the two calls of copy engines may not.
  expect_refusal_in_a_stream(num_gpus(), /*copy_engines=*/true, [](FaultRank& own) {
    own.options.row_budget.reset();
  });
}

// This rank does not know whether the others make one launch of it; it counts what they count.
TEST_F(GpuRoutedFaultTest, ARankRefusesBothWithoutACall) {
  for (const bool copy_engines : {false, true}) {
    SCOPED_TRACE(copy_engines);
    expect_refusal_in_a_stream(num_gpus(), copy_engines, [](FaultRank& own) {
      const TestStream stream(own.exchange.config().device);
      own.exchange.refuse(
          Op::kPlanAndDispatch, "my tokens are not ready", {.stream = stream.get()}
      );
      throw Error(ErrorCode::kInvalidArgument, "as told", 1, "");
    });
  }
}

TEST_F(GpuRoutedFaultTest, NamesTheRankThatDoesNotCome) {
  expect_timeout(
      num_gpus(), "plan", 1, [](FaultRank&) {}, [](FaultRank& own) { own.plan_and_dispatch(); }
  );
}

// A rank that does not come to a call is not forgiven because another one refuses it: the next
// calls would be two ahead of that rank's.
TEST_F(GpuRoutedFaultTest, ARefusalDoesNotExcuseARankThatDoesNotCome) {
  FaultWorld world(num_gpus());
  run_threads(3, [&](const Group& group) {
    ExchangeConfig config = world.setup.config(group.rank());
    config.timeout = std::chrono::milliseconds(500);
    Exchange exchange(group, config);
    FaultRank own(exchange, world.good);
    group.barrier();
    if (group.rank() == 0) {
      const auto thrown = thrown_by([&] { own.plan_and_dispatch(); });
      const std::string text = text_of(thrown);
      EXPECT_TRUE(thrown.value_or(Thrown{}).is_timeout) << text;
      EXPECT_NE(text.find("rank 1 refused the call: it has no memory"), std::string::npos) << text;
      EXPECT_NE(text.find("; then no handshake for 0.5 s from rank 2"), std::string::npos) << text;
      EXPECT_EQ(text_of(thrown_by([&] { own.plan_and_dispatch(); })), text) << "told again";
    } else if (group.rank() == 1) {
      own.exchange.refuse(Op::kPlanAndDispatch, "it has no memory");
    }
    group.barrier();
  });
}

// Rank 0 has broken off before the others come, and what it had queued runs on without them, or its
// host refuses the last: they get the rows of their own call all the same, and hear of the break in
// the next.
void expect_late_ranks_get_their_rows(bool refuses_last) {
  FaultWorld world(num_gpus());
  run_threads(3, [&](const Group& group) {
    ExchangeConfig config = world.setup.config(group.rank());
    config.timeout = std::chrono::milliseconds(group.rank() == 0 ? 200 : 5000);
    Exchange exchange(group, config);
    FaultRank own(exchange, world.good);
    own.options.row_budget = own.dispatch_out.rows.rows;
    const auto call = [&](const CallOptions& options) {
      return exchange.dispatch(
          own.routing, own.options, own.dispatch_in, own.dispatch_out, options
      );
    };
    const TestStream stream(exchange.config().device);
    group.barrier();
    if (group.rank() == 0) {
      std::vector<Plan> plans;
      for (int i = 0; i < (refuses_last ? 2 : 3); ++i) {
        plans.push_back(call({.stream = stream.get()}));
      }
      if (refuses_last) {
        exchange.refuse(Op::kPlanAndDispatch, "it has no memory", {.stream = stream.get()});
      }
      stream.wait();
      EXPECT_TRUE(thrown_by([&] { exchange.check(); }).value_or(Thrown{}).is_timeout);
    }
    group.barrier();  // now ranks 1 and 2 come
    if (group.rank() != 0) {
      static_cast<void>(call({}));
      const ConstTensor wanted = world.good.calls[0][static_cast<size_t>(group.rank())].rows.view();
      std::vector<std::byte> rows(static_cast<size_t>(wanted.num_bytes()));
      const Tensor& out = own.dispatch_out.rows;
      copy_between(rows.data(), {}, out.data, out.device, rows.size());
      EXPECT_EQ(std::memcmp(rows.data(), wanted.data, rows.size()), 0);
      const std::string text = text_of(thrown_by([&] { static_cast<void>(call({})); }));
      EXPECT_NE(text.find("rank 0 refused the call"), std::string::npos) << text;
    }
    group.barrier();
  });
}

TEST_F(GpuRoutedFaultTest, ALateRankGetsTheRowsOfItsCall) {
  for (const bool refuses_last : {false, true}) {
    SCOPED_TRACE(refuses_last);
    expect_late_ranks_get_their_rows(refuses_last);
  }
}

}  // namespace
}  // namespace weft::test
