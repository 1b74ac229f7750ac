// SPDX-License-Identifier: Apache-2.0
// Connections that are not ranks: they are dropped, and the ranks meet all the same.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <csignal>
#include <memory>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "group/tcp/frame.hpp"
#include "group/tcp/handshake.hpp"
#include "group_test.hpp"
#include "tcp_ranks.hpp"

namespace weft {
namespace {

using namespace std::chrono_literals;

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

Socket open_to(int port) {
  Socket socket = connect_to(resolve("127.0.0.1", port, {}).front(), Deadline(10s));
  EXPECT_TRUE(socket.is_open());
  return socket;
}

void send_to(const Socket& socket, std::span<const std::byte> bytes) {
  EXPECT_EQ(send_all(socket, bytes, Deadline(10s)), IoState::kDone);
}

template <class T>
IoState receive_from(const Socket& socket, T& value) {
  return receive_all(socket, std::as_writable_bytes(std::span(&value, 1)), Deadline(10s));
}

void expect_group_meets(TestPort& port) {
  const auto outcomes = run_connected(port, rendezvous_of_all(3, port.port), [](Group& group) {
    expect_gathered(group, 1);
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.error, "");
  }
}

TEST(StrangerTest, SilenceGarbageAndScannersChangeNothing) {
  TestPort port;
  const Socket silent = open_to(port.port);
  const Socket garbage = open_to(port.port);
  const std::string text = "GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n and some more to fill it up";
  send_to(garbage, std::as_bytes(std::span(text)));
  const Socket half = open_to(port.port);
  send_to(half, std::as_bytes(std::span(kMagic)));
  open_to(port.port).close();
  expect_group_meets(port);
}

TEST(StrangerTest, AreNamedWhereARankDoesNotCome) {
  TestPort port;
  const std::string place = port.place();
  const Socket garbage = open_to(port.port);
  const std::string text(sizeof(Greeting), '?');
  send_to(garbage, std::as_bytes(std::span(text)));
  open_to(port.port).close();
  const auto outcomes = run_connected(port, {rendezvous_of(0, 2, port.port, 500ms)});
  const std::string expected = "connect: rank 1 did not join at " + place +
                               " within 0.5 s (2 connections proved nothing, of 127.0.0.1)";
  EXPECT_EQ(outcomes[0].error.substr(0, expected.size()), expected);
}

// Another process that opens and drops connections as fast as it can, for as long as this object
// lives.
class Storm {
 public:
  explicit Storm(int port) {
    child_ = fork();
    if (child_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      constexpr size_t kHeld = 64;
      std::vector<Socket> held(kHeld);
      const Endpoint endpoint = resolve("127.0.0.1", port, {}).front();
      const linger at_once = {1, 0};  // or ports run out
      for (size_t i = 0;; ++i) {
        Socket socket = connect_to(endpoint, Deadline(0s));
        setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        held[i % kHeld] = std::move(socket);
      }
    }
  }
  Storm(const Storm&) = delete;
  Storm& operator=(const Storm&) = delete;
  ~Storm() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }

 private:
  pid_t child_ = -1;
};

TEST(StrangerTest, AStormOfConnectionsChangesNothing) {
  TestPort port;
  std::vector<std::unique_ptr<Storm>> storms;
  for (int i = 0; i < 8; ++i) {
    storms.push_back(std::make_unique<Storm>(port.port));
  }
  std::this_thread::sleep_for(300ms);  // until it rages
  expect_group_meets(port);
}

// Another process with many silent connections to the port, for as long as this object lives.
class SilentCrowd {
 public:
  SilentCrowd(int port, int size) {
    std::array<int, 2> ready = {};
    EXPECT_EQ(pipe(ready.data()), 0);
    child_ = fork();
    if (child_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      std::vector<Socket> sockets;
      for (int i = 0; i < size; ++i) {
        sockets.push_back(open_to(port));
      }
      static_cast<void>(write(ready[1], "", 1));
      pause();
    }
    char word = 0;
    EXPECT_EQ(read(ready[0], &word, 1), 1);
    close(ready[0]);
    close(ready[1]);
  }
  SilentCrowd(const SilentCrowd&) = delete;
  SilentCrowd& operator=(const SilentCrowd&) = delete;
  ~SilentCrowd() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }

