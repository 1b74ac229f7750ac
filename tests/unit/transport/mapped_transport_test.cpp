// SPDX-License-Identifier: Apache-2.0
// Promises of loopback and shm beyond the conformance suite.
#include "transport/mapped/mapped_transport.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>

#include "conformance/transport_conformance.hpp"

namespace weft {
namespace {

using testing::require_refusal;
using testing::TransportCase;
using testing::Wire;

int num_shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:weft") != std::string::npos ? 1 : 0;
  }
  return count;
}

std::string transport_of(const ::testing::TestParamInfo<const char*>& info) {
  return info.param;
}

class MappedTransportTest : public ::testing::TestWithParam<const char*> {
 protected:
  static void run(int num_ranks, const std::function<void(Wire&)>& body) {
    const TransportCase test = {.transport = GetParam(), .num_ranks = num_ranks};
    run_threads(num_ranks, [&](Group& group) {
      Wire wire(group, test, 4096);
      body(wire);
      group.barrier();
    });
  }
};

}  // namespace

TEST_P(MappedTransportTest, RefusesWhatItsOwnerReleased) {
  run(2, [](Wire& wire) {
    wire.group.barrier();
    if (wire.rank() == 1) {
      wire.transport->release(wire.own.ref);
    }
    wire.group.barrier();
    if (wire.rank() == 0) {
      const Put put = {.region = wire.slot_of(1)};
      require_refusal(
          [&] { wire.transport->put(1, std::span(&put, 1)); }, "put: region 0 of rank 1 is released"
      );
      EXPECT_EQ(wire.transport->mapped(1, wire.slot_of(1)), nullptr);
    }
  });
}

TEST_P(MappedTransportTest, TellsOfADeathWhenItLeaves) {
  run(3, [](Wire& wire) {
    auto& transport = dynamic_cast<MappedTransport&>(*wire.transport);
    EXPECT_EQ(transport.death_told_by(1), -1);
    wire.group.barrier();
    if (wire.rank() != 0) {
      transport.leave(wire.rank() == 1 ? 5 : -1);
    }
    wire.group.barrier();
    if (wire.rank() == 0) {
      EXPECT_EQ(transport.peer_state(1), PeerState::kLeft);
      EXPECT_EQ(transport.death_told_by(1), 5);
      EXPECT_EQ(transport.peer_state(2), PeerState::kLeft);
      EXPECT_EQ(transport.death_told_by(2), -1);
    }
  });
}

// Its owner has given up, and a worker of this rank that is only late copies to where it was told,
// while another one waits.
TEST_P(MappedTransportTest, KeepsWhatItsOwnerReleasedUntilTheNextImport) {
  run(2, [](Wire& wire) {
    std::byte* const there = wire.transport->mapped(wire.next(), wire.slot_of(wire.next()));
    ASSERT_NE(there, nullptr);
    wire.group.barrier();
    wire.transport->release(wire.own.ref);
    wire.group.barrier();
    wire.transport->progress();
    std::fill_n(there, 4096, std::byte{7});
    wire.group.barrier();
    EXPECT_EQ(there[4095], std::byte{7});
  });
}

TEST_P(MappedTransportTest, OutlivesAPeerThatIsGone) {
  run_threads(2, [](Group& group) {
    Wire wire(group, {.transport = GetParam()}, 4096);
    if (group.rank() == 0) {
      wire.transport.reset();
      group.barrier();
      return;
    }
    group.barrier();
    EXPECT_EQ(wire.transport->peer_state(0), PeerState::kLeft);
    wire.transport->raise(0, 0, 1);  // reaches memory that is still there
    const Put put = {.region = wire.slot_of(0)};
    require_refusal([&] { wire.transport->put(0, std::span(&put, 1)); }, "is released");
    require_refusal([&] { wire.transport->import(0, wire.refs[0]); }, "is not allocated there");
  });
}

TEST_P(MappedTransportTest, SaysWhenAllRegionsAreInUse) {
  run(1, [](Wire& wire) {
    if (std::string_view(GetParam()) == "shm") {
      return;  // the limit of descriptors comes first on most machines
    }
    std::vector<Region> regions;
    try {
      for (uint32_t i = 0; i < kMaxRegions; ++i) {
        regions.push_back(wire.transport->allocate(1));
      }
      ADD_FAILURE() << "no limit";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      EXPECT_EQ(regions.size(), kMaxRegions - 1);  // the wire has one
    }
    for (const Region& region : regions) {
      wire.transport->release(region.ref);
    }
    EXPECT_NO_THROW(static_cast<void>(wire.transport->allocate(1)));
  });
}

// Puts to live regions go on while others come and go.
TEST_P(MappedTransportTest, PutsWhileRegionsComeAndGo) {
  static constexpr uint64_t kPuts = 2000;
  run(2, [](Wire& wire) {
    std::jthread mover([&wire] {
      const uint64_t value = 1;
      for (uint64_t i = 0; i < kPuts; ++i) {
        const Put put = {
            .source = &value,
            .bytes = sizeof value,
            .region = wire.slot_of(wire.next()),
            .signal = 0,
            .offset = 8 * (i % 64)};
        wire.transport->put(wire.next(), std::span(&put, 1));
      }
    });
    for (int round = 0; round < 100; ++round) {
      const Region extra = wire.transport->allocate(4096);
      wire.transport->import(wire.rank(), extra.ref);
      wire.transport->progress();
      wire.transport->release(extra.ref);
    }
    mover.join();
    wire.wait(0, kPuts);
    EXPECT_EQ(wire.transport->signal_value(0), kPuts);
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, MappedTransportTest, ::testing::Values("loopback", "shm"), transport_of
);

TEST(ShmTransportTest, PinsNothingThatWasReleased) {
  const int before = num_shared_mappings();
  run_threads(2, [](Group& group) {
    Wire wire(group, {.transport = "shm"}, 4096);
    group.barrier();
    const int alive = num_shared_mappings();
    group.barrier();
    for (int round = 0; round < 20; ++round) {
      wire.transport->release(wire.own.ref);
      group.barrier();
      wire.transport->progress();
      wire.share(wire.transport->allocate(4096 * static_cast<uint64_t>(round % 3 + 1)));
    }
    group.barrier();
    EXPECT_EQ(num_shared_mappings(), alive);
    group.barrier();
  });
  EXPECT_EQ(num_shared_mappings(), before);
}

}  // namespace weft
