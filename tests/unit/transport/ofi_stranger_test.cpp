// SPDX-License-Identifier: Apache-2.0
// A stranger with a libfabric of his own who can connect to a rank's port: he knows neither the
// session nor a key, and nothing that he sends raises a signal or changes a byte.
#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <netinet/in.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "conformance/transport_conformance.hpp"
#include "transport/ofi/fabric/fabric.hpp"
#include "transport/ofi/fabric/queue.hpp"
#include "transport/ofi/regions.hpp"

namespace weft::ofi {
namespace {

constexpr uint64_t kWrongKey = 0xdead;

std::shared_ptr<Fabric> open_fabric() {
  Selection selection = select_provider(Group::local(1).front(), "tcp");
  return std::make_shared<Fabric>(*selection.provider, std::move(selection.info), Context{});
}

// A plain endpoint that is connected to one address.
class Stranger {
 public:
  explicit Stranger(const Bytes& victim) : fabric_(open_fabric()) {
    fi_av_attr av_attr = {};
    av_attr.type = fabric_->info()->domain_attr->av_type;
    av_attr.count = 1;
    fid_av* av = nullptr;
    fabric_->check("fi_av_open", fi_av_open(fabric_->domain(), &av_attr, &av, nullptr));
    av_.reset(av);
    fi_cq_attr cq_attr = {};
    cq_attr.format = FI_CQ_FORMAT_DATA;
    fid_cq* cq = nullptr;
    fabric_->check("fi_cq_open", fi_cq_open(fabric_->domain(), &cq_attr, &cq, nullptr));
    cq_.reset(cq);
    fid_ep* ep = nullptr;
    fabric_->check("fi_endpoint", fi_endpoint(fabric_->domain(), fabric_->info(), &ep, nullptr));
    endpoint_.reset(ep);
    fabric_->check("fi_ep_bind", fi_ep_bind(ep, &av->fid, 0));
    fabric_->check("fi_ep_bind", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
    fabric_->check("fi_enable", fi_enable(ep));
    EXPECT_EQ(fi_av_insert(av, victim.data(), 1, &target_, 0, nullptr), 1);
    memory_ = fabric_->add_memory(
        {.data = bytes_.data(), .bytes = bytes_.size()}, FI_SEND | FI_WRITE, ep
    );
    descriptor_ = fi_mr_desc(memory_.get());
    bytes_.fill(std::byte{0xff});
  }

  // Each returns 0 once it has been delivered, else libfabric's error. `help` is called meanwhile.
  template <class Help>
  int send(size_t bytes, uint64_t data, const Help& help) {
    const iovec source = {.iov_base = bytes_.data(), .iov_len = bytes};
    const fi_msg message = {
        .msg_iov = &source,
        .desc = &descriptor_,
        .iov_count = 1,
        .addr = target_,
        .context = &notes_,
        .data = data};
    const uint64_t flags = FI_COMPLETION | FI_DELIVERY_COMPLETE | FI_REMOTE_CQ_DATA;
    return finish([&] { return fi_sendmsg(endpoint_.get(), &message, flags); }, help);
  }
  template <class Help>
  int write(size_t bytes, uint64_t address, uint64_t key, uint64_t data, const Help& help) {
    const iovec source = {.iov_base = bytes_.data(), .iov_len = bytes};
    const fi_rma_iov place = {.addr = address, .len = bytes, .key = key};
    const fi_msg_rma message = {
        .msg_iov = &source,
        .desc = &descriptor_,
        .iov_count = 1,
        .addr = target_,
        .rma_iov = &place,
        .rma_iov_count = 1,
        .context = &notes_,
        .data = data};
    const uint64_t flags = FI_COMPLETION | FI_DELIVERY_COMPLETE | FI_REMOTE_CQ_DATA;
    return finish([&] { return fi_writemsg(endpoint_.get(), &message, flags); }, help);
  }

 private:
  template <class Post, class Help>
  int finish(const Post& post, const Help& help) {
    bool is_posted = false;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (std::chrono::steady_clock::now() < end) {
      const int64_t result = is_posted ? 0 : post();
      if (result != 0 && result != -FI_EAGAIN) {
        return static_cast<int>(-result);
      }
      is_posted = result == 0;
      help();
      fi_cq_data_entry entry = {};
      const int64_t count = fi_cq_read(cq_.get(), &entry, 1);
      if (count == 1) {
        return 0;
      }
      if (count == -FI_EAVAIL) {
        fi_cq_err_entry error = {};
        EXPECT_EQ(fi_cq_readerr(cq_.get(), &error, 0), 1);
        return error.err;
      }
      std::this_thread::yield();
    }
    return ETIMEDOUT;
  }

  std::shared_ptr<Fabric> fabric_;
  Owned<fid_av> av_;
  Owned<fid_cq> cq_;
  Owned<fid_ep> endpoint_;
  Owned<fid_mr> memory_;
  void* descriptor_ = nullptr;
  fi_addr_t target_ = FI_ADDR_UNSPEC;
  fi_context2 notes_ = {};
  alignas(64) std::array<std::byte, 4096> bytes_ = {};
};

class Listener final : public QueueEvents {
 public:
  void on_put(uint64_t immediate) override { puts.push_back(immediate); }
  void on_message(const Message& /*message*/) override { ++num_messages; }
  void on_failure(int /*rank*/, const char* /*call*/, int /*error*/) override {}
  void on_batch_end() override {}

