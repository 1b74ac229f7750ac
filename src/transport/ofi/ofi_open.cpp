// SPDX-License-Identifier: Apache-2.0
// Set-up: one provider for all ranks, queues, and who is where.
#include <algorithm>
#include <cstring>
#include <map>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "group/control_plane.hpp"
#include "group/topology.hpp"
#include "transport/agree.hpp"
#include "transport/common.hpp"
#include "transport/mapped/memory.hpp"
#include "transport/ofi/fabric/card.hpp"
#include "transport/ofi/ofi.hpp"
#include "transport/ofi/ofi_transport.hpp"

namespace weft::ofi {
namespace {

constexpr uint32_t kWireVersion = 1;

// Bytes of one write come in for longer than a signal takes to cross shared memory, and to be woken
// for each part of them costs more than to look on; who looks lets others run in between.
constexpr int kSpins = 50;

// How a rank introduces itself; the addresses of its queues follow, each after its length.
struct Hello {
  uint32_t version = kWireVersion;
  uint32_t num_queues = 0;
  uint64_t num_signals = 0;
  uint64_t session = 0;        // rank 0's counts
  uint64_t process_space = 0;  // in which the number of its process means something
  int32_t pid = 0;
  uint32_t unused = 0;
};

uint64_t process_space() {
  struct stat space = {};
  return ::stat("/proc/self/ns/pid", &space) == 0 ? space.st_ino : 0;
}

uint64_t random_number() {
  uint64_t number = 0;
  WEFT_SYS(Context{}, ErrorCode::kNotAvailable, ::getrandom(&number, sizeof number, 0));
  return number;
}

}  // namespace

OfiTransport::OfiTransport(
    const Group& group,
    Neighbours neighbours,
    uint32_t num_signals,
    const TransportOptions& options,
    std::string_view kind
)
    : context_(context_of(group, neighbours.transport)),
      hides_memory_(neighbours.hides_memory),
      rank_(group.rank()),
      num_ranks_(group.num_ranks()),
      num_signals_(num_signals),
      timeout_(options.timeout),
      spin_(kSpins * spin_time(group)),
      session_(random_number()),
      addresses_(static_cast<size_t>(num_ranks_)) {
  open(group, std::move(neighbours), kind, options.device);
  const std::vector<Bytes> hellos = group.all_gather(make_hello());
  agree(group, [&] {
    session_ = block_value<Hello>(hellos.front(), 0, context_).session;
    closing_ = fabric_->provider().is_local ? Closing::join(session_) : nullptr;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const auto at = static_cast<size_t>(rank);
      connect(rank, hellos[at], group.topology().host_of[at]);
    }
    const std::vector<int> cores = cores_for(*fabric_->info(), options.device);
    for (const auto& queue : queues_) {
      threads_.push_back(std::make_unique<ProgressThread>(*queue, spin_, cores));
    }
  });
  if (closing_ != nullptr) {
    agree(group, [&] { greet_all(); });
  }
}

void OfiTransport::open(
    const Group& group, Neighbours neighbours, std::string_view kind, std::string_view device
) {
  Selection selection = select_provider(group, kind, device);
  neighbours_ = std::make_unique<MappedTransport>(
      std::move(neighbours.memory), group, num_signals_, neighbours.ranks
  );
  own_ = neighbours_->signals();
  agree(group, [&] {
    fabric_ = std::make_shared<Fabric>(*selection.provider, std::move(selection.info), context_);
    if (!selection.gpu_obstacle.empty()) {
      fabric_->refuse_gpu_memory(selection.gpu_obstacle);
    }
    immediate_ =
        std::make_unique<Immediate>(num_signals_, fabric_->info()->domain_attr->cq_data_size);
    WEFT_CHECK(
        context_,
        immediate_->max_amount() > 0,
        ErrorCode::kNotAvailable,
        "open(ofi): {} signals do not fit into the {} B that provider {} carries with a write",
        num_signals_,
        fabric_->info()->domain_attr->cq_data_size,
        fabric_->name()
    );
    peers_ = std::make_unique<Peers>(num_ranks_, selection.num_queues);
    for (int rank = 0; rank < num_ranks_; ++rank) {
      remote_.push_back(std::make_unique<RemoteRegions>());
    }
    QueueEvents& events = *this;
    for (uint32_t i = 0; i < selection.num_queues; ++i) {
      queues_.push_back(std::make_unique<Queue>(fabric_, events, num_ranks_));
    }
    local_ = std::make_unique<LocalRegions>(fabric_, queues_.front()->endpoint());
  });
}

