// SPDX-License-Identifier: Apache-2.0
// Calls that send first and receive later: what the first launch waits for, which is nobody, and
// where faults are told.
#include <chrono>
#include <cstring>
#include <thread>

#include "core/gpu/device_memory.hpp"
#include "gpu/fault_world.hpp"

namespace weft::test {
namespace {

class GpuLaterTest : public GpuTest {};

std::vector<std::byte> bytes_of(const Tensor& tensor) {
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.num_bytes()));
  copy_between(bytes.data(), {}, tensor.data, tensor.device, bytes.size());
  return bytes;
}

void expect_rows(const FaultWorld& world, const FaultRank& own) {
  const ConstTensor wanted = world.good.calls[0][static_cast<size_t>(own.rank)].rows.view();
  const std::vector<std::byte> rows = bytes_of(own.dispatch_out.rows);
  EXPECT_EQ(std::memcmp(rows.data(), wanted.data, rows.size()), 0) << "rank " << own.rank;
}

// A combine by source weights, the same as those of the routing.
CombineInput by_source_weights(const FaultRank& own) {
  return {
      .rows = own.combine_in.rows,
      .source_weights = own.routing.weights,
      .scale = CombineScale::kSourceWeights};
}

// Rank 0's send has ended on its GPU before any other rank has called: without a stream of the
// caller's a call returns when its launch has ended.
TEST_F(GpuLaterTest, ASendWaitsForNobody) {
  const FaultWorld world(num_gpus());
  run_threads(3, [&](const Group& group) {
    Exchange exchange = make_exchange(group, world.setup);
    FaultRank own(exchange, world.good);
    CallOptions later;
    later.receives_later = true;
    const auto send = [&](const auto& call) {
      group.barrier();
      if (group.rank() == 0) {
        call();
      }
      group.barrier();
      if (group.rank() != 0) {
        call();
      }
    };
    for (int round = 0; round < 3; ++round) {
      send([&] { own.send(); });
      own.receive();
      expect_rows(world, own);
      const CombineInput in = by_source_weights(own);
      const CombineOutput out = {own.combine_out.x};
      send([&] { exchange.combine(*own.plan, in, out, later); });
      exchange.receive(*own.plan);
      const std::vector<std::byte> sums = bytes_of(out.x);
      exchange.combine(*own.plan, in, out);
      EXPECT_EQ(sums, bytes_of(out.x)) << "rank " << own.rank;
    }
    group.barrier();
  });
}

TEST_F(GpuLaterTest, TheNextCallReceivesFirst) {
  const FaultWorld world(num_gpus());
  run_threads(3, [&](const Group& group) {
    Exchange exchange = make_exchange(group, world.setup);
    FaultRank own(exchange, world.good);
    FaultRank other(exchange, world.good);
    own.send();
    other.send();
    expect_rows(world, own);
    own.receive();  // of a call that is received: nothing is left of it
    own.make_plan();
    expect_rows(world, other);
    EXPECT_EQ(exchange.stats().num_dispatches, 2);
    group.barrier();
  });
}

// The first `num_rows` rows of an output.
DispatchOutput first_rows(DispatchOutput out, int64_t num_rows) {
  for (Tensor* each : {&out.rows, &out.weights, &out.scales}) {
    each->rows = num_rows;
  }
  return out;
}

// Nobody gives the number of rows, and ranks have memory for other numbers of them.
TEST_F(GpuLaterTest, RowsArePlacedWhereThereWasNoRoomForThem) {
  const FaultWorld world(num_gpus());
  run_threads(3, [&](const Group& group) {
    Exchange exchange = make_exchange(group, world.setup);
    FaultRank own(exchange, world.good);
    const int64_t num_rows = own.dispatch_out.rows.rows;
    ASSERT_GT(num_rows, 2);
    ASSERT_TRUE(exchange.writes_alone(own.routing, own.options, own.dispatch_in));
    for (const int64_t room : {int64_t{0}, num_rows / 2, num_rows - 1, num_rows}) {
      const bool is_short = room < num_rows && group.rank() != 1;
      const int64_t there = is_short ? room : num_rows;
      const Plan plan = exchange.dispatch(
          own.routing, own.options, own.dispatch_in, first_rows(own.dispatch_out, there)
      );
      EXPECT_EQ(plan.num_rows(), num_rows);
      const auto place = [&](const Plan& of, const DispatchInput& in, const DispatchOutput& out) {
        return text_of(thrown_by([&] { exchange.place_rows(of, in, out); }));
      };
      const std::string nothing = "place_rows: the plan is not of the last call";
      if (is_short) {
        const Plan other(std::make_shared<PlanData>(contents_of(plan)));
        EXPECT_TRUE(place(other, own.dispatch_in, own.dispatch_out).starts_with(nothing));
        DispatchInput bare = own.dispatch_in;
        bare.weights = {};
        DispatchOutput bare_out = own.dispatch_out;
        bare_out.weights = {};
        EXPECT_TRUE(place(plan, bare, bare_out).starts_with("place_rows: what is to be placed"));
        exchange.place_rows(plan, own.dispatch_in, own.dispatch_out);
      }
      EXPECT_TRUE(place(plan, own.dispatch_in, own.dispatch_out).starts_with(nothing));
      expect_rows(world, own);
      exchange.combine(plan, own.combine_in, own.combine_out);
    }
    group.barrier();
  });
}

