// SPDX-License-Identifier: Apache-2.0
// A queue whose progress thread comes to an end.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>

#include "transport/ofi/fabric/fabric.hpp"
#include "transport/ofi/fabric/queue.hpp"
#include "transport/ofi/progress_thread.hpp"
#include "transport/transport.hpp"

namespace weft::ofi {
namespace {

class Listener final : public QueueEvents {
 public:
  explicit Listener(bool throws = false) : throws_(throws) {}
  void on_put(uint64_t /*immediate*/) override {}
  void on_message(const Message& /*message*/) override {
    if (throws_) {
      throw std::runtime_error("a defect");
    }
  }
  void on_failure(int rank, const char* call, int /*error*/) override {
    if (rank == -1 && std::string(call) == "progress thread") {
      has_failed = true;
    }
  }
  void on_batch_end() override {}

  std::atomic<bool> has_failed = false;

 private:
  bool throws_;
};

TEST(OfiQueueTest, TellsThatItsThreadHasEnded) {
  const Group group = std::move(Group::local(1).front());
  if (!transport_obstacle("ofi:tcp", group).empty()) {
    GTEST_SKIP() << transport_obstacle("ofi:tcp", group);
  }
  Selection selection = select_provider(group, "tcp");
  const auto fabric =
      std::make_shared<Fabric>(*selection.provider, std::move(selection.info), Context{});
  Listener sending;
  Listener throwing(true);
  Queue from(fabric, sending, 1);
  Queue to(fabric, throwing, 1);
  from.connect(0, to.address());
  const ProgressThread thread(to, std::chrono::milliseconds(1), {});

  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  bool is_posted = false;
  while (!throwing.has_failed && std::chrono::steady_clock::now() < deadline) {
    is_posted = is_posted || from.send(0, Message{}) == 0;
    from.poll();
    std::this_thread::yield();
  }
  EXPECT_TRUE(is_posted);
  EXPECT_TRUE(throwing.has_failed);
  EXPECT_FALSE(sending.has_failed);
  EXPECT_EQ(to.poll(), 0U);
}

void own_handler(int /*signal*/) {}

TEST(OfiQueueTest, LeavesTheProgramsSignalHandlers) {
  for (const int signal : {SIGINT, SIGTERM, SIGSEGV, SIGBUS}) {
    std::signal(signal, own_handler);
  }
  const Group group = std::move(Group::local(1).front());
  int num_opened = 0;
  for (const std::string provider : {"tcp", "shm"}) {
    if (transport_obstacle("ofi:" + provider, group).empty()) {
      Selection selection = select_provider(group, provider);
      const auto fabric =
          std::make_shared<Fabric>(*selection.provider, std::move(selection.info), Context{});
      Listener listener;
      const Queue queue(fabric, listener, 1);
      ++num_opened;
    }
    for (const int signal : {SIGINT, SIGTERM, SIGSEGV, SIGBUS}) {
      struct sigaction now = {};
      ASSERT_EQ(::sigaction(signal, nullptr, &now), 0);
      EXPECT_EQ(now.sa_handler, own_handler) << "signal " << signal << " after " << provider;
    }
  }
  for (const int signal : {SIGINT, SIGTERM, SIGSEGV, SIGBUS}) {
    std::signal(signal, SIG_DFL);
  }
  if (num_opened == 0) {
    GTEST_SKIP() << transport_obstacle("ofi:tcp", group);
  }
}

// Each endpoint of provider "shm" has a file of this name, with a number that grows.
std::filesystem::path file_of_endpoint(int number) {
  return fmt::format("/dev/shm/{}:{}:{}", ::getpid(), ::getuid(), number);
}

TEST(OfiQueueTest, OpensBesideNamesThatKilledProcessesHaveLeft) {
  const Group group = std::move(Group::local(1).front());
  if (!transport_obstacle("ofi:shm", group).empty()) {
    GTEST_SKIP() << transport_obstacle("ofi:shm", group);
  }
  Selection selection = select_provider(group, "shm");
  const auto fabric =
      std::make_shared<Fabric>(*selection.provider, std::move(selection.info), Context{});
  Listener listener;
  auto first = std::make_unique<Queue>(fabric, listener, 1);
  int number = 0;
  while (number < 100 && !std::filesystem::exists(file_of_endpoint(number))) {
    ++number;
  }
  ASSERT_LT(number, 100) << "provider shm has other names here";
  const std::filesystem::path kept = testing::TempDir() + "endpoint";
  std::filesystem::copy_file(file_of_endpoint(number), kept);
  first.reset();
  // Leaves files as if processes of this number had been killed.
  for (int left = 1; left <= 3; ++left) {
    std::filesystem::copy_file(kept, file_of_endpoint(number + left));
  }
  EXPECT_NO_THROW(Queue(fabric, listener, 1));
  for (int left = 1; left <= 3; ++left) {
    std::filesystem::remove(file_of_endpoint(number + left));
  }
  std::filesystem::remove(kept);
}

}  // namespace
}  // namespace weft::ofi