Bytes OfiTransport::make_hello() const {
  const Hello hello = {
      .num_queues = static_cast<uint32_t>(queues_.size()),
      .num_signals = num_signals_,
      .session = session_,
      .process_space = process_space(),
      .pid = ::getpid()};
  Bytes block;
  const auto append = [&](const void* data, size_t bytes) {
    const size_t at = block.size();
    block.resize(at + bytes);
    std::memcpy(block.data() + at, data, bytes);
  };
  append(&hello, sizeof hello);
  for (const auto& queue : queues_) {
    const Bytes address = queue->address();
    const auto length = static_cast<uint32_t>(address.size());
    append(&length, sizeof length);
    append(address.data(), address.size());
  }
  return block;
}

void OfiTransport::connect(int rank, const Bytes& block, const std::string& host) {
  const auto hello = block_value<Hello>(block, static_cast<size_t>(rank), context_);
  WEFT_CHECK_ARG(
      context_,
      hello.version == kWireVersion,
      "connect: rank {} speaks version {} of transport ofi (this rank {})",
      rank,
      hello.version,
      kWireVersion
  );
  check_same_signals(context_, rank, hello.num_signals, num_signals_);
  if (!is_remote(rank)) {
    return;
  }
  if (hello.pid == ::getpid() && hello.process_space == process_space() && host == this_host()) {
    peers_->set_same_process(rank);
  } else if (hello.process_space == process_space() && host == this_host()) {
    peers_->watch(rank, hello.pid);
  }
  size_t at = sizeof hello;
  for (size_t i = 0; i < queues_.size(); ++i) {
    uint32_t length = 0;
    WEFT_ASSERT(at + sizeof length <= block.size());
    std::memcpy(&length, block.data() + at, sizeof length);
    at += sizeof length;
    WEFT_ASSERT(at + length <= block.size());
    const auto begin = block.begin() + static_cast<std::ptrdiff_t>(at);
    const Bytes address(begin, begin + length);
    queues_[i]->connect(rank, address);
    addresses_[static_cast<size_t>(rank)].push_back(address);
    at += length;
  }
}

void OfiTransport::greet_all() {
  const Message ping = message(MessageKind::kPing);
  for (const auto& queue : queues_) {
    const auto pending = std::make_shared<std::atomic<uint32_t>>(0);
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (is_remote(rank)) {
        require(send({*queue, rank}, ping, until(), pending), rank);
      }
    }
    require(await({*queue, rank_}, pending), rank_);
  }
}

std::shared_ptr<Closing> Closing::join(uint64_t session) {
  static std::mutex mutex;
  static std::map<uint64_t, std::weak_ptr<Closing>> sessions;
  const std::lock_guard lock(mutex);
  std::erase_if(sessions, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Closing>& entry = sessions[session];
  std::shared_ptr<Closing> closing = entry.lock();
  if (closing == nullptr) {
    closing = std::make_shared<Closing>();
    entry = closing;
  }
  return closing;
}

void Closing::keep(std::vector<std::unique_ptr<Queue>> queues) {
  const std::lock_guard lock(mutex_);
  for (auto& queue : queues) {
    queues_.push_back(std::move(queue));
  }
}

}  // namespace weft::ofi

namespace weft {

std::unique_ptr<Transport> make_ofi(
    const Group& group, uint32_t num_signals, const TransportOptions& options, std::string_view kind
) {
  ofi::Neighbours neighbours = {
      .transport = "ofi",
      .memory = make_loopback_memory(),
      .ranks = {group.rank()},
      .hides_memory = true};
  return std::make_unique<ofi::OfiTransport>(
      group, std::move(neighbours), num_signals, options, kind
  );
}

std::unique_ptr<Transport> make_domains(
    const Group& group, uint32_t num_signals, const TransportOptions& options, std::string_view kind
) {
  const Topology& topology = group.topology();
  const int domain = topology.domain_of[static_cast<size_t>(group.rank())];
  ofi::Neighbours neighbours = {
      .transport = "domains",
      .memory = topology.one_process ? make_loopback_memory() : make_shm_memory(),
      .ranks = topology.domains[static_cast<size_t>(domain)]};
  return std::make_unique<ofi::OfiTransport>(
      group, std::move(neighbours), num_signals, options, kind
  );
}

}  // namespace weft