 private:
  pid_t child_ = -1;
};

// Leaves this process only so many files to open.
class FewFiles {
 public:
  explicit FewFiles(int num_left) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const Socket next(dup(0));  // all below it are taken
    rlimit few = before_;
    few.rlim_cur = static_cast<rlim_t>(next.get()) + static_cast<rlim_t>(num_left);
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  FewFiles(const FewFiles&) = delete;
  FewFiles& operator=(const FewFiles&) = delete;
  ~FewFiles() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};

class FewFilesTest : public testing::Test {
  void SetUp() override {
    // The undefined-behaviour sanitizer opens files to look at memory, and calls it bad if it
    // cannot.
#if defined(__SANITIZE_ADDRESS__)
    GTEST_SKIP() << "sanitizers need files to open";
#endif
  }
};

TEST_F(FewFilesTest, MoreStrangersThanFilesChangeNothing) {
  TestPort port;
  const SilentCrowd crowd(port.port, 64);
  const FewFiles files(24);
  expect_group_meets(port);
}

TEST_F(FewFilesTest, TooFewForTheRanksAreNamed) {
  TestPort port;
  const SilentCrowd crowd(port.port, 1);
  const FewFiles files(0);
  const auto outcomes = run_connected(port, {rendezvous_of(0, 2, port.port)});
  EXPECT_EQ(outcomes[0].code, ErrorCode::kNotAvailable);
  EXPECT_NE(outcomes[0].error.find("ulimit -n"), std::string::npos) << outcomes[0].error;
}

constexpr auto kPeer = Handshake::Side::kPeer;
constexpr auto kRoot = Handshake::Side::kRoot;

Handshake handshake_of(const std::string& secret, Handshake::Side side = kPeer) {
  return {point_of(secret), side};
}

TEST(StrangerTest, AGreetingWithoutProofChangesNothing) {
  TestPort port;
  std::vector<Socket> sockets;
  for (const int rank : {0, 1, 1, 2, -5, 70}) {
    const Socket& socket = sockets.emplace_back(open_to(port.port));
    send_to(socket, bytes_of(handshake_of("what it made up itself").greeting()));
    send_to(socket, bytes_of(Hello{{kProtocolVersion, rank, 99}, {}}));
  }
  expect_group_meets(port);
}

// Greets rank 0 and hears its greeting.
Handshake greet(const Socket& socket, const std::string& secret) {
  Handshake handshake = handshake_of(secret);
  send_to(socket, bytes_of(handshake.greeting()));
  Greeting greeting;
  EXPECT_EQ(receive_from(socket, greeting), IoState::kDone);
  EXPECT_TRUE(handshake.hear(greeting));
  return handshake;
}

TEST(StrangerTest, AProofCannotBeUsedTwice) {
  TestPort port;
  std::jthread root([&] {
    EXPECT_NO_THROW(
        static_cast<void>(admit_ranks(rendezvous_of(0, 2, port.port), std::move(port.listener)))
    );
  });
  const Claim claim = {kProtocolVersion, 1, 2};
  const Socket first = open_to(port.port);
  const Handshake handshake = greet(first, kTestSecret);

  const Socket second = open_to(port.port);
  send_to(second, bytes_of(handshake.greeting()));
  send_to(second, bytes_of(Hello{claim, handshake.prove(kPeer, claim)}));
  Greeting greeting;
  ASSERT_EQ(receive_from(second, greeting), IoState::kDone);
  Proof answer;
  ASSERT_EQ(receive_from(second, answer), IoState::kDone);
  EXPECT_EQ(answer, Proof{});
  std::byte more;
  EXPECT_EQ(receive_from(second, more), IoState::kClosed);
  static_cast<void>(join_ranks(rendezvous_of(1, 2, port.port)));
}

