// SPDX-License-Identifier: Apache-2.0
// Regions that ranks publish and follow, over host memory that stands for that of GPUs.
#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "core/check.hpp"
#include "core/log.hpp"
#include "cuda/transport/peer_regions.hpp"
#include "support/errors.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

constexpr auto kBound = 10s;
constexpr uint64_t kStep = uint64_t{2} << 20;

// Hands out addresses that nobody touches; a handle's id is the address.
class FakeSource final : public RegionSource {
 public:
  struct Counts {
    std::mutex mutex;
    std::set<uint64_t> own;
    std::multiset<uint64_t> mapped;
  };

  void enter_thread() override {}

  OwnRegion allocate(uint64_t bytes) override {
    const std::lock_guard lock(counts_->mutex);
    WEFT_CHECK(Context{}, counts_->own.size() < room, ErrorCode::kOutOfMemory, "allocate: full");
    const uint64_t address = next_;
    next_ += bytes;
    counts_->own.insert(address);
    return {
        .data =
            {reinterpret_cast<std::byte*>(address),
             [counts = counts_](std::byte* data) {
               const std::lock_guard inner(counts->mutex);
               counts->own.erase(reinterpret_cast<uint64_t>(data));
             }},
        .handle = {.id = address, .bytes = bytes}};
  }

  std::shared_ptr<std::byte> map(int /*rank*/, const RegionHandle& handle) override {
    WEFT_CHECK(Context{}, !refuses, ErrorCode::kNotAvailable, "map: no");
    const std::lock_guard lock(counts_->mutex);
    counts_->mapped.insert(handle.id);
    return {reinterpret_cast<std::byte*>(handle.id), [counts = counts_](std::byte* data) {
              const std::lock_guard inner(counts->mutex);
              counts->mapped.erase(counts->mapped.find(reinterpret_cast<uint64_t>(data)));
            }};
  }

  std::shared_ptr<std::byte> map_instead(
      std::shared_ptr<std::byte> mapping, int rank, const RegionHandle& handle
  ) override {
    if (keeps_addresses) {
      return mapping;
    }
    mapping.reset();
    return map(rank, handle);
  }

  void show_entry(int rank, uint32_t region, std::byte* data) override {
    const std::lock_guard lock(counts_->mutex);
    entries_[{rank, region}] = data;
  }
  void set_entry(int rank, uint32_t region, std::byte* data) override {
    while (waits && rank != own_rank) {
      std::this_thread::sleep_for(1ms);
    }
    show_entry(rank, region, data);
    const std::lock_guard lock(counts_->mutex);
    settled_[{rank, region}] = data;
  }
  void quiesce() override {}

  [[nodiscard]] std::byte* entry(int rank, uint32_t region) {
    const std::lock_guard lock(counts_->mutex);
    return entries_[{rank, region}];
  }
  [[nodiscard]] std::byte* settled_entry(int rank, uint32_t region) {
    const std::lock_guard lock(counts_->mutex);
    return settled_[{rank, region}];
  }
  [[nodiscard]] size_t num_own() const {
    const std::lock_guard lock(counts_->mutex);
    return counts_->own.size();
  }
  [[nodiscard]] size_t num_mapped() const {
    const std::lock_guard lock(counts_->mutex);
    return counts_->mapped.size();
  }

  std::atomic<bool> refuses = false;
  std::atomic<size_t> room = 1000;
  bool keeps_addresses = false;     // what is mapped anew is where it was
  std::atomic<bool> waits = false;  // as if a kernel had to end before entries of peers can be set
  int own_rank = -1;

 private:
  std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
  std::map<std::pair<int, uint32_t>, std::byte*> entries_;
  std::map<std::pair<int, uint32_t>, std::byte*> settled_;
  uint64_t next_ = kStep;
};

template <class Condition>
[[nodiscard]] bool comes_true(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + kBound;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

TEST(PeerBoardTest, MapsControlRegionsBeforeItReturns) {
  run_threads(3, [](Group& group) {
    FakeSource source;
    const PeerRegions regions(group, source, 100);
    EXPECT_EQ(regions.control().region, 0U);
    EXPECT_EQ(regions.control().bytes, kStep);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_NE(source.entry(rank, 0), nullptr);
    }
    EXPECT_TRUE(regions.is_reachable(regions.control()));
    group.barrier();
  });
}

