// SPDX-License-Identifier: Apache-2.0
// Promises of transport ofi beyond the conformance suite.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <sched.h>
#include <string>
#include <thread>
#include <unistd.h>

#include "conformance/transport_conformance.hpp"
#include "transport/ofi/ofi.hpp"
#include "weft/error.hpp"

namespace weft {
namespace {

using testing::require;
using testing::require_refusal;
using testing::TransportCase;
using testing::Wire;

class OfiTransportTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string reason = transport_obstacle(GetParam(), Group::local(1).front());
    if (!reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }
  void TearDown() override {
    for (const char* name :
         {"WEFT_FABRIC_QUEUES", "WEFT_FABRIC", "WEFT_FABRIC_ADDRESS", "WEFT_FABRIC_GPU_MEMORY"}) {
      ::unsetenv(name);
    }
  }
  static void run(
      int num_ranks, const std::function<void(Wire&)>& body, uint64_t region_bytes = 4096
  ) {
    const TransportCase test = {.transport = GetParam(), .num_ranks = num_ranks};
    run_threads(num_ranks, [&](Group& group) {
      Wire wire(group, test, region_bytes);
      body(wire);
      group.barrier();
    });
  }
};

// Bytes that depend on where they are.
std::vector<std::byte> make_block(uint64_t bytes, int seed) {
  std::vector<std::byte> block(bytes);
  for (uint64_t i = 0; i < bytes; ++i) {
    block[i] = static_cast<std::byte>((i * 31 + (i >> 12) + static_cast<uint64_t>(seed)) & 0xff);
  }
  return block;
}

}  // namespace

TEST_P(OfiTransportTest, RefusesWhatItsOwnerReleased) {
  run(2, [](Wire& wire) {
    wire.group.barrier();
    if (wire.rank() == 1) {
      wire.transport->release(wire.own.ref);
    }
    wire.group.barrier();
    if (wire.rank() == 0) {
      require_refusal([&] { wire.transport->import(1, wire.refs[1]); }, "is not allocated there");
      const Put put = {.region = wire.slot_of(1)};
      require_refusal(
          [&] { wire.transport->put(1, std::span(&put, 1)); }, "put: region 0 of rank 1 is released"
      );
    }
  });
}

// Neighbours go as one write; each still counts.
TEST_P(OfiTransportTest, CountsEachOfNeighbouringPuts) {
  constexpr uint64_t kRowBytes = 4096;
  constexpr uint32_t kRows = 200;  // more than one write can carry
  run(
      2,
      [](Wire& wire) {
        const auto block = make_block(kRows * kRowBytes, wire.rank());
        std::vector<Put> puts;
        for (uint32_t row = 0; row < kRows; ++row) {
          puts.push_back(
              {.source = block.data() + row * kRowBytes,
               .bytes = kRowBytes,
               .region = wire.slot_of(wire.next()),
               .signal = row < kRows / 2 ? 0U : 1U,
               .offset = row * kRowBytes}
          );
        }
        wire.transport->put(wire.next(), puts);
        wire.wait(0, kRows / 2);
        wire.wait(1, kRows / 2);
        const auto expected = make_block(kRows * kRowBytes, wire.previous());
        require(
            std::memcmp(wire.own.data, expected.data(), expected.size()) == 0, "wrong bytes came"
        );
        require(wire.transport->signal_value(0) == kRows / 2, "counted too much");
      },
      kRows * kRowBytes
  );
}

// Sixteen times what is in flight at most, from several threads over several queues.
TEST_P(OfiTransportTest, BoundsWhatIsInFlight) {
  constexpr int kThreads = 4;
  constexpr uint64_t kPuts = 64;
  constexpr uint64_t kBytes = 192 << 10;
  ::setenv("WEFT_FABRIC_QUEUES", "3", 1);
  run(
      2,
      [](Wire& wire) {
        {
          std::vector<std::jthread> threads;
          for (int thread = 0; thread < kThreads; ++thread) {
            threads.emplace_back([&wire, thread] {
              for (uint64_t i = 0; i < kPuts; ++i) {
                auto block = make_block(kBytes, wire.rank() + thread);
                const Put put = {
                    .source = block.data(),
                    .bytes = kBytes,
                    .region = wire.slot_of(wire.next()),
                    .signal = 0,
                    .offset = kBytes * static_cast<uint64_t>(thread)};
                wire.transport->put(wire.next(), std::span(&put, 1));
                std::memset(block.data(), 0xff, kBytes);  // the source may be used again
              }
            });
          }
        }
        wire.wait(0, kThreads * kPuts);
        for (int thread = 0; thread < kThreads; ++thread) {
          const auto expected = make_block(kBytes, wire.previous() + thread);
          const std::byte* at = wire.own.data + kBytes * static_cast<uint64_t>(thread);
          require(std::memcmp(at, expected.data(), kBytes) == 0, "a source was sent too late");
        }
      },
      kBytes * kThreads
  );
}

