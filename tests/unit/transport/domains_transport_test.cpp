// SPDX-License-Identifier: Apache-2.0
// Promises of transport domains beyond the conformance suite: ranks 0 and 1 are neighbours, so are
// 2 and 3.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "conformance/transport_conformance.hpp"

namespace weft {
namespace {

using testing::require;
using testing::require_refusal;
using testing::TransportCase;
using testing::Wire;

constexpr int kRanks = 4;

class DomainsTransportTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ::setenv("WEFT_RANKS_PER_DOMAIN", "2", 1);
    const std::string reason = transport_obstacle("domains:tcp", Group::local(kRanks).front());
    if (!reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }
  void TearDown() override { ::unsetenv("WEFT_RANKS_PER_DOMAIN"); }

  // Runs `body` in processes, which share memory as ranks of a host do.
  static void run(const std::function<void(Wire&)>& body, uint64_t region_bytes = 4096) {
    const TransportCase test = {.transport = "domains:tcp", .num_ranks = kRanks};
    const auto statuses = run_forked(kRanks, [&](Group& group) {
      Wire wire(group, test, region_bytes);
      body(wire);
      group.barrier();
      return 0;
    });
    EXPECT_EQ(statuses, std::vector<int>(kRanks, 0));
  }
};

bool are_neighbours(int a, int b) {
  return a / 2 == b / 2;
}

}  // namespace

TEST_F(DomainsTransportTest, MapsTheMemoryOfItsDomainAlone) {
  run([](Wire& wire) {
    for (int peer = 0; peer < kRanks; ++peer) {
      const std::byte* mapped = wire.transport->mapped(peer, wire.slot_of(peer));
      require((mapped != nullptr) == are_neighbours(wire.rank(), peer), "mapped() is wrong");
    }
    require(wire.transport->mapped(wire.rank(), wire.slot_of(wire.rank())) == wire.own.data, "own");
  });
}

// One signal, one region: neighbours store, others put, all raise.
TEST_F(DomainsTransportTest, CountsRaisesFromEitherSideInOneSignal) {
  constexpr uint64_t kRounds = 300;
  constexpr uint64_t kRowBytes = 512;
  run(
      [](Wire& wire) {
        std::vector<std::byte> row(kRowBytes);
        for (uint64_t round = 1; round <= kRounds; ++round) {
          std::memset(row.data(), static_cast<int>(round % 251) + wire.rank(), kRowBytes);
          for (int peer = 0; peer < kRanks; ++peer) {
            const uint64_t offset = kRowBytes * static_cast<uint64_t>(wire.rank());
            if (std::byte* base = wire.transport->mapped(peer, wire.slot_of(peer))) {
              std::memcpy(base + offset, row.data(), kRowBytes);
              wire.transport->raise(peer, 7, 1);
              continue;
            }
            const Put put = {
                .source = row.data(),
                .bytes = kRowBytes,
                .region = wire.slot_of(peer),
                .signal = 7,
                .offset = offset};
            wire.transport->put(peer, std::span(&put, 1));
          }
          wire.wait(7, round * kRanks);
          for (int peer = 0; peer < kRanks; ++peer) {
            const auto expected = static_cast<std::byte>(round % 251 + static_cast<uint64_t>(peer));
            const std::byte* at = wire.own.data + kRowBytes * static_cast<uint64_t>(peer);
            for (uint64_t i = 0; i < kRowBytes; ++i) {
              require(at[i] == expected, "a row is not what its rank wrote");
            }
          }
          for (int peer = 0; peer < kRanks; ++peer) {  // it may be written again
            wire.transport->raise(peer, 8, 1);
          }
          wire.wait(8, round * kRanks);
        }
        require(wire.transport->signal_value(7) == kRounds * kRanks, "counted too much");
      },
      kRowBytes * kRanks
  );
}

// Threads of all ranks raise one signal at once while its owner sleeps on the doorbell.
TEST_F(DomainsTransportTest, LosesNoRaiseAndNoWakeUp) {
  constexpr int kThreads = 2;
  constexpr uint64_t kRaises = 500;
  run([](Wire& wire) {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&wire, thread] {
        for (uint64_t i = 0; i < kRaises; ++i) {
          const int peer = (static_cast<int>(i) + thread + wire.rank()) % kRanks;
          wire.transport->raise(peer, 3, 1);
        }
      });
    }
    wire.wait(3, kThreads * kRaises);
    threads.clear();
    wire.group.barrier();
    require(wire.transport->signal_value(3) == kThreads * kRaises, "counted too much");
  });
}

TEST_F(DomainsTransportTest, TellsBothSidesOfARelease) {
  run([](Wire& wire) {
    wire.group.barrier();
    if (wire.rank() == 1) {
      wire.transport->release(wire.own.ref);
      require_refusal([&] { wire.transport->release(wire.own.ref); }, "release: region ");
    }
    wire.group.barrier();
    require(wire.transport->mapped(1, wire.slot_of(1)) == nullptr, "it is still mapped");
    if (wire.rank() != 1) {
      require_refusal([&] { wire.transport->import(1, wire.refs[1]); }, "is not allocated there");
      const Put put = {.region = wire.slot_of(1)};
      require_refusal(
          [&] { wire.transport->put(1, std::span(&put, 1)); }, "put: region 0 of rank 1 is "
      );
    }
  });
}

// A neighbour that leaves and one that does not, seen from the same and from the other domain.
TEST_F(DomainsTransportTest, SeesRanksOfEveryDomainLeave) {
  run([](Wire& wire) {
    wire.group.barrier();
    if (wire.rank() == 0 || wire.rank() == 3) {
      wire.transport->close();
      return;
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (const int peer : {0, 3}) {
      while (wire.transport->peer_state(peer) != PeerState::kLeft) {
        require(std::chrono::steady_clock::now() < deadline, "nobody was seen to leave");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    const int other = wire.rank() == 1 ? 2 : 1;
    require(wire.transport->peer_state(other) == PeerState::kAlive, "the wrong one left");
    wire.transport->raise(other, 0, 1);
    wire.wait(0, 1);
  });
}

}  // namespace weft