// Rank 0 proves nothing to whoever has proven nothing.
TEST(StrangerTest, WhoeverProvesNothingGetsNoProof) {
  TestPort port;
  std::jthread root([&] {
    EXPECT_NO_THROW(
        static_cast<void>(admit_ranks(rendezvous_of(0, 2, port.port), std::move(port.listener)))
    );
  });
  const Socket socket = open_to(port.port);
  const Handshake handshake = greet(socket, "a guess that is wrong");
  const Claim claim = {kProtocolVersion, 1, 2};
  send_to(socket, bytes_of(Hello{claim, handshake.prove(kPeer, claim)}));
  Proof answer;
  ASSERT_EQ(receive_from(socket, answer), IoState::kDone);
  EXPECT_EQ(answer, Proof{});
  std::byte more;
  EXPECT_EQ(receive_from(socket, more), IoState::kClosed);
  static_cast<void>(join_ranks(rendezvous_of(1, 2, port.port)));
}

TEST(StrangerTest, AFalseRankZeroIsNoticed) {
  const TestPort port;
  std::jthread rank([&] {
    expect_error(ErrorCode::kInvalidArgument, "connect: rank 0 at " + port.place(), [&] {
      static_cast<void>(join_ranks(rendezvous_of(1, 2, port.port)));
    });
  });
  ASSERT_TRUE(wait_readable(port.listener, Deadline(10s)));
  std::string host;
  const Socket socket = accept_from(port.listener, host);
  EXPECT_EQ(host, "127.0.0.1");
  Greeting greeting;
  ASSERT_EQ(receive_from(socket, greeting), IoState::kDone);
  Handshake handshake = handshake_of("what it made up itself", kRoot);
  ASSERT_TRUE(handshake.hear(greeting));
  send_to(socket, bytes_of(handshake.greeting()));
  Hello hello;
  ASSERT_EQ(receive_from(socket, hello), IoState::kDone);
  EXPECT_FALSE(handshake.is_proven(kPeer, hello.claim, hello.proof));
  send_to(socket, bytes_of(handshake.prove(kRoot, hello.claim)));
}

TEST(StrangerTest, AnotherServiceOnThePortIsNamed) {
  const TestPort port;
  std::jthread rank([&] {
    expect_error(
        ErrorCode::kTimeout,
        "connect: rank 0 did not answer at " + port.place() +
            " within 0.3 s (what listens there does not answer as this version of Weft does)",
        [&] { static_cast<void>(join_ranks(rendezvous_of(1, 2, port.port, 300ms))); }
    );
  });
  ASSERT_TRUE(wait_readable(port.listener, Deadline(10s)));
  std::string host;
  const Socket socket = accept_from(port.listener, host);
  const std::string text(sizeof(Greeting), '?');
  send_to(socket, std::as_bytes(std::span(text)));
  rank.join();
}

TEST(StrangerTest, AnotherVersionIsNamedOnBothSides) {
  TestPort port;
  const std::string text = fmt::format(
      "connect: rank 1 speaks version {} (rank 0: {})", kProtocolVersion + 1, kProtocolVersion
  );
  std::jthread root([&] {
    const auto outcomes = run_connected(port, {rendezvous_of(0, 2, port.port)});
    EXPECT_EQ(outcomes[0].error.substr(0, text.size()), text);
  });
  const Socket socket = open_to(port.port);
  const Handshake handshake = greet(socket, kTestSecret);
  const Claim claim = {kProtocolVersion + 1, 1, 2};
  send_to(socket, bytes_of(Hello{claim, handshake.prove(kPeer, claim)}));
  Proof proof;
  ASSERT_EQ(receive_from(socket, proof), IoState::kDone);
  EXPECT_TRUE(handshake.is_proven(kRoot, claim, proof));
  Frame frame;
  ASSERT_EQ(receive_frame(socket, frame, Deadline(10s)), IoState::kDone);
  const auto failure = failure_in(frame);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->text.substr(0, text.size()), text);
}

TEST(StrangerTest, ARankOutOfRangeIsNamedOnBothSides) {
  TestPort port;
  const std::string text = "connect: rank 5 is out of range (num_ranks = 2)";
  std::jthread root([&] {
    const auto outcomes = run_connected(port, {rendezvous_of(0, 2, port.port)});
    EXPECT_EQ(outcomes[0].error.substr(0, text.size()), text);
  });
  auto rendezvous = rendezvous_of(5, 2, port.port);
  expect_error(ErrorCode::kInvalidArgument, text, [&] {
    static_cast<void>(join_ranks(rendezvous));
  });
}

}  // namespace
}  // namespace weft
