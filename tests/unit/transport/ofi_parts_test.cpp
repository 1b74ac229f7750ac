// SPDX-License-Identifier: Apache-2.0
// The parts of transport ofi that need no fabric.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/env.hpp"
#include "transport/ofi/fabric/fabric.hpp"
#include "transport/ofi/fabric/queue.hpp"
#include "transport/ofi/peers.hpp"
#include "transport/ofi/regions.hpp"
#include "weft/error.hpp"

namespace weft::ofi {
namespace {

template <class Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

RegionRef region(uint32_t slot, uint32_t generation) {
  return {.slot = slot, .generation = generation, .bytes = 100, .cookie = {3, 4, 1000, 7}};
}

}  // namespace

TEST(OfiImmediateTest, KeepsSignalAndAmountApartInBothWidths) {
  for (const size_t data_bytes : {size_t{4}, size_t{8}}) {
    for (const uint32_t num_signals : {1U, 2U, 1000U, 1U << 20}) {
      const Immediate immediate(num_signals, data_bytes);
      for (const uint32_t signal : {0U, num_signals / 2, num_signals - 1}) {
        for (const uint64_t amount : {uint64_t{1}, immediate.max_amount()}) {
          const uint64_t data = immediate.encode(signal, amount);
          EXPECT_EQ(immediate.signal(data), signal);
          EXPECT_EQ(immediate.amount(data), amount);
          EXPECT_TRUE(data_bytes == 8 || data >> 32 == 0);
        }
      }
    }
  }
}

TEST(OfiImmediateTest, SaysThatTooManySignalsDoNotFit) {
  EXPECT_EQ(Immediate(1U << 31, 4).max_amount(), 0U);
  EXPECT_GT(Immediate(1U << 30, 4).max_amount(), 0U);
  EXPECT_GT(Immediate(1U << 31, 8).max_amount(), 0U);
}

TEST(OfiBounceRoomTest, NeverHandsOutTheSameByteTwice) {
  constexpr uint64_t kBytes = 4096;
  BounceRoom room(kBytes);
  std::vector<int> owner(kBytes, 0);
  struct Taken {
    uint64_t offset;
    uint64_t bytes;
  };
  std::vector<Taken> taken;
  std::mt19937 random(5);
  int num_taken = 0;
  for (int step = 1; step < 20'000; ++step) {
    const uint64_t bytes = random() % 700 + 1;
    const auto offset = room.take(bytes);
    if (offset) {
      EXPECT_EQ(*offset % 64, 0U);
      ASSERT_LE(*offset + bytes, kBytes);
      for (uint64_t i = 0; i < bytes; ++i) {
        ASSERT_EQ(owner[*offset + i], 0) << "step " << step;
        owner[*offset + i] = step;
      }
      taken.push_back({*offset, bytes});
      ++num_taken;
    }
    while (!taken.empty() && (!offset || random() % 2 == 0)) {
      const size_t which = random() % taken.size();
      const Taken one = taken[which];
      taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(which));
      std::fill_n(owner.begin() + static_cast<std::ptrdiff_t>(one.offset), one.bytes, 0);
      room.give_back(one.offset);
    }
  }
  EXPECT_GT(num_taken, 5000);
}

TEST(OfiBounceRoomTest, IsWholeAgainWhenAllIsGivenBack) {
  BounceRoom room(1024);
  for (int round = 0; round < 5; ++round) {
    const auto a = room.take(500);
    const auto b = room.take(500);
    ASSERT_TRUE(a && b);
    EXPECT_FALSE(room.take(1));
    room.give_back(*a);
    EXPECT_FALSE(room.take(600));  // not in one piece
    EXPECT_EQ(room.take(512), *a);
    room.give_back(*b);
    room.give_back(*a);
    const auto all = room.take(1024);
    ASSERT_TRUE(all);
    room.give_back(*all);
  }
  EXPECT_FALSE(room.take(1025));
}

TEST(OfiRemoteRegionsTest, RefusesWhatItsOwnerReleased) {
  RemoteRegions regions;
  EXPECT_FALSE(regions.find(3));
  EXPECT_TRUE(regions.insert(region(3, 1)));
  ASSERT_TRUE(regions.find(3));
  EXPECT_EQ(regions.find(3)->base, 1000U);
  EXPECT_EQ(regions.find(3)->key, 7U);
  EXPECT_FALSE(regions.find(3)->is_released);
  regions.release(3, 1);
  EXPECT_TRUE(regions.find(3)->is_released);
  EXPECT_FALSE(regions.insert(region(3, 1)));
  EXPECT_TRUE(regions.insert(region(3, 2)));
  EXPECT_FALSE(regions.find(3)->is_released);
  EXPECT_FALSE(regions.insert(region(4, 0)));
}

TEST(OfiRemoteRegionsTest, TakesWordsOfReleaseInAnyOrder) {
  RemoteRegions regions;
  regions.release(0, 2);
  regions.release(0, 1);
  EXPECT_FALSE(regions.find(0));
  EXPECT_FALSE(regions.insert(region(0, 2)));
  EXPECT_TRUE(regions.insert(region(0, 3)));
  regions.release(0, UINT32_MAX);  // before the wrap
  EXPECT_TRUE(regions.insert(region(0, 4)));
}

