// SPDX-License-Identifier: Apache-2.0
// Plans made by the kernel equal the reference plan, whatever the routing. Skipped without a GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/gpu/devices.hpp"
#include "gpu/plan_world.hpp"
#include "plan/plan_data.hpp"

namespace weft::test {
namespace {

class PlanCudaTest : public testing::Test {
 protected:
  void SetUp() override {
    const GpuList list = list_gpus();
    if (list.gpus.empty()) {
      GTEST_SKIP() << "no GPU: " << list.none_reason;
    }
  }

  static void plan_all(PlanWorld& world, const CaseData& data) {
    world.load(data);
    for (int rank = 0; rank < data.setup.num_ranks; ++rank) {
      world.start(rank);
    }
    world.wait();
  }

  static void swap_all(PlanWorld& world, const CaseData& data) {
    world.load(data);
    for (int rank = 0; rank < data.setup.num_ranks; ++rank) {
      world.start_swap(rank);
    }
    world.wait();
  }

  // [num_ranks, num_experts]
  static std::vector<int32_t> counts_of(const CaseData& data) {
    std::vector<int32_t> counts;
    for (const Plan& plan : data.plans) {
      const size_t first = counts.size();
      counts.resize(first + static_cast<size_t>(data.setup.num_experts), 0);
      for (const int32_t expert : contents_of(plan).route_expert) {
        if (expert >= 0) {
          ++counts[first + static_cast<size_t>(expert)];
        }
      }
    }
    return counts;
  }

  static std::string run(PlanWorld& world, const CaseData& data) {
    plan_all(world, data);
    for (int rank = 0; rank < data.setup.num_ranks; ++rank) {
      const FaultRecord fault = world.fault(rank);
      if (fault.kind != FaultKind::kNone) {
        return fmt::format(
            "rank {}: fault {} of rank {}, waiting for {}",
            rank,
            static_cast<int>(fault.kind),
            fault.peer,
            static_cast<int>(fault.waiting_for)
        );
      }
    }
    return world.difference(data);
  }

  static ExchangeSetup setup(int num_ranks, int num_experts, int64_t max_tokens, int max_topk) {
    ExchangeSetup out;
    out.num_ranks = num_ranks;
    out.num_experts = num_experts;
    out.max_tokens = max_tokens;
    out.max_topk = max_topk;
    return out;
  }

  static Case case_of(const ExchangeSetup& shape, int64_t num_tokens, int topk) {
    Case spec;
    spec.num_tokens.assign(static_cast<size_t>(shape.num_ranks), num_tokens);
    spec.topk = topk;
    spec.calls = "";
    return spec;
  }