  std::vector<uint64_t> puts;
  int num_messages = 0;
};

TEST(OfiStrangerTest, OnlyAWriteWithTheRightKeyIsAPut) {
  if (const auto reason = transport_obstacle("ofi:tcp", Group::local(1).front()); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  const auto fabric = open_fabric();
  Listener listener;
  Queue victim(fabric, listener, 1);
  LocalRegions regions(fabric, victim.endpoint());
  alignas(64) std::array<std::byte, 4096> bytes = {};
  Region region = {.data = bytes.data(), .ref = {.generation = 1, .bytes = bytes.size()}};
  regions.add(region);
  const uint64_t base = region.ref.cookie[kBaseWord];
  const auto help = [&] { victim.poll(); };

  Stranger stranger(victim.address());
  for (const size_t size : {size_t{0}, size_t{1}, sizeof(Message), size_t{64}}) {
    EXPECT_EQ(stranger.send(size, 7, help), 0) << size;
  }
  EXPECT_EQ(listener.num_messages, 1);  // the session is what tells strangers from ranks here
  EXPECT_EQ(listener.puts, std::vector<uint64_t>());

  // The right key makes a put of it: the test would see one.
  EXPECT_EQ(stranger.write(8, base, region.ref.cookie[kKeyWord], 9, help), 0);
  EXPECT_EQ(listener.puts, std::vector<uint64_t>{9});
  EXPECT_EQ(bytes[0], std::byte{0xff});
  bytes.fill({});

  for (const size_t size : {size_t{0}, size_t{64}}) {
    Stranger writer(victim.address());
    EXPECT_NE(writer.write(size, base, kWrongKey, 11, help), 0) << size;
    EXPECT_EQ(listener.puts, std::vector<uint64_t>{9}) << size;
    EXPECT_EQ(bytes, decltype(bytes){}) << size;
  }
}

// Returns where this process listens, as /proc/net/tcp (IPv4) or tcp6 writes it: "0100007F:1A2B".
std::vector<std::string> listening_in(const char* table_path) {
  std::set<std::string> own;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    own.insert(std::filesystem::read_symlink(entry.path(), gone).string());
  }
  std::vector<std::string> places;
  std::ifstream table(table_path);
  std::string line;
  std::getline(table, line);
  while (std::getline(table, line)) {
    std::istringstream words(line);
    std::string number, local, remote, state, inode, skipped;
    words >> number >> local >> remote >> state >> skipped >> skipped >> skipped >> skipped >>
        skipped >> inode;
    constexpr const char* kListening = "0A";
    if (state == kListening && own.count("socket:[" + inode + "]") > 0) {
      places.push_back(local);
    }
  }
  return places;
}

std::vector<Bytes> listening_places() {
  std::vector<Bytes> places;
  for (const std::string& local : listening_in("/proc/net/tcp")) {
    sockaddr_in place = {};
    place.sin_family = AF_INET;
    // A number in this machine's order of bytes.
    place.sin_addr.s_addr = static_cast<uint32_t>(std::stoul(local.substr(0, 8), nullptr, 16));
    place.sin_port = htons(static_cast<uint16_t>(std::stoul(local.substr(9), nullptr, 16)));
    const auto bytes = std::as_bytes(std::span(&place, 1));
    places.emplace_back(bytes.begin(), bytes.end());
  }
  return places;
}

// Nobody of another host can connect, unless WEFT_FABRIC_ADDRESS names a network.
TEST(OfiStrangerTest, FindsPortsOnTheLoopbackAddressOnly) {
  if (const auto reason = transport_obstacle("ofi:tcp", Group::local(1).front()); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  ::unsetenv("WEFT_FABRIC_ADDRESS");
  run_threads(2, [](Group& group) {
    const testing::Wire wire(group, {.transport = "ofi:tcp"}, 4096);
    group.barrier();
    if (wire.rank() == 0) {
      const std::vector<std::string> places = listening_in("/proc/net/tcp");
      EXPECT_GE(places.size(), 2U);
      const uint32_t loopback = htonl(INADDR_LOOPBACK);
      for (const std::string& place : places) {
        EXPECT_EQ(std::stoul(place.substr(0, 8), nullptr, 16), loopback) << place;
      }
      EXPECT_EQ(listening_in("/proc/net/tcp6"), std::vector<std::string>());
    }
    group.barrier();
  });
}

TEST(OfiStrangerTest, RaisesNoSignalOfARunningTransport) {
  if (const auto reason = transport_obstacle("ofi:tcp", Group::local(1).front()); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  run_threads(2, [](Group& group) {
    testing::Wire wire(group, {.transport = "ofi:tcp"}, 4096);
    group.barrier();
    if (wire.rank() == 0) {
      const std::vector<Bytes> places = listening_places();
      EXPECT_GE(places.size(), 2U);
      const auto help = [&] { wire.transport->progress(); };
      for (const Bytes& place : places) {
        Stranger stranger(place);
        for (const size_t data_bytes : {size_t{4}, size_t{8}}) {
          const Immediate immediate(testing::Wire::kNumSignals, data_bytes);
          for (uint32_t signal = 0; signal < testing::Wire::kNumSignals; ++signal) {
            EXPECT_EQ(stranger.send(0, immediate.encode(signal, 1000), help), 0);
          }
        }
        EXPECT_EQ(stranger.send(sizeof(Message), 1, help), 0);
        EXPECT_NE(stranger.write(64, 0, kWrongKey, 1, help), 0);
      }
    }
    group.barrier();
    for (uint32_t signal = 0; signal < testing::Wire::kNumSignals; ++signal) {
      EXPECT_EQ(wire.transport->signal_value(signal), 0U) << signal;
    }
    const uint64_t value = 42;
    const Put put = {
        .source = &value,
        .bytes = sizeof value,
        .region = wire.slot_of(wire.next()),
        .signal = 3,
        .offset = 0};
    wire.transport->put(wire.next(), std::span(&put, 1));
    wire.wait(3, 1);
    EXPECT_EQ(std::memcmp(wire.own.data, &value, sizeof value), 0);
    EXPECT_EQ(wire.transport->signal_value(3), 1U);
    group.barrier();
  });
}

}  // namespace
}  // namespace weft::ofi