TEST(PeerBoardTest, GrowsWhilePeersDoNothing) {
  run_threads(3, [](Group& group) {
    FakeSource source;
    PeerRegions regions(group, source, 1);
    std::vector<PeerRegion> made;
    if (group.rank() == 1) {
      for (int i = 0; i < 20; ++i) {
        made.push_back(regions.allocate(kStep * 2));
        EXPECT_TRUE(regions.wait_reachable(made.back(), kBound));
        EXPECT_TRUE(regions.is_reachable(made.back()));
      }
    }
    group.barrier();
    for (uint32_t region = 1; region <= 20; ++region) {
      EXPECT_NE(source.entry(1, region), nullptr);
      EXPECT_EQ(source.entry(2, region), nullptr);
    }
    group.barrier();
  });
}

// A kernel of rank 0 that waits for rank 1 would run until rank 1 has grown.
TEST(PeerBoardTest, GrowsWhileAPeerIsKeptFromTheDriver) {
  run_threads(2, [](Group& group) {
    FakeSource source;
    source.own_rank = group.rank();
    PeerRegions regions(group, source, 1);
    source.waits = group.rank() == 0;
    group.barrier();
    std::optional<PeerRegion> gone;
    std::optional<PeerRegion> kept;
    if (group.rank() == 1) {
      gone = regions.allocate_reachable(1, kBound);
      ASSERT_TRUE(gone);
      regions.release(*gone);  // which keeps that thread of rank 0 waiting, too
      kept = regions.allocate_reachable(1, kBound);
      ASSERT_TRUE(kept);
      EXPECT_NE(kept->region, gone->region) << "rank 0 has not let go of it";
    }
    group.barrier();
    if (group.rank() == 0) {
      EXPECT_NE(source.entry(1, 2), nullptr);
      EXPECT_EQ(source.settled_entry(1, 2), nullptr);
      source.waits = false;
      EXPECT_TRUE(comes_true([&] { return source.settled_entry(1, 2) != nullptr; }));
      EXPECT_TRUE(comes_true([&] { return source.entry(1, 1) == nullptr; }));
    }
    group.barrier();
  });
}

TEST(PeerBoardTest, ReusesIndicesOfReleasedRegions) {
  run_threads(3, [](Group& group) {
    FakeSource source;
    PeerRegions regions(group, source, 1);
    for (uint32_t i = 0; i < 2 * kMaxPeerRegions; ++i) {
      regions.release(regions.allocate(1));  // reached by peers or not
    }
    EXPECT_TRUE(comes_true([&] { return source.num_own() == 1; }));
    const PeerRegion last = regions.allocate(1);
    EXPECT_TRUE(regions.wait_reachable(last, kBound));
    group.barrier();
    EXPECT_TRUE(comes_true([&] { return source.num_mapped() == 4; }));
    group.barrier();
  });
}

TEST(PeerBoardTest, WaitsForReleasedMemoryBeforeItSaysThereIsNone) {
  run_threads(2, [](Group& group) {
    FakeSource source;
    PeerRegions regions(group, source, 1);
    source.room = 2;
    const PeerRegion first = regions.allocate(1);
    EXPECT_TRUE(regions.wait_reachable(first, kBound));
    const auto thrown = thrown_by([&] { static_cast<void>(regions.allocate(1)); });
    ASSERT_TRUE(thrown);
    EXPECT_EQ(thrown->code, ErrorCode::kOutOfMemory);
    regions.release(first);
    const PeerRegion second = regions.allocate(1);
    EXPECT_TRUE(regions.wait_reachable(second, kBound));
    group.barrier();
  });
}

TEST(PeerBoardTest, SaysWhenAllIndicesAreInUse) {
  run_threads(2, [](Group& group) {
    FakeSource source;
    PeerRegions regions(group, source, 1);
    for (uint32_t region = 1; region < kMaxPeerRegions; ++region) {
      EXPECT_EQ(regions.allocate(1).region, region);
    }
    const auto thrown = thrown_by([&] { static_cast<void>(regions.allocate(1)); });
    EXPECT_EQ(text_of(thrown).rfind("allocate: all 256 regions are in use", 0), 0U);
    group.barrier();
  });
}