// A rank that stays away, and one whose rows are refused, are told as where the number is given.
TEST_F(GpuLaterTest, AnOpenNumberOfRowsTellsFaults) {
  const auto call = [](FaultRank& own) {
    own.plan = own.exchange.dispatch(
        own.routing, own.options, own.dispatch_in, first_rows(own.dispatch_out, 0)
    );
  };
  expect_timeout(
      num_gpus(), "plan", 1, [](FaultRank&) {}, call
  );
  expect_bad_index_is_refused(num_gpus(), call);
  expect_refusal(
      num_gpus(),
      "plan",
      "dispatch: x has shape [31, 32] (expected [32, 32])",
      [&](FaultRank& own) {
        if (own.rank == 1) {
          own.dispatch_in.x.rows = 31;
        }
        call(own);
      }
  );
}

TEST_F(GpuLaterTest, TheReceiveTellsABadIndex) {
  expect_bad_index_is_refused(num_gpus(), [](FaultRank& own) {
    own.send();
    own.receive();
  });
}

TEST_F(GpuLaterTest, TheReceiveTellsARefusal) {
  expect_refusal(
      num_gpus(),
      "plan",
      "dispatch: x has shape [31, 32] (expected [32, 32])",
      [](FaultRank& own) {
        if (own.rank == 1) {
          own.dispatch_in.x.rows = 31;
        }
        own.send();
        own.receive();
      }
  );
}

TEST_F(GpuLaterTest, TheReceiveNamesTheRankThatDoesNotCome) {
  expect_timeout(
      num_gpus(),
      "plan",
      1,
      [](FaultRank&) {},
      [](FaultRank& own) {
        own.send();
        own.receive();
      }
  );
}

TEST_F(GpuLaterTest, NamesTheRankThatCombinesAtOnce) {
  const std::string field = "combine: is received later or by marks";
  expect_disagreement(num_gpus(), field, {"true", "false"}, [](FaultRank& own) {
    CallOptions call;
    call.receives_later = own.rank != 2;
    own.exchange.combine(*own.plan, by_source_weights(own), {own.combine_out.x}, call);
    own.exchange.receive(*own.plan);
  });
}

// The marks of this rank's experts are not what the call waits for.
TEST_F(GpuLaterTest, NamesTheBlockThatIsNeverWhole) {
  const FaultWorld world(num_gpus());
  run_threads(1, [&](const Group& group) {
    ExchangeSetup setup = world.setup;
    setup.num_ranks = 1;
    setup.timeout = std::chrono::milliseconds(300);
    Case spec;
    spec.num_tokens = {8};
    spec.layout = Layout::kExpertStrided;
    spec.rows = 8;
    spec.dtype = DType::kBFloat16;
    spec.experts = {0, 4};
    const CaseData data = make_case_data(setup, spec);
    Exchange exchange = make_exchange(group, setup);
    FaultRank own(exchange, data);
    own.make_plan();
    CaseMemory memory(exchange);
    Matrix marks(DType::kInt32, 1, 6 * 2);
    std::fill_n(marks.as<int32_t>(), 12, 3);
    marks.as<int32_t>()[9] = 2;  // expert 4, rows 4 to 7
    const CaseMemory::Placed& placed = memory.add(marks);
    memory.upload();
    CombineInput in = by_source_weights(own);
    in.ready = {.marks = placed.tensor(), .wanted = 3, .block_rows = 4};
    const auto thrown = thrown_by([&] { exchange.combine(*own.plan, in, {own.combine_out.x}); });
    EXPECT_TRUE(thrown.value_or(Thrown{}).is_timeout) << text_of(thrown);
    const std::string text =
        "for block 1 of the rows of expert 4 in call 2 (its mark is 2, wanted 3";
    EXPECT_NE(text_of(thrown).find(text), std::string::npos) << text_of(thrown);
  });
}

}  // namespace
}  // namespace weft::test
