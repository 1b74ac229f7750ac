// SPDX-License-Identifier: Apache-2.0
// Waiting for peers, and peers that leave or die.
#include <chrono>
#include <csignal>
#include <thread>
#include <unistd.h>

#include "conformance/transport_conformance.hpp"

namespace weft::testing {

TEST_P(TransportConformance, AnswersAThousandTimes) {
  constexpr uint64_t kRounds = 1000;
  run([](Wire& wire) {
    const int partner = wire.rank() ^ 1;
    if (partner >= wire.num_ranks()) {
      return;
    }
    for (uint64_t round = 1; round <= kRounds; ++round) {
      if (wire.rank() < partner) {
        wire.transport->raise(partner, 0, 1);
      }
      wire.wait(0, round);
      if (wire.rank() > partner) {
        wire.transport->raise(partner, 0, 1);
      }
    }
  });
}

// Every thread that is parked must wake, not one of them.
TEST_P(TransportConformance, WakesAllParkedThreads) {
  run([](Wire& wire) {
    std::vector<std::exception_ptr> errors(3);
    {
      std::vector<std::jthread> threads;
      for (auto& error : errors) {
        threads.emplace_back([&wire, &error] {
          try {
            wire.wait(0, 1);
          } catch (...) {
            error = std::current_exception();
          }
        });
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // let them fall asleep, mostly
      wire.transport->raise(wire.next(), 0, 1);
    }
    for (const auto& error : errors) {
      if (error) {
        std::rethrow_exception(error);
      }
    }
  });
}

TEST_P(TransportConformance, EndsAParkWhenTimeIsUp) {
  run([](Wire& wire) {
    wire.group.barrier();
    const uint32_t seen = wire.transport->doorbell();
    for (const auto at_most : {0, 1, 100, 3'000'000}) {
      wire.transport->park(seen, std::chrono::nanoseconds(at_most));
    }
    require(wire.transport->doorbell() == seen, "the doorbell rang by itself");
    wire.group.barrier();
  });
}

TEST_P(TransportConformance, MovesTheDoorbellWithASignal) {
  run([](Wire& wire) {
    const uint32_t seen = wire.transport->doorbell();
    wire.group.barrier();
    wire.transport->raise(wire.next(), 0, 1);
    wire.wait(0, 1);
    // It moves after the signal, so that who slept on it finds the signal raised.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (wire.transport->doorbell() == seen) {
      require(std::chrono::steady_clock::now() < deadline, "the doorbell did not move");
      std::this_thread::yield();
    }
  });
}

TEST_P(TransportConformance, SeesAPeerLeave) {
  run([](Wire& wire) {
    const int leaver = wire.num_ranks() - 1;
    require(wire.transport->peer_state(leaver) == PeerState::kAlive, "a peer left too early");
    wire.group.barrier();
    if (wire.rank() == leaver) {
      wire.transport->close();
      wire.transport->close();  // again: no effect
    }
    wire.await_state(leaver, PeerState::kLeft);
    for (int peer = 0; peer < leaver; ++peer) {
      require(wire.transport->peer_state(peer) == PeerState::kAlive, "the wrong peer left");
    }
  });
}

TEST_P(TransportConformance, SeesAPeerDie) {
  const TransportCase& test = GetParam();
  if (test.launch != Launch::kProcesses || test.num_ranks < 2) {
    GTEST_SKIP() << "needs a process to kill";
  }
  const auto statuses = run_forked(test.num_ranks, [&](Group& group) {
    Wire wire(group, test, 4096);
    group.barrier();
    if (wire.rank() == 0) {
      ::kill(::getpid(), SIGKILL);
    }
    wire.await_state(0, PeerState::kDied);
    wire.transport->raise(0, 0, 1);  // legal, if pointless
    return 0;
  });
  std::vector<int> expected(static_cast<size_t>(test.num_ranks), 0);
  expected[0] = 128 + SIGKILL;
  EXPECT_EQ(statuses, expected);
}

}  // namespace weft::testing