TEST(PeerBoardTest, FindsTheRegionThatHoldsSomeBytes) {
  run_threads(1, [](Group& group) {
    FakeSource source;
    PeerRegions regions(group, source, 1);
    const PeerRegion first = regions.allocate(kStep);
    const PeerRegion second = regions.allocate(kStep);  // right behind
    ASSERT_EQ(second.data, first.data + kStep);
    EXPECT_EQ(regions.find(first.data, kStep)->region, first.region);
    EXPECT_EQ(regions.find(first.data + kStep - 1, 1)->region, first.region);
    EXPECT_EQ(regions.find(second.data, 0)->region, second.region);
    EXPECT_FALSE(regions.find(first.data, kStep + 1));
    EXPECT_FALSE(regions.find(second.data + kStep, 0));
    EXPECT_FALSE(regions.find(nullptr, 1));
    regions.release(first);
    EXPECT_FALSE(regions.find(first.data, 1));
    EXPECT_FALSE(regions.is_reachable(first));
    EXPECT_TRUE(regions.is_reachable(second));
  });
}

TEST(PeerBoardTest, RefusesToReleaseWhatIsNotAllocated) {
  run_threads(1, [](Group& group) {
    FakeSource source;
    PeerRegions regions(group, source, 1);
    const PeerRegion region = regions.allocate(1);
    regions.release(region);
    for (const PeerRegion& wrong : {region, regions.control(), PeerRegion{}}) {
      const auto thrown = thrown_by([&] { regions.release(wrong); });
      ASSERT_TRUE(thrown);
      EXPECT_EQ(thrown->code, ErrorCode::kInvalidArgument);
    }
  });
}

TEST(PeerBoardTest, IsNeverReachableWhereAPeerCannotMapIt) {
  set_log_level(LogLevel::kOff);
  run_threads(2, [](Group& group) {
    FakeSource source;
    PeerRegions regions(group, source, 1);
    source.refuses = group.rank() == 1;
    group.barrier();
    if (group.rank() == 0) {
      const PeerRegion region = regions.allocate(1);
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_FALSE(regions.wait_reachable(region, kBound));
      EXPECT_LT(std::chrono::steady_clock::now() - begin, kBound / 2);
      EXPECT_FALSE(regions.is_reachable(region));
      regions.release(region);
      EXPECT_TRUE(comes_true([&] { return source.num_own() == 1; }));
      EXPECT_FALSE(regions.allocate_reachable(1, kBound));
      EXPECT_TRUE(comes_true([&] { return source.num_own() == 1; })) << "given back";
    }
    group.barrier();
  });
  set_log_level(LogLevel::kWarn);
}

TEST(PeerBoardTest, LeavesPeersTheirMappingsWhenItsOwnerIsGone) {
  run_threads(2, [](Group& group) {
    FakeSource source;
    PeerRegions regions(group, source, 1);
    const auto region = regions.allocate_reachable(1, kBound);
    ASSERT_TRUE(region);
    group.barrier();
    if (group.rank() == 0) {
      regions.close();
      regions.release(*region);
    }
    group.barrier();
    if (group.rank() == 1) {
      regions.release(*region);
      EXPECT_TRUE(regions.wait_freed(kBound)) << "so this rank has looked at the boards";
      EXPECT_NE(source.entry(0, region->region), nullptr);
      EXPECT_EQ(source.num_mapped(), 2U);
    }
    group.barrier();
  });
}

TEST(PeerBoardTest, KeepsMemoryThatAPeerStillUses) {
  run_threads(1, [](Group& group) {
    FakeSource source;
    {
      PeerRegions regions(group, source, 1);
      regions.close();
      regions.keep_memory();
    }
    EXPECT_EQ(source.num_own(), 1U);
  });
}