TEST(OfiPeersTest, SeesAFarewellOnceItCameOnEveryQueue) {
  Peers peers(2, 3);
  peers.set_same_process(1);
  for (int queue = 0; queue < 3; ++queue) {
    EXPECT_FALSE(peers.has_left(1));
    peers.on_left(1);
  }
  EXPECT_TRUE(peers.has_left(1));
  peers.on_failure(1, "fi_writemsg", ECONNRESET, "tcp");
  EXPECT_FALSE(peers.has_failed(1));  // who has left may close its end
}

TEST(OfiPeersTest, TakesABrokenConnectionForADeathOnlyWhereNoProcessIsWatched) {
  Peers peers(2, 1);
  peers.set_same_process(1);
  EXPECT_TRUE(peers.needs_ping(0));
  peers.on_failure(0, "fi_writemsg", ECONNRESET, "tcp");
  EXPECT_TRUE(peers.has_died(0));
  EXPECT_FALSE(peers.needs_ping(0));
  EXPECT_FALSE(peers.any_failure());
  peers.on_failure(1, "fi_writemsg", ECONNRESET, "tcp");
  EXPECT_FALSE(peers.has_died(1));
  EXPECT_TRUE(peers.has_failed(1));
  EXPECT_FALSE(peers.failure(1));  // its death may come to light in a moment
}

TEST(OfiPeersTest, CountsSilenceOnlyOfARankThatOnceAnswered) {
  Peers peers(2, 1);
  static_cast<void>(peers.note_unanswered(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_EQ(peers.note_unanswered(1).count(), 0) << "it may still be connecting";
  peers.note_answered(1);
  EXPECT_EQ(peers.note_unanswered(1).count(), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_GT(peers.note_unanswered(1).count(), 0);
  peers.note_answered(1);
  EXPECT_EQ(peers.note_unanswered(1).count(), 0);
}

TEST(OfiProvidersTest, ReadsWhatIsAskedFor) {
  const Env env = Env::read([](const char* name) -> const char* {
    const std::string text = name;
    return text == "WEFT_FABRIC"              ? "verbs/mlx5_0"
           : text == "WEFT_FABRIC_ADDRESS"    ? "eth0"
           : text == "WEFT_FABRIC_QUEUES"     ? "4"
           : text == "WEFT_FABRIC_GPU_MEMORY" ? "host"
                                              : nullptr;
  });
  const FabricWish wish = read_wish(env, "");
  EXPECT_EQ(wish.provider, "verbs");
  EXPECT_EQ(wish.domains, (std::vector<std::string>{"mlx5_0"}));
  EXPECT_EQ(wish.address, "eth0");
  EXPECT_EQ(wish.num_queues, 4);
  EXPECT_EQ(wish.gpu_memory, FabricGpuMemory::kHost);
  EXPECT_FALSE(wish.has_gpu);
  EXPECT_EQ(read_wish(env, "tcp").provider, "tcp");
  EXPECT_TRUE(read_wish(env, "tcp").domains.empty());
  EXPECT_EQ(
      read_wish(env, "verbs/mlx5_0,mlx5_3").domains, (std::vector<std::string>{"mlx5_0", "mlx5_3"})
  );
  EXPECT_TRUE(contains(
      error_of([&] { static_cast<void>(read_wish(env, "avian")); }),
      "open(ofi): \"avian\" names no provider that is known (cxi, efa, verbs, tcp, shm)"
  ));
}

TEST(OfiProvidersTest, SaysWhyEachCannotBeUsed) {
  if (!api().obstacle.empty()) {
    GTEST_SKIP() << api().obstacle;
  }
  const auto obstacle_of = [](const FabricWish& wish, std::string_view name) {
    for (const Offer& offer : list_offers(wish)) {
      if (offer.provider->name == name) {
        EXPECT_EQ(offer.obstacle.empty(), offer.info != nullptr);
        return offer.obstacle;
      }
    }
    return std::string("not in the table");
  };
  FabricWish wish;
  EXPECT_EQ(obstacle_of(wish, "tcp"), "");
  EXPECT_EQ(obstacle_of(wish, "shm"), "used only when asked for by name");
  wish.has_one_host = false;
  EXPECT_TRUE(contains(obstacle_of(wish, "tcp"), "WEFT_FABRIC_ADDRESS"));
  EXPECT_EQ(obstacle_of(wish, "shm"), "the ranks are on several hosts");
  wish.address = "127.0.0.1";
  EXPECT_EQ(obstacle_of(wish, "tcp"), "");
  wish.provider = "shm";
  EXPECT_EQ(obstacle_of(wish, "tcp"), "shm is asked for");
  wish.provider = "tcp";
  wish.domains = {"avian0"};
  EXPECT_NE(obstacle_of(wish, "tcp"), "");
  wish.domains = {"avian0", "avian1"};
  EXPECT_TRUE(contains(obstacle_of(wish, "tcp"), "it has no domain \"avian0,avian1\" (but "));
}

}  // namespace weft::ofi