  // Random cases of one shape, one after the other in the same memory.
  static void run_random(const ExchangeSetup& shape, int num_blocks, int count) {
    PlanWorld world(shape, num_blocks);
    for (int i = 0; i < count; ++i) {
      Case spec = random_case(shape, 1000 + static_cast<uint64_t>(i));
      spec.calls = "";
      ASSERT_EQ(run(world, make_case_data(shape, spec)), "")
          << describe(shape, spec) << ", " << num_blocks << " blocks";
    }
  }
};

TEST_F(PlanCudaTest, EqualsTheReferenceForOneRank) {
  run_random(setup(1, 8, 100, 4), 1, 24);
  run_random(setup(1, 8, 100, 4), 4, 24);
}

TEST_F(PlanCudaTest, EqualsTheReferenceForTwoRanks) {
  run_random(setup(2, 16, 70, 6), 1, 24);
  run_random(setup(2, 16, 70, 6), 3, 24);
}

TEST_F(PlanCudaTest, EqualsTheReferenceForThreeRanks) {
  run_random(setup(3, 9, 150, 5), 2, 24);
  run_random(setup(3, 384, 600, 8), 7, 16);
}

TEST_F(PlanCudaTest, EqualsTheReferenceForFourRanks) {
  run_random(setup(4, 256, 700, 8), 8, 24);
  run_random(setup(4, 512, 40, 32), 4, 24);
}

TEST_F(PlanCudaTest, EqualsTheReferenceForEightRanks) {
  run_random(setup(8, 64, 300, 8), 4, 24);
  run_random(setup(8, 8, 90, 32), 2, 16);
}

TEST_F(PlanCudaTest, EqualsTheReferenceWithManyExperts) {
  run_random(setup(2, 1056, 64, 8), 3, 8);
  run_random(setup(2, 2048, 64, 8), 3, 8);
}

// Every number of lanes that a token can take.
TEST_F(PlanCudaTest, EqualsTheReferenceForEveryTopk) {
  const ExchangeSetup shape = setup(2, 64, 130, 32);
  PlanWorld world(shape, 2);
  for (int topk = 1; topk <= 32; ++topk) {
    Case spec = case_of(shape, 130 - topk, topk);
    spec.layout = static_cast<Layout>(topk % 3);
    spec.seed = static_cast<uint64_t>(topk);
    ASSERT_EQ(run(world, make_case_data(shape, spec)), "") << describe(shape, spec);
  }
}

// Both sizes of chunks, and more tokens than one pass of a warp takes.
TEST_F(PlanCudaTest, EqualsTheReferenceWithManyTokens) {
  const ExchangeSetup shape = setup(2, 32, 5000, 8);
  for (const int num_blocks : {1, 5, 16}) {
    PlanWorld world(shape, num_blocks);
    for (const int64_t num_tokens : {512, 513, 4096, 5000}) {
      for (const Layout layout :
           {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
        Case spec = case_of(shape, num_tokens, 8);
        spec.num_tokens[1] = 0;
        spec.layout = layout;
        spec.room = Room::kOneRowShort;
        ASSERT_EQ(run(world, make_case_data(shape, spec)), "") << describe(shape, spec);
      }
    }
  }
}

TEST_F(PlanCudaTest, RefusesAnIndexOutOfRangeOnEveryRank) {
  const ExchangeSetup shape = setup(3, 9, 100, 4);
  for (const int64_t value : {int64_t{9}, int64_t{-2}, int64_t{1} << 32}) {
    CaseData data = make_case_data(shape, case_of(shape, 100, 4));
    data.routing[1].topk_idx.as<int64_t>()[17 * 4 + 3] = value;
    PlanWorld world(shape, 2);
    plan_all(world, data);
    const FaultRecord fault = world.fault(1);
    EXPECT_EQ(fault.kind, FaultKind::kBadIndex);
    EXPECT_EQ(fault.seen, 17);
    EXPECT_EQ(fault.what, 3);
    EXPECT_EQ(fault.wanted, value);
    for (const int rank : {0, 2}) {
      EXPECT_EQ(world.fault(rank).kind, FaultKind::kRefused);
      EXPECT_EQ(world.fault(rank).peer, 1);
    }
  }
}

TEST_F(PlanCudaTest, RefusesAMapRowWithTooManyExperts) {
  const ExchangeSetup shape = setup(2, 40, 100, 4);
  Case spec = case_of(shape, 100, 4);
  spec.index = IndexKind::kMap;
  CaseData data = make_case_data(shape, spec);
  std::fill_n(data.routing[0].map.as<bool>() + 99 * 40 + 30, 5, true);
  PlanWorld world(shape, 4);
  plan_all(world, data);
  EXPECT_EQ(world.fault(0).kind, FaultKind::kTooMany);
  EXPECT_EQ(world.fault(0).seen, 99);
  EXPECT_EQ(world.fault(0).wanted, 4);
  EXPECT_EQ(world.fault(1).kind, FaultKind::kRefused);
}

TEST_F(PlanCudaTest, NamesTheFieldThatDiffers) {
  const ExchangeSetup shape = setup(2, 8, 20, 2);
  PlanWorld world(shape, 2);
  const CaseData data = make_case_data(shape, case_of(shape, 20, 2));
  world.load(data);
  world.launch_of(1).signature.words[4] = 5;
  world.start(0);
  world.start(1);
  world.wait();
  EXPECT_EQ(world.fault(0).kind, FaultKind::kMismatch);
  EXPECT_EQ(world.fault(0).what, 4);
  EXPECT_EQ(world.fault(0).seen, 5);
  EXPECT_EQ(world.fault(0).wanted, 104);
  EXPECT_EQ(world.fault(1).seen, 104);
}

TEST_F(PlanCudaTest, NamesTheRankThatDoesNotCome) {
  const ExchangeSetup shape = setup(2, 8, 20, 2);
  PlanWorld world(shape, 2, 50'000'000);
  world.load(make_case_data(shape, case_of(shape, 20, 2)));
  world.start(0);
  world.wait();
  EXPECT_EQ(world.fault(0).kind, FaultKind::kTimeout);
  EXPECT_EQ(world.fault(0).peer, 1);
  EXPECT_EQ(world.fault(0).waiting_for, WaitFor::kWord);
}

// And makes the plan in the second half of the call, here of the same experts.
TEST_F(PlanCudaTest, LearnsTheCountsOfAllRanks) {
  for (const int num_ranks : {1, 2, 4}) {
    const ExchangeSetup shape = setup(num_ranks, 64, 300, 8);
    for (const int num_blocks : {1, 3}) {
      PlanWorld world(shape, num_blocks);
      for (uint64_t seed = 0; seed < 12; ++seed) {
        Case spec = random_case(shape, 2000 + seed);
        spec.calls = "";
        const CaseData data = make_case_data(shape, spec);
        swap_all(world, data);
        for (int rank = 0; rank < num_ranks; ++rank) {
          ASSERT_EQ(world.fault(rank).kind, FaultKind::kNone);
          ASSERT_EQ(world.swapped(rank), counts_of(data)) << describe(shape, spec);
          world.start_second(rank);
        }
        world.wait();
        ASSERT_EQ(world.difference(data), "") << describe(shape, spec);
        ASSERT_EQ(run(world, data), "") << describe(shape, spec);
      }
    }
  }
}

TEST_F(PlanCudaTest, LearnsNoCountsOfARefusedCall) {
  const ExchangeSetup shape = setup(2, 8, 100, 4);
  CaseData data = make_case_data(shape, case_of(shape, 100, 4));
  data.routing[1].topk_idx.as<int64_t>()[3] = 8;
  PlanWorld world(shape, 2);
  swap_all(world, data);
  EXPECT_EQ(world.fault(0).kind, FaultKind::kRefused);
  EXPECT_EQ(world.fault(1).kind, FaultKind::kBadIndex);
  EXPECT_EQ(world.swapped(0), std::vector<int32_t>(16, 0));
  EXPECT_EQ(world.swapped(1), std::vector<int32_t>(16, 0));
  for (const int rank : {0, 1}) {  // each ends by itself: nobody waits for anybody any more
    world.start_second(rank);
    world.wait();
  }
  EXPECT_EQ(world.fault(0).kind, FaultKind::kRefused);
  EXPECT_EQ(world.fault(1).kind, FaultKind::kBadIndex);
}

TEST_F(PlanCudaTest, NamesTheRankThatDoesNotComeToTheSecondHalf) {
  const ExchangeSetup shape = setup(2, 8, 20, 2);
  PlanWorld world(shape, 2, 50'000'000);
  swap_all(world, make_case_data(shape, case_of(shape, 20, 2)));
  world.start_second(0);
  world.wait();
  EXPECT_EQ(world.fault(0).kind, FaultKind::kTimeout);
  EXPECT_EQ(world.fault(0).peer, 1);
  EXPECT_EQ(world.fault(0).waiting_for, WaitFor::kWord);
}

// Prints, and judges nothing.
TEST_F(PlanCudaTest, TellsHowLongAPlanTakes) {
  for (const int num_ranks : {1, 4}) {
    for (const int64_t num_tokens : {128, 4096}) {
      const ExchangeSetup shape = setup(num_ranks, 256, 4096, 8);
      for (const int num_blocks : {1, 2, 4, 8, 16, 32}) {
        const CaseData data = make_case_data(shape, case_of(shape, num_tokens, 8));
        PlanWorld world(shape, num_blocks);
        ASSERT_EQ(run(world, data), "");
        for (int rank = 0; rank < num_ranks; ++rank) {
          world.launch_of(rank).host_shape = nullptr;
        }
        fmt::print(
            "plan: {} ranks on one GPU, T {}, K 8, E 256, {} blocks: {:.1f} us\n",
            num_ranks,
            num_tokens,
            num_blocks,
            world.microseconds(50)
        );
      }
    }
  }
}

}  // namespace
}  // namespace weft::test