// Rank 1 ends, and another takes its place: it maps what the others have, they map what it has, and
// nothing is left of the one before.
TEST(PeerBoardTest, ANewcomerAndTheOthersMapEachOther) {
  for (const bool keeps_addresses : {false, true}) {
    run_threads(3, [&](Group& group) {
      const Meeting who = {.ranks = {0, 1, 2}, .newcomers = {1}};
      FakeSource source;
      source.keeps_addresses = keeps_addresses;
      std::optional<PeerRegions> regions;
      regions.emplace(group, source, 1);
      const auto before = regions->allocate_reachable(1, kBound);
      ASSERT_TRUE(before);
      const std::byte* const old_control = regions->control_of(1);
      group.barrier();
      FakeSource new_source;
      static_cast<void>(new_source.allocate(100 * kStep));  // so that its addresses are others
      if (group.rank() == 1) {
        regions.reset();
        group.barrier();
        regions.emplace(group, new_source, 1, who);
        EXPECT_EQ(new_source.num_mapped(), 4U) << "two of each of the others";
        for (const int other : {0, 2}) {
          EXPECT_NE(new_source.settled_entry(other, before->region), nullptr);
          EXPECT_EQ(new_source.settled_entry(other, 0), regions->control_of(other));
        }
      } else {
        group.barrier();
        EXPECT_TRUE(regions->is_unmapped_by(1));
        EXPECT_NE(source.entry(1, before->region), nullptr);
        regions->meet(group, who);
        EXPECT_EQ(regions->control_of(1) == old_control, keeps_addresses);
        EXPECT_EQ(source.settled_entry(1, 0), regions->control_of(1));
        EXPECT_EQ(source.entry(1, before->region), nullptr);
        EXPECT_TRUE(regions->is_reachable(*before));
        EXPECT_EQ(source.num_mapped(), 3U);
      }
      group.barrier();
      const auto after = regions->allocate_reachable(1, kBound);
      ASSERT_TRUE(after);
      group.barrier();
      FakeSource& own_source = group.rank() == 1 ? new_source : source;
      for (int other = 0; other < 3; ++other) {
        EXPECT_TRUE(comes_true([&] { return own_source.entry(other, 0) != nullptr; }));
      }
      regions->release(*after);
      EXPECT_TRUE(regions->wait_freed(kBound));
      group.barrier();
      regions.reset();
      group.barrier();
    });
  }
}

TEST(PeerBoardTest, ThrowsOnAllRanksIfOneCannotMapAnother) {
  run_threads(3, [](Group& group) {
    FakeSource source;
    source.refuses = group.rank() == 2;
    const auto thrown = thrown_by([&] { const PeerRegions regions(group, source, 1); });
    ASSERT_TRUE(thrown);
    EXPECT_EQ(thrown->code, ErrorCode::kNotAvailable);
    EXPECT_EQ(source.num_own(), 0U);
    EXPECT_EQ(source.num_mapped(), 0U);
  });
}

TEST(PeerBoardTest, DoesNotWaitForPeersThatLeft) {
  run_threads(3, [](Group& group) {
    FakeSource source;
    PeerRegions regions(group, source, 1);
    group.barrier();
    if (group.rank() == 2) {
      regions.close();
      EXPECT_EQ(source.num_mapped(), 0U);
      regions.close();
    } else {
      EXPECT_TRUE(comes_true([&] { return regions.peer_state(2) == PeerState::kLeft; }));
      const PeerRegion region = regions.allocate(1);
      EXPECT_TRUE(regions.wait_reachable(region, kBound));
      regions.release(region);
      EXPECT_TRUE(comes_true([&] { return source.num_own() == 1; }));
    }
    group.barrier();
    regions.close();
    EXPECT_TRUE(comes_true([&] { return regions.is_unmapped_by_peers(); }));
    group.barrier();
  });
}

TEST(PeerBoardTest, DoesNotWaitForPeersThatDied) {
  const std::vector<int> statuses = run_forked(3, [](Group& group) {
    FakeSource source;
    PeerRegions regions(group, source, 1);
    group.barrier();
    if (group.rank() == 2) {
      std::raise(SIGKILL);
    }
    const PeerRegion region = regions.allocate(1);
    const bool is_reached = regions.wait_reachable(region, kBound);
    regions.release(region);
    const bool is_freed = comes_true([&] { return source.num_own() == 1; });
    // It may have answered before it died.
    const bool has_died = comes_true([&] { return regions.peer_state(2) == PeerState::kDied; });
    return is_reached && is_freed && has_died ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 128 + SIGKILL}));
}

TEST(PeerBoardTest, JoinsProcesses) {
  const std::vector<int> statuses = run_forked(3, [](Group& group) {
    FakeSource source;
    PeerRegions regions(group, source, 1);
    bool is_good = true;
    for (int i = 0; i < 300; ++i) {
      const PeerRegion region = regions.allocate(1);
      is_good = is_good && (i % 3 == 0 || regions.wait_reachable(region, kBound));
      regions.release(region);
    }
    group.barrier();
    return is_good && comes_true([&] { return source.num_own() == 1; }) ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

}  // namespace
}  // namespace weft::test
