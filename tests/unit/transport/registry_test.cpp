// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fcntl.h>
#include <functional>
#include <string>
#include <vector>

#include "support/refuse.hpp"
#include "transport/transport.hpp"
#include "weft/error.hpp"

namespace weft {
namespace {

// Returns what `action` throws on this rank as "<code>: <message>", or an empty string.
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return std::string(error_code_name(error.code())) + ": " + error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(TransportRegistryTest, ListsTheCheapestFirst) {
  EXPECT_EQ(transport_names().front(), "loopback");
}

TEST(TransportRegistryTest, ChoosesLoopbackForThreads) {
  run_threads(2, [](Group& group) {
    EXPECT_EQ(transport_obstacle("loopback", group), "");
    EXPECT_EQ(transport_obstacle("shm", group), "");
    EXPECT_EQ(transport_obstacle("auto", group), "");
    EXPECT_EQ(transport_obstacle("faulty:shm?delay=0.5", group), "");
    EXPECT_EQ(make_transport("auto", group, 1)->name(), "loopback");
    EXPECT_EQ(make_transport("faulty:auto?seed=3", group, 1)->name(), "faulty:loopback");
  });
}

TEST(TransportRegistryTest, ChoosesShmForProcesses) {
  const auto statuses = run_forked(2, [](Group& group) {
    const bool is_right =
        make_transport("auto", group, 1)->name() == "shm" &&
        transport_obstacle("shm", group).empty() &&
        contains(transport_obstacle("loopback", group), "the ranks are not threads of one process");
    const std::string error =
        error_of([&] { static_cast<void>(make_transport("loopback", group, 1)); });
    const bool is_refused = contains(error, "not available: open(loopback): the ranks are not");
    return is_right && is_refused ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(TransportRegistryTest, ChoosesShmWhereProcessesHaveNoDescriptors) {
  if (!test::can_refuse()) {
    GTEST_SKIP() << "this machine has no filters of system calls";
  }
  for (const int error : {ENOSYS, EPERM}) {
    testing::internal::CaptureStderr();
    const auto statuses = run_forked(2, [&](Group& group) {
      const bool is_refused = test::refuse(SYS_pidfd_open, error);
      const auto transport = make_transport("auto", group, 1);
      const bool is_alive = transport->peer_state(1 - group.rank()) == PeerState::kAlive;
      group.barrier();
      return is_refused && is_alive && transport->name() == "shm" ? 0 : 1;
    });
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
    EXPECT_EQ(statuses, (std::vector<int>{0, 0})) << error;
  }
}

// Rank 1 may not open what another process has, for writing.
TEST(TransportRegistryTest, SaysOnceWhyANearerTransportIsPassedOver) {
  if (!test::can_refuse()) {
    GTEST_SKIP() << "this machine has no filters of system calls";
  }
  testing::internal::CaptureStderr();
  const auto statuses = run_forked(2, [&](Group& group) {
    if (group.rank() == 1 && !test::refuse(SYS_openat, EACCES, O_RDWR | O_CLOEXEC)) {
      return 1;
    }
    if (!transport_obstacle("ofi", group).empty()) {
      return 0;
    }
    return make_transport("auto", group, 1)->name() == "ofi" ? 0 : 1;
  });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
  bool has_ofi = false;
  run_threads(1, [&](Group& group) { has_ofi = transport_obstacle("ofi", group).empty(); });
  if (has_ofi) {
    const char* const words = "open(auto): transport ofi joins the ranks, as a nearer one cannot: ";
    EXPECT_TRUE(contains(said, words)) << said;
    EXPECT_TRUE(contains(said, "no access to the memory of process")) << said;
    EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
  }
}

TEST(TransportRegistryTest, NamesTheKnownTransportsForAnUnknownOne) {
  run_threads(2, [](Group& group) {
    const std::string error =
        error_of([&] { static_cast<void>(make_transport("avian", group, 1)); });
    EXPECT_TRUE(contains(
        error,
        "invalid argument: open(avian): there is no transport \"avian\" (known: auto, loopback, "
    )) << error;
    EXPECT_TRUE(contains(transport_obstacle("avian", group), "there is no transport"));
  });
}

TEST(TransportRegistryTest, TellsEveryRankThatNamesDiffer) {
  run_threads(3, [](Group& group) {
    const char* name = group.rank() == 2 ? "shm" : "loopback";
    const std::string error = error_of([&] { static_cast<void>(make_transport(name, group, 1)); });
    EXPECT_TRUE(contains(error, "open: rank 2 asks for transport \"shm\" (rank 0 for \"loopback\")")
    ) << error;
  });
}

TEST(TransportRegistryTest, TellsEveryRankThatSignalCountsDiffer) {
  run_threads(2, [](Group& group) {
    const auto num_signals = static_cast<uint32_t>(group.rank() + 4);
    const std::string error =
        error_of([&] { static_cast<void>(make_transport("auto", group, num_signals)); });
    EXPECT_TRUE(contains(error, "invalid argument: connect: rank 1 asks for 5 signals")) << error;
  });
}

TEST(TransportRegistryTest, PassesOnWhatIsWrongWithAFaultPlan) {
  run_threads(2, [](Group& group) {
    const std::string error =
        error_of([&] { static_cast<void>(make_transport("faulty:shm?drop=2", group, 1)); });
    EXPECT_TRUE(contains(error, "drop = 2 is no probability")) << error;
  });
}

TEST(TransportRegistryTest, KeepsDomainsApart) {
  ::setenv("WEFT_RANKS_PER_DOMAIN", "2", 1);
  run_threads(4, [](Group& group) {
    const std::string reason = "the ranks are in 2 domains (ranks 0 and 2 do not map";
    for (const char* name : {"loopback", "shm", "faulty:shm"}) {
      EXPECT_TRUE(contains(transport_obstacle(name, group), reason)) << name;
      const std::string error =
          error_of([&] { static_cast<void>(make_transport(name, group, 1)); });
      EXPECT_TRUE(contains(error, reason)) << error;
    }
  });
  ::unsetenv("WEFT_RANKS_PER_DOMAIN");
}

TEST(TransportRegistryTest, JoinsDomainsByLibfabricIfThereIsOne) {
  ::setenv("WEFT_RANKS_PER_DOMAIN", "2", 1);
  testing::internal::CaptureStderr();
  run_threads(4, [](Group& group) {
    const std::string obstacle = transport_obstacle("ofi", group);
    if (obstacle.empty()) {
      EXPECT_EQ(transport_obstacle("auto", group), "");
      EXPECT_EQ(transport_obstacle("domains", group), "");
      EXPECT_EQ(make_transport("auto", group, 1)->name(), "domains");
      EXPECT_EQ(make_transport("ofi", group, 1)->name(), "ofi");
      return;
    }
    const std::string error =
        error_of([&] { static_cast<void>(make_transport("auto", group, 1)); });
    EXPECT_TRUE(contains(error, "not available: open(auto): no transport joins these ranks"))
        << error;
    EXPECT_TRUE(contains(error, obstacle)) << error;
  });
  EXPECT_FALSE(contains(testing::internal::GetCapturedStderr(), "nearer")) << "several domains";
  ::unsetenv("WEFT_RANKS_PER_DOMAIN");
}

// Then nothing is shared that transport domains could use.
TEST(TransportRegistryTest, NeedsADomainOfSeveralRanksAndAnotherDomain) {
  run_threads(2, [](Group& group) {
    EXPECT_EQ(transport_obstacle("domains", group), "all ranks are in one domain");
    const std::string error =
        error_of([&] { static_cast<void>(make_transport("domains", group, 1)); });
    EXPECT_TRUE(contains(error, "not available: open(domains): all ranks are in one domain"))
        << error;
  });
  ::setenv("WEFT_RANKS_PER_DOMAIN", "1", 1);
  run_threads(2, [](Group& group) {
    EXPECT_EQ(transport_obstacle("domains", group), "no domain has several ranks");
    if (transport_obstacle("ofi", group).empty()) {
      EXPECT_EQ(make_transport("auto", group, 1)->name(), "ofi");
    }
  });
  ::unsetenv("WEFT_RANKS_PER_DOMAIN");
}

}  // namespace weft
