// SPDX-License-Identifier: Apache-2.0
// A peer that has let go of what this rank wants to reach: whoever fails for that says which peer,
// and nobody says it of a peer that is there.
#include <fmt/format.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <optional>
#include <thread>
#include <unistd.h>

#include "conformance/transport_conformance.hpp"
#include "core/clock.hpp"
#include "core/context.hpp"

namespace weft::testing {
namespace {

// Whom `action` finds out of reach; nobody if it succeeds. Other errors pass.
std::optional<int> lost_by(const std::function<void()>& action) {
  try {
    action();
    return std::nullopt;
  } catch (const LostPeerError& error) {
    const std::string name = fmt::format("rank {}", error.peer());
    require(
        std::string_view(error.what()).find(name) != std::string_view::npos,
        fmt::format("\"{}\" does not say \"{}\"", error.what(), name)
    );
    return error.peer();
  }
}

// One byte that raises signal 0 of `peer`; each rank has a place of its own there.
void put_byte(const Wire& wire, int peer) {
  static constexpr std::byte kByte{};
  const Put put = {
      .source = &kByte,
      .bytes = 1,
      .region = wire.slot_of(peer),
      .signal = 0,
      .offset = static_cast<uint64_t>(wire.rank())};
  wire.transport->put(peer, std::span(&put, 1));
}

// Reaches for `peer`, which is gone, until that fails: what a call puts may be on its way when the
// call returns. Region `unknown` is one that this rank has not imported yet.
void require_lost(const Wire& wire, int peer, const RegionRef& unknown) {
  const auto deadline = Clock::now() + std::chrono::seconds(20);
  for (;;) {
    const auto lost = lost_by([&] {
      wire.transport->import(peer, unknown);
      put_byte(wire, peer);
    });
    if (lost.has_value()) {
      require(*lost == peer, fmt::format("rank {} is named (expected rank {})", *lost, peer));
      return;
    }
    require(Clock::now() < deadline, fmt::format("rank {} is still within reach", peer));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Every rank's region of another size, which nobody has imported.
std::vector<RegionRef> share_unknown(Wire& wire) {
  const Region region = wire.transport->allocate(256);
  const auto blocks = wire.group.all_gather(std::as_bytes(std::span(&region.ref, 1)));
  std::vector<RegionRef> refs(blocks.size());
  for (size_t peer = 0; peer < blocks.size(); ++peer) {
    std::memcpy(&refs[peer], blocks[peer].data(), sizeof(RegionRef));
  }
  return refs;
}

// Ranks from `first` on reach each other, as if nobody else had ever been there.
void require_reach(const Wire& wire, int first) {
  for (int peer = first; peer < wire.num_ranks(); ++peer) {
    put_byte(wire, peer);
  }
  wire.wait(0, static_cast<uint64_t>(wire.num_ranks() - first));
}

}  // namespace

TEST_P(TransportConformance, NamesThePeerThatReleasedARegion) {
  run([](Wire& wire) {
    wire.group.barrier();
    wire.transport->release(wire.own.ref);
    wire.group.barrier();
    for (int peer = 0; peer < wire.num_ranks(); ++peer) {
      if (peer == wire.rank()) {
        continue;
      }
      const RegionRef& released = wire.refs[static_cast<size_t>(peer)];
      require(
          lost_by([&] { wire.transport->import(peer, released); }) == peer,
          "an import of a released region does not name its owner"
      );
      // Once an import has failed, no put may land there; one that is held back fails later.
      require_lost(wire, peer, released);
      require(wire.transport->mapped(peer, released.slot) == nullptr, "what is gone is mapped");
    }
  });
}

TEST_P(TransportConformance, NamesThePeerThatLeftOnly) {
  if (GetParam().num_ranks < 2) {
    GTEST_SKIP() << "needs a peer that leaves";
  }
  run([](Wire& wire) {
    const std::vector<RegionRef> unknown = share_unknown(wire);
    if (wire.rank() == 0) {
      wire.transport.reset();
      wire.group.barrier();
      return;
    }
    wire.group.barrier();
    require_reach(wire, 1);
    wire.await_state(0, PeerState::kLeft);
    require_lost(wire, 0, unknown[0]);
  });
}

// One leaves rightly, another one is killed: whoever reaches for either hears of that one.
TEST_P(TransportConformance, NamesThePeerThatDiedNotOneThatLeft) {
  const TransportCase& test = GetParam();
  if (test.launch != Launch::kProcesses || test.num_ranks < 3) {
    GTEST_SKIP() << "needs a process to kill and one to leave";
  }
  const auto statuses = run_forked(test.num_ranks, [&](Group& group) {
    Wire wire(group, test, 4096);
    const std::vector<RegionRef> unknown = share_unknown(wire);
    if (wire.rank() == 0) {
      wire.transport.reset();
      group.barrier();
      return 0;
    }
    group.barrier();
    if (wire.rank() == 1) {
      ::kill(::getpid(), SIGKILL);
    }
    require_reach(wire, 2);
    wire.await_state(0, PeerState::kLeft);
    wire.await_state(1, PeerState::kDied);
    require_lost(wire, 1, unknown[1]);
    return 0;
  });
  std::vector<int> expected(static_cast<size_t>(test.num_ranks), 0);
  expected[1] = 128 + SIGKILL;
  EXPECT_EQ(statuses, expected);
}

}  // namespace weft::testing
