// SPDX-License-Identifier: Apache-2.0
// Parts of GPU transports that need no GPU: names, and descriptors that travel between processes.
#include "cuda/transport/gpu_transport.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda/transport/fd_server.hpp"
#include "support/errors.hpp"
#include "weft/group.hpp"

namespace weft::test {
namespace {

constexpr std::string_view kText = "seen by all";

int file_with_text() {
  const int fd = ::memfd_create("weft-test", MFD_CLOEXEC);
  EXPECT_EQ(::pwrite(fd, kText.data(), kText.size(), 0), static_cast<ssize_t>(kText.size()));
  return fd;
}

bool has_text(const FdTicket& ticket) {
  const Descriptor fd = fetch_fd(ticket, {});
  std::array<char, kText.size()> text = {};
  const ssize_t size = ::pread(fd.get(), text.data(), text.size(), 0);
  return std::string_view(text.data(), static_cast<size_t>(size)) == kText;
}

// Rank 0's tickets, on every rank.
template <size_t kCount>
std::array<FdTicket, kCount> share(const Group& group, std::array<FdTicket, kCount> tickets) {
  const auto blocks = group.all_gather(std::as_bytes(std::span(tickets)));
  std::memcpy(tickets.data(), blocks[0].data(), sizeof tickets);
  return tickets;
}

TEST(GpuTransportRegistryTest, NamesTheKnownTransportsForAnUnknownOne) {
  EXPECT_EQ(gpu_transport_names().front(), "ipc");
  const auto thrown = thrown_by([] { static_cast<void>(make_gpu_transport("avian", {})); });
  ASSERT_TRUE(thrown);
  EXPECT_EQ(thrown->code, ErrorCode::kInvalidArgument);
  EXPECT_NE(
      text_of(thrown).find("there is no GPU transport \"avian\" (WEFT_GPU_TRANSPORT; known: ipc, "),
      std::string::npos
  ) << text_of(thrown);
  const std::string obstacle = gpu_transport_obstacle("avian", 0);
  EXPECT_NE(obstacle.find("there is no GPU transport"), std::string::npos) << obstacle;
}

TEST(FdServerTest, HandsDescriptorsToProcessesAndThreads) {
  const auto body = [](const Group& group) {
    FdServer server({});
    std::array<FdTicket, 2> tickets;
    if (group.rank() == 0) {
      tickets = {server.offer(file_with_text()), server.offer(file_with_text())};
    }
    tickets = share(group, tickets);
    bool is_right = true;
    for (int again = 0; again < 50; ++again) {
      is_right = is_right && has_text(tickets[0]) && has_text(tickets[1]);
    }
    group.barrier();
    return is_right;
  };
  run_threads(4, [&](Group& group) { EXPECT_TRUE(body(group)); });
  const auto statuses = run_forked(4, [&](Group& group) { return body(group) ? 0 : 1; });
  EXPECT_EQ(statuses, (std::vector<int>(4, 0)));
}

TEST(FdServerTest, SaysThatADescriptorIsWithdrawnAndCloses) {
  FdServer server({});
  std::array<int, 2> ends = {};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const Descriptor reading(ends[0]);
  const FdTicket ticket = server.offer(ends[1]);
  server.withdraw(ticket);
  const auto thrown = thrown_by([&] { static_cast<void>(fetch_fd(ticket, {})); });
  ASSERT_TRUE(thrown);
  EXPECT_EQ(thrown->code, ErrorCode::kNotAvailable);
  EXPECT_NE(text_of(thrown).find("descriptor 1 is no longer offered"), std::string::npos);
  char byte = 0;
  EXPECT_EQ(::read(reading.get(), &byte, 1), 0) << "nobody holds the other end";
}

// Connects to a server and says nothing.
Descriptor silent_client(const FdTicket& ticket) {
  Descriptor client(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string name = fmt::format("weft-fd-{:016x}", ticket.server);
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  EXPECT_EQ(::connect(client.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
  return client;
}

TEST(FdServerTest, AnswersOthersWhileClientsSayNothing) {
  FdServer server({});
  const FdTicket ticket = server.offer(file_with_text());
  const std::array<Descriptor, 2> silent = {silent_client(ticket), silent_client(ticket)};
  EXPECT_TRUE(has_text(ticket));
}

TEST(FdServerTest, SignalsThatInterruptItChangeNothing) {
  FdServer server({});
  const FdTicket ticket = server.offer(file_with_text());
  struct sigaction action = {};
  action.sa_handler = [](int) {};
  struct sigaction before = {};
  ASSERT_EQ(::sigaction(SIGALRM, &action, &before), 0);
  const itimerval often = {.it_interval = {0, 50}, .it_value = {0, 50}};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
  for (int again = 0; again < 2000; ++again) {
    ASSERT_TRUE(has_text(ticket));
  }
  const itimerval never = {};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &never, nullptr), 0);
  ::sigaction(SIGALRM, &before, nullptr);
}

TEST(FdServerTest, ChildrenDoNotGetWhatIsOffered) {
  FdServer server({});
  std::array<int, 2> ends = {};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const Descriptor reading(ends[0]);
  const FdTicket ticket = server.offer(ends[1]);
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
  }
  EXPECT_EQ(::fcntl(fetch_fd(ticket, {}).get(), F_GETFL) & O_ACCMODE, O_WRONLY);  // it is served
  server.withdraw(ticket);
  pollfd end = {.fd = reading.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&end, 1, 20'000), 1) << "the child holds the other end";
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(FdServerTest, SaysThatTheProcessIsGone) {
  const auto statuses = run_forked(2, [](Group& group) {
    FdServer server({});
    std::array<FdTicket, 1> tickets;
    if (group.rank() == 0) {
      tickets = {server.offer(file_with_text())};
    }
    tickets = share(group, tickets);
    if (group.rank() == 0) {
      std::raise(SIGKILL);
    }
    for (;;) {  // until the kernel has ended it
      const auto thrown = thrown_by([&] { static_cast<void>(fetch_fd(tickets[0], {})); });
      if (thrown) {
        return thrown->code == ErrorCode::kNotAvailable ? 0 : 1;
      }
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{128 + SIGKILL, 0}));
}

}  // namespace
}  // namespace weft::test
