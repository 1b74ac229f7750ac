// SPDX-License-Identifier: Apache-2.0
// agreement_test.cpp compares with real exchanges; here is how memory grows.
#include <gtest/gtest.h>

#include "core/size_class.hpp"
#include "cpu/protocol/region_map.hpp"
#include "cuda/layout/control.hpp"
#include "cuda/layout/plan.hpp"
#include "hosts/call_memory.hpp"
#include "simulate/simulate.hpp"
#include "simulate_cases.hpp"

namespace weft::sim {
namespace {

// Rows of 256 B, in domains of 4 unless said.
Memory reserved(
    int num_ranks, int num_experts = 2304, int ranks_per_domain = 4, int64_t max_tokens = 4096
) {
  Scenario scenario = small_scenario();
  scenario.ranks_per_domain = ranks_per_domain;
  scenario.num_ranks = num_ranks;
  scenario.num_experts = num_experts;
  scenario.max_tokens = max_tokens;
  scenario.topk = 8;
  return reserved_memory(scenario);
}

TEST(SimulatedMemoryTest, FollowsTheMapsOfTheExecutors) {
  const Memory memory = reserved(32, 2304, 32);
  const DeviceControlMap control = {32, 2304, 4096, 8};
  const PlanMap plan = {32, 2304, 4096, 8, kMostReplicas};
  EXPECT_EQ(memory.gpu.control(), control.num_bytes());
  EXPECT_EQ(memory.gpu.plan, plan.num_bytes());
  EXPECT_EQ(memory.gpu.staging, size_class(4096 * 8 * (256 + 256)));
  EXPECT_EQ(memory.gpu.host, 0U);
}

TEST(SimulatedMemoryTest, ShortCallsOfOneDomainHaveRoomForEarlyRows) {
  const Memory memory = reserved(4, 256, 4, 128);
  const DeviceControlMap control = {4, 256, 128, 8, 256};
  EXPECT_EQ(memory.gpu.control(), control.num_bytes());
}

TEST(SimulatedMemoryTest, GpusOfADomainKnowTheirOwnAndPlanInRounds) {
  const Memory memory = reserved(32);
  const DeviceControlMap control = {4, 288, 4096, 8};
  const PlanMap plan = {4, 288, 4096, 8, kMostReplicas};
  EXPECT_EQ(memory.gpu.control(), control.num_bytes());
  EXPECT_EQ(memory.gpu.plan, 8 * plan.num_bytes());  // own tokens, and those of 7 carried sources
}

TEST(SimulatedMemoryTest, GpusKeepRoomForAllThatMayCross) {
  const Memory::Gpu gpu = reserved(32).gpu;
  // Room for rows, weights and small scale rows of every token, to 7 domains or from 7 sources.
  const CallRoom room = room_of_calls(
      {.num_others = 7,
       .num_forwarded = 7,
       .max_tokens = 4096,
       .max_topk = 8,
       .token_bytes = 256 + 64 + 256}
  );
  const PlanMap plan = {4, 288, 4096, 8};
  const uint64_t image = size_class(16 * plan.num_bytes() + (1 << 20));
  const uint64_t done = room.num_messages * 4;
  EXPECT_EQ(gpu.host, size_class(room.staging) + room.messages + done + image);
  const uint64_t in_domain = size_class(4096 * 4 * (256 + 256));
  EXPECT_EQ(gpu.staging, in_domain + size_class(room.work) + gpu.host);
  EXPECT_LT(room.staging, uint64_t{7} * 4096 * (256 + 64 + 256) * 11 / 10);
}

TEST(SimulatedMemoryTest, GpusOfUnevenDomainsPlanAsManyRoundsAsTheBusiestForwarder) {
  const Memory memory = reserved(9);  // domains of 4, 4 and 1: the last one's forwarder is rank 0
  const PlanMap plan = {4, 1024, 4096, 8, kMostReplicas};
  EXPECT_EQ(memory.gpu.plan, 3 * plan.num_bytes());
}

TEST(SimulatedMemoryTest, DomainsTakeRoomForBundlesAndSignalsForWhatIsCarried) {
  const Scenario several = small_scenario();
  Scenario one = several;
  one.ranks_per_domain = one.num_ranks;
  const Memory::Cpu with = reserved_memory(several).cpu;
  const Memory::Cpu without = reserved_memory(one).cpu;
  // Chunks of crossing tokens of 24 ranks, and of sums of 5 sources for 4 members.
  const uint64_t chunks = static_cast<uint64_t>(num_chunks(several.max_tokens));
  EXPECT_EQ(with.signals - without.signals, (24 + 5 * 4) * chunks * sizeof(uint64_t));
  EXPECT_EQ(without.records, 24 * align_up(sizeof(uint64_t) + max_record_bytes(200, 4), 64));
  EXPECT_EQ(with.records, 24 * align_up(sizeof(uint64_t) + max_bundle_bytes(200, 4, 4), 64));
  EXPECT_EQ(with.words, without.words);

  Scenario flat = several;
  flat.is_flat = true;
  EXPECT_EQ(reserved_memory(flat).cpu.signals, without.signals);
  EXPECT_EQ(reserved_memory(flat).cpu.records, without.records);
}

TEST(SimulatedMemoryTest, RecordsGrowWithRanksAndWordsWithTheirSquare) {
  const Memory few = reserved(256, 256);
  const Memory many = reserved(2304, 2304);
  EXPECT_EQ(many.cpu.records, few.cpu.records * 9);
  EXPECT_GT(many.cpu.words, few.cpu.words * 9);
  EXPECT_GT(many.gpu.plan, few.gpu.plan * 8);
}

TEST(SimulatedMemoryTest, DoesNotDependOnTheRoutingButForWhatItUses) {
  const Scenario scenario = small_scenario();
  const Memory empty = reserved_memory(scenario);
  const Traffic traffic = count_traffic(scenario, 8, make_routes(scenario));
  const Memory full = memory_of(scenario, traffic, 3);
  EXPECT_EQ(full.cpu.control(), empty.cpu.control());
  EXPECT_EQ(full.gpu.control(), empty.gpu.control());
  EXPECT_EQ(empty.output + empty.forwarder + empty.cpu.records_used + empty.cpu.staging, 0U);
  EXPECT_LT(full.cpu.records_used, full.cpu.records);
  EXPECT_EQ(full.forwarder, static_cast<uint64_t>(traffic.ranks[3].card_in * scenario.row_bytes));
}

}  // namespace
}  // namespace weft::sim