TEST_P(OfiTransportTest, MovesManyMegabytesFromWhereTheyAre) {
  constexpr uint64_t kBytes = (uint64_t{24} << 20) + 1;
  run(
      2,
      [](Wire& wire) {
        const auto block = make_block(kBytes, wire.rank());
        const Put put = {
            .source = block.data(),
            .bytes = kBytes,
            .region = wire.slot_of(wire.next()),
            .signal = 2,
            .offset = 0};
        wire.transport->put(wire.next(), std::span(&put, 1));
        wire.wait(2, 1);
        const auto expected = make_block(kBytes, wire.previous());
        require(std::memcmp(wire.own.data, expected.data(), kBytes) == 0, "wrong bytes came");
      },
      kBytes
  );
}

// The farewell comes after all that was put before, also over several queues.
TEST_P(OfiTransportTest, DeliversWhatWasPutBeforeLeaving) {
  constexpr uint64_t kPuts = 50;
  ::setenv("WEFT_FABRIC_QUEUES", "2", 1);
  run(3, [](Wire& wire) {
    wire.group.barrier();
    if (wire.rank() == 2) {
      const auto block = make_block(1000, 1);
      std::vector<std::jthread> threads;
      for (uint64_t thread = 0; thread < 2; ++thread) {
        threads.emplace_back([&, thread] {
          const Put put = {
              .source = block.data(),
              .bytes = 1000,
              .region = 0,
              .signal = 5,
              .offset = 1000 * thread};
          for (uint64_t i = 0; i < kPuts; ++i) {
            wire.transport->put(0, std::span(&put, 1));
            wire.transport->put(1, std::span(&put, 1));
          }
        });
      }
      threads.clear();
      wire.transport.reset();  // closes
      return;
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (wire.transport->peer_state(2) == PeerState::kAlive) {
      require(std::chrono::steady_clock::now() < deadline, "rank 2 did not leave");
    }
    require(wire.transport->signal_value(5) == 2 * kPuts, "the farewell came before a put");
  });
}

// Progress does not hang on the target's own calls.
TEST_P(OfiTransportTest, MovesWhileTheTargetDoesNotCall) {
  std::atomic<bool> is_done = false;
  run(
      2,
      [&](Wire& wire) {
        if (wire.rank() == 1) {
          while (!is_done) {
            std::this_thread::yield();
          }
          return;
        }
        const auto block = make_block(8 << 20, 3);
        const Put put = {.source = block.data(), .bytes = block.size(), .region = wire.slot_of(1)};
        for (int i = 0; i < 4; ++i) {
          wire.transport->put(1, std::span(&put, 1));
        }
        is_done = true;
      },
      8 << 20
  );
}

TEST_P(OfiTransportTest, GivesUpOnARankThatIsStopped) {
  const auto statuses = run_forked(2, [&](Group& group) {
    auto transport =
        make_transport(GetParam(), group, 4, {.timeout = std::chrono::milliseconds(500)});
    const Region own = transport->allocate(64 << 20);
    const auto refs = group.all_gather(std::as_bytes(std::span(&own.ref, 1)));
    RegionRef ref;
    std::memcpy(&ref, refs[1].data(), sizeof ref);
    transport->import(1, ref);
    const int32_t pid = ::getpid();
    const auto pids = group.all_gather(std::as_bytes(std::span(&pid, 1)));
    if (group.rank() == 1) {
      ::raise(SIGSTOP);
      return 0;
    }
    int32_t stopped = 0;
    std::memcpy(&stopped, pids[1].data(), sizeof stopped);
    std::string text = "nothing was thrown";
    const std::vector<std::byte> block(64 << 20);
    const Put put = {.source = block.data(), .bytes = block.size(), .region = ref.slot};
    try {
      for (int i = 0; i < 100; ++i) {
        transport->put(1, std::span(&put, 1));
      }
    } catch (const Error& error) {
      text = error.what();
    }
    ::kill(stopped, SIGCONT);
    const bool is_right = text.find("put: rank 1 took nothing for 0.5 s") != std::string::npos;
    if (!is_right) {
      std::fprintf(stderr, "%s\n", text.c_str());
    }
    return is_right ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

// Why it takes none, by what is asked for; Debian's libfabric knows no CUDA.
TEST_P(OfiTransportTest, SaysWhyItTakesNoGpuMemory) {
  const std::string kind = std::string(GetParam()).substr(4);
  const Device gpu = {.kind = Device::Kind::kCuda, .index = 0};
  std::vector<std::byte> memory(4096);
  const auto refusal = [&](const char* wish, const std::string& device) {
    ::setenv("WEFT_FABRIC_GPU_MEMORY", wish, 1);
    const Group group = std::move(Group::local(1).front());
    const auto transport = make_ofi(group, 1, {.device = device}, kind);
    try {
      transport->release(transport->lend(memory.data(), memory.size(), gpu).ref);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_TRUE(refusal("direct", "").starts_with("lend: this rank has no GPU"));
  const std::string address = "0000:01:00.0";
  EXPECT_TRUE(refusal("host", address).starts_with("lend: WEFT_FABRIC_GPU_MEMORY is host"));
  EXPECT_TRUE(refusal("auto", address).starts_with("lend: provider " + kind + " does not reach"));
  const std::string direct = refusal("direct", address);
  if (kind == "tcp") {
    EXPECT_TRUE(direct.starts_with("lend: with FI_HMEM: fi_getinfo: ")) << direct;
  } else if (direct == "nothing was thrown") {
    GTEST_SKIP() << "this libfabric knows CUDA";
  } else {
    EXPECT_TRUE(direct.starts_with("fi_mr_regattr of 4096 B: ")) << direct;
  }
}

TEST_P(OfiTransportTest, RefusesToTakeTheSameMemoryTwice) {
  const std::string kind = std::string(GetParam()).substr(4);
  const Group group = std::move(Group::local(1).front());
  const auto transport = make_ofi(group, 1, {}, kind);
  std::vector<std::byte> memory(4096);
  const Region first = transport->lend(memory.data() + 1000, 1000, Device());
  EXPECT_EQ(first.data, memory.data() + 1000);
  for (const auto& [begin, bytes] :
       {std::pair<size_t, uint64_t>{1000, 1000}, {0, 4096}, {0, 1001}, {1999, 5}, {1500, 10}}) {
    EXPECT_THROW(static_cast<void>(transport->lend(memory.data() + begin, bytes, Device())), Error)
        << begin << " " << bytes;
  }
  const Region before = transport->lend(memory.data(), 1000, Device());
  const Region after = transport->lend(memory.data() + 2000, 2096, Device());
  for (const Region& region : {first, before, after}) {
    transport->release(region.ref);
  }
  EXPECT_THROW(transport->release(first.ref), Error);
  transport->release(transport->lend(memory.data(), 4096, Device()).ref);
}

INSTANTIATE_TEST_SUITE_P(
    All,
    OfiTransportTest,
    ::testing::Values("ofi:tcp", "ofi:shm"),
    [](const ::testing::TestParamInfo<const char*>& param) {
      return std::string(param.param).substr(4);
    }
);

TEST(OfiSelectionTest, SaysWhichRankLacksWhat) {
  if (!transport_obstacle("ofi", Group::local(1).front()).empty()) {
    GTEST_SKIP() << "libfabric is missing";
  }
  const auto statuses = run_forked(2, [](Group& group) {
    if (group.rank() == 1) {
      ::setenv("WEFT_FABRIC", "shm", 1);
    }
    std::string text = "nothing was thrown";
    try {
      static_cast<void>(make_transport("ofi", group, 1));
    } catch (const Error& error) {
      text = error.what();
    }
    const bool is_right =
        text.find("open(ofi): no provider can be used by all ranks") == 0 &&
        text.find("tcp: shm is asked for on rank 1") != std::string::npos &&
        text.find("shm: used only when asked for by name on rank 0") != std::string::npos;
    if (!is_right) {
      std::fprintf(stderr, "%s\n", text.c_str());
    }
    return is_right ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

// A host of its own, as far as names tell; false if this user may not make one.
bool become_host(const std::string& name) {
  return ::unshare(CLONE_NEWUTS) == 0 && ::sethostname(name.c_str(), name.size()) == 0;
}

// Rank 1 is killed and rank 2 leaves; rank 0 must see both. `has_talked`: over connections that
// were there. `is_putting`: in the middle of a put.
void expect_noticed(bool has_talked, bool is_putting) {
  constexpr int kMayNot = 77;
  ::setenv("WEFT_FABRIC_ADDRESS", "127.0.0.1", 1);
  const auto statuses = run_forked(3, [&](Group& group) {
    if (!become_host("weft-host-" + std::to_string(group.rank()))) {
      return kMayNot;
    }
    const Group hosts = Group::from_all_gather(group.rank(), 3, [&](std::span<const std::byte> b) {
      return group.all_gather(b);
    });
    require(hosts.topology().host_of[0] != hosts.topology().host_of[1], "one host");
    const TransportCase test = {.transport = "ofi:tcp", .num_ranks = 3};
    Group own = hosts;
    Wire wire(own, test, 4096);
    if (has_talked) {
      for (int peer = 0; peer < 3; ++peer) {
        wire.transport->raise(peer, 0, 1);
      }
      wire.wait(0, 3);
    }
    require(wire.transport->peer_state(1) == PeerState::kAlive, "rank 1 is not there");
    group.barrier();
    if (group.rank() == 1) {
      ::kill(::getpid(), SIGKILL);
    }
    if (group.rank() == 2) {
      wire.transport->close();
      return 0;
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    if (is_putting) {
      const std::vector<std::byte> block(4096);
      const Put put = {.source = block.data(), .bytes = 4096, .region = wire.slot_of(1)};
      const auto forever = [&] {
        while (std::chrono::steady_clock::now() < deadline) {
          wire.transport->put(1, std::span(&put, 1));
        }
      };
      require_refusal(forever, "put: rank 1 died");
    }
    while (wire.transport->peer_state(1) != PeerState::kDied ||
           wire.transport->peer_state(2) != PeerState::kLeft) {
      require(std::chrono::steady_clock::now() < deadline, "nobody noticed");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return 0;
  });
  ::unsetenv("WEFT_FABRIC_ADDRESS");
  if (statuses[0] == kMayNot) {
    GTEST_SKIP() << "this user may not name hosts";
  }
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
}

class OfiHostsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!transport_obstacle("ofi", Group::local(1).front()).empty()) {
      GTEST_SKIP() << "libfabric is missing";
    }
  }
};

// No process of another host can be watched, so the network has to tell.
TEST_F(OfiHostsTest, NoticesTheEndOfRanksItNeverTalkedTo) {
  expect_noticed(false, false);
}

TEST_F(OfiHostsTest, NoticesTheEndOfRanksItTalkedTo) {
  expect_noticed(true, false);
}

TEST_F(OfiHostsTest, EndsAPutToARankThatDied) {
  expect_noticed(false, true);
  expect_noticed(true, true);
}

TEST_F(OfiHostsTest, AsksForTheNetworkBetweenHosts) {
  constexpr int kMayNot = 77;
  const auto statuses = run_forked(2, [](Group& group) {
    if (!become_host("weft-host-" + std::to_string(group.rank()))) {
      return kMayNot;
    }
    const Group hosts = Group::from_all_gather(group.rank(), 2, [&](std::span<const std::byte> b) {
      return group.all_gather(b);
    });
    const std::string obstacle = transport_obstacle("ofi:tcp", hosts);
    return obstacle.find(
               "tcp: the ranks are on several hosts and WEFT_FABRIC_ADDRESS, the network "
               "to use, is not set"
           ) != std::string::npos
               ? 0
               : 1;
  });
  if (statuses[0] == kMayNot) {
    GTEST_SKIP() << "this user may not name hosts";
  }
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(OfiSelectionTest, NamesAnAddressThatIsNotHere) {
  if (!transport_obstacle("ofi", Group::local(1).front()).empty()) {
    GTEST_SKIP() << "libfabric is missing";
  }
  ::setenv("WEFT_FABRIC_ADDRESS", "avian0", 1);
  const std::string obstacle = transport_obstacle("ofi:tcp", Group::local(1).front());
  ::unsetenv("WEFT_FABRIC_ADDRESS");
  EXPECT_NE(obstacle.find("WEFT_FABRIC_ADDRESS = \"avian0\" is no interface"), std::string::npos)
      << obstacle;
}

TEST(OfiSelectionTest, ReportsWhatIsChosenAndWhy) {
  if (!transport_obstacle("ofi", Group::local(1).front()).empty()) {
    GTEST_SKIP() << "libfabric is missing";
  }
  ::setenv("WEFT_FABRIC", "tcp", 1);
  const FabricReport report = fabric_report();
  ::unsetenv("WEFT_FABRIC");
  EXPECT_EQ(report.chosen, "tcp");
  EXPECT_EQ(report.why, "asked for by name");
  EXPECT_EQ(report.address, "127.0.0.1");
  ASSERT_EQ(report.providers.size(), 5U);
  EXPECT_EQ(report.providers[3].state, "chosen");
  EXPECT_EQ(report.providers[4].state, "tcp is asked for");
}

}  // namespace weft
