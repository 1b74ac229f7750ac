// SPDX-License-Identifier: Apache-2.0
// Connections that are not ranks: they are dropped, and the ranks meet all the same.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <csignal>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
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

TEST(StrangerTest, AGreetingWithoutProofChangesNothing) {
  TestPort port;
  std::vector<Socket> sockets;
  for (const int rank : {0, 1, 1, 2, -5, 70}) {
    const Socket& socket = sockets.emplace_back(open_to(port.port));
    send_to(socket, bytes_of(Greeting{}));
    send_to(socket, bytes_of(Hello{{kProtocolVersion, rank, 99}, {}}));
  }
  expect_group_meets(port);
}

TEST(StrangerTest, AProofCannotBeUsedTwice) {
  TestPort port;
  std::jthread root([&] {
    const auto outcomes = run_connected(port, {rendezvous_of(0, 2, port.port, 500ms)});
    EXPECT_EQ(outcomes[0].code, ErrorCode::kTimeout) << outcomes[0].error;
  });
  const Key key = derive_key(kTestSecret);
  Greeting greeting;
  greeting.nonce = random_nonce();
  const Socket first = open_to(port.port);
  send_to(first, bytes_of(greeting));
  Challenge challenge;
  ASSERT_EQ(receive_from(first, challenge), IoState::kDone);
  ASSERT_TRUE(is_proven(key, greeting, challenge));
  const Hello hello = make_hello(key, greeting, challenge, {kProtocolVersion, 1, 2});

  const Socket second = open_to(port.port);
  send_to(second, bytes_of(greeting));
  send_to(second, bytes_of(hello));
  Challenge other;
  ASSERT_EQ(receive_from(second, other), IoState::kDone);
  std::byte more;
  EXPECT_EQ(receive_from(second, more), IoState::kClosed);
}

TEST(StrangerTest, AFalseRankZeroGetsNoProof) {
  const TestPort port;
  std::jthread rank([&] {
    expect_error(ErrorCode::kInvalidArgument, "connect: rank 0 at " + port.place(), [&] {
      static_cast<void>(join_ranks(rendezvous_of(1, 2, port.port)));
    });
  });
  ASSERT_TRUE(wait_readable(port.listener, Deadline(10s)));
  const Socket socket = accept_from(port.listener);
  Greeting greeting;
  ASSERT_EQ(receive_from(socket, greeting), IoState::kDone);
  send_to(socket, bytes_of(make_challenge(derive_key("what it made up itself"), greeting)));
  Hello hello;
  ASSERT_EQ(receive_from(socket, hello), IoState::kDone);
  EXPECT_EQ(hello.proof, Proof{});
}

TEST(StrangerTest, AnotherServiceOnThePortIsNamed) {
  const TestPort port;
  std::jthread rank([&] {
    expect_error(
        ErrorCode::kTimeout,
        "connect: rank 0 did not answer at " + port.place() +
            " within 0.3 s (what listens there does not answer as Weft does)",
        [&] { static_cast<void>(join_ranks(rendezvous_of(1, 2, port.port, 300ms))); }
    );
  });
  ASSERT_TRUE(wait_readable(port.listener, Deadline(10s)));
  const Socket socket = accept_from(port.listener);
  const std::string text(sizeof(Challenge), '?');
  send_to(socket, std::as_bytes(std::span(text)));
  rank.join();
}

TEST(StrangerTest, AnotherVersionIsNamedOnBothSides) {
  TestPort port;
  const std::string text =
      fmt::format("connect: rank 1 speaks version 7 (rank 0: {})", kProtocolVersion);
  std::jthread root([&] {
    const auto outcomes = run_connected(port, {rendezvous_of(0, 2, port.port)});
    EXPECT_EQ(outcomes[0].error.substr(0, text.size()), text);
  });
  const Key key = derive_key(kTestSecret);
  const Greeting greeting;
  const Socket socket = open_to(port.port);
  send_to(socket, bytes_of(greeting));
  Challenge challenge;
  ASSERT_EQ(receive_from(socket, challenge), IoState::kDone);
  send_to(socket, bytes_of(make_hello(key, greeting, challenge, {7, 1, 2})));
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
