// SPDX-License-Identifier: Apache-2.0
// Set-up: one provider for all ranks, queues, and who is where.
#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "core/log.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"
#include "group/tcp/frame.hpp"
#include "group/topology.hpp"
#include "transport/common.hpp"
#include "transport/mapped/memory.hpp"
#include "transport/ofi/fabric/fabric.hpp"
#include "transport/ofi/ofi.hpp"
#include "transport/ofi/ofi_transport.hpp"

namespace weft::ofi {
namespace {

// The bytes of one write come in for longer than a signal takes to cross shared memory, and to wake
// for each part of them costs more than to poll; a thread that polls lets others run in between.
constexpr int kSpins = 50;

// How a rank introduces itself; the addresses of its queues follow in blocks of their own.
struct Hello {
  uint64_t num_signals = 0;
  uint64_t session = 0;  // that of the first member counts
  uint64_t rxm_buffer_bytes = 0;
  ProcessPlace place;
};

}  // namespace

OfiTransport::OfiTransport(
    const Group& group,
    uint32_t num_signals,
    const TransportOptions& options,
    std::string_view kind,
    bool shares_memory
)
    : context_(context_of(group, shares_memory ? "domains" : "ofi")),
      shares_memory_(shares_memory),
      num_signals_(num_signals),
      timeout_(options.timeout),
      spin_(kSpins * spin_time(group)),
      session_(random_value<uint64_t>()),
      addresses_(static_cast<size_t>(group.num_ranks())) {
  open(group, kind, options);
  const Hello hello = {
      .num_signals = num_signals_,
      .session = session_,
      .rxm_buffer_bytes = api().rxm_buffer_bytes,
      .place = this_place()};
  const auto bytes = std::as_bytes(std::span(&hello, 1));
  std::vector<Bytes> own = {Bytes(bytes.begin(), bytes.end())};
  for (const auto& queue : queues_) {
    own.push_back(queue->address());
  }
  const std::vector<Bytes> hellos = group.all_gather(pack_blocks(own));
  agree(group, [&] {
    bool is_first = true;
    for (int rank = 0; rank < context_.num_ranks; ++rank) {
      const auto at = static_cast<size_t>(rank);
      if (!options.has(rank)) {
        peers_->set_absent(rank);
        continue;
      }
      connect(rank, hellos[at], group.topology().host_of[at], std::exchange(is_first, false));
    }
    closing_ = fabric_->provider().is_local ? Closing::join(session_) : nullptr;
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
    const Group& group, std::string_view kind, const TransportOptions& options
) {
  Selection selection = select_provider(group, kind, options);
  const Topology& topology = group.topology();
  const auto at = static_cast<size_t>(group.rank());
  const bool is_loopback = !shares_memory_ || topology.one_process;
  std::vector<int> neighbours = {group.rank()};
  if (shares_memory_) {
    neighbours = topology.domains[static_cast<size_t>(topology.domain_of[at])];
    std::erase_if(neighbours, [&](int rank) { return !options.has(rank); });
  }
  neighbours_ = std::make_unique<MappedTransport>(
      is_loopback ? make_loopback_memory() : make_shm_memory(), group, num_signals_, neighbours
  );
  own_ = neighbours_->signals();
  agree(group, [&] {
    fabric_ = std::make_shared<Fabric>(*selection.provider, std::move(selection.info), context_);
    log(LogLevel::kDebug, "open(ofi): provider {}, {} queues", fabric_->name(), selection.num_queues
    );
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
    peers_ = std::make_unique<Peers>(context_.num_ranks, selection.num_queues);
    for (int rank = 0; rank < context_.num_ranks; ++rank) {
      remote_.push_back(std::make_unique<RemoteRegions>());
    }
    QueueEvents& events = *this;
    for (uint32_t i = 0; i < selection.num_queues; ++i) {
      queues_.push_back(std::make_unique<Queue>(fabric_, events, context_.num_ranks));
    }
    local_ = std::make_unique<LocalRegions>(fabric_, queues_.front()->endpoint());
  });
}

// Is called for the first rank first, whose session counts.
void OfiTransport::connect(int rank, const Bytes& packed, const std::string& host, bool is_first) {
  const auto blocks = unpack_blocks(packed, 1 + static_cast<int>(queues_.size()));
  const Bytes first = blocks ? blocks->front() : Bytes();
  const auto hello = block_value<Hello>(first, static_cast<size_t>(rank), context_);
  check_same_signals(context_, rank, hello.num_signals, num_signals_);
  WEFT_CHECK_ARG(
      context_,
      hello.rxm_buffer_bytes == api().rxm_buffer_bytes || !fabric_->name().ends_with("ofi_rxm"),
      "connect: FI_OFI_RXM_BUFFER_SIZE is {} on rank {} (this rank: {}; 0: not set): libfabric's "
      "variables must be the same on all ranks",
      hello.rxm_buffer_bytes,
      rank,
      api().rxm_buffer_bytes
  );
  session_ = is_first ? hello.session : session_;
  if (!is_remote(rank)) {
    return;
  }
  const ProcessPlace here = this_place();
  if (hello.place.shares_pids(here) && host == this_host()) {
    if (hello.place.pid == here.pid) {
      peers_->set_same_process(rank);
    } else {
      peers_->watch(rank, static_cast<int32_t>(hello.place.pid));
    }
  }
  for (size_t i = 0; i < queues_.size(); ++i) {
    const Bytes& address = (*blocks)[1 + i];
    queues_[i]->connect(rank, address);
    addresses_[static_cast<size_t>(rank)].push_back(address);
  }
}

void OfiTransport::greet_all() {
  const Message ping = message(MessageKind::kPing);
  for (const auto& queue : queues_) {
    const auto pending = std::make_shared<std::atomic<uint32_t>>(0);
    for (int rank = 0; rank < context_.num_ranks; ++rank) {
      if (is_remote(rank) && !peers_->is_gone(rank)) {
        require(send({*queue, rank}, ping, until(), pending), rank);
      }
    }
    require(await({*queue, context_.rank}, pending), context_.rank);
  }
}

std::shared_ptr<Closing> Closing::join(uint64_t session) {
  static std::mutex mutex;
  static std::map<uint64_t, std::weak_ptr<Closing>> sessions;
  const std::lock_guard lock(mutex);
  std::erase_if(sessions, [](const auto& entry) { return entry.second.expired(); });
  std::shared_ptr<Closing> closing = sessions[session].lock();
  if (closing == nullptr) {
    sessions[session] = closing = std::make_shared<Closing>();
  }
  return closing;
}

void Closing::keep(std::vector<std::unique_ptr<Queue>> queues) {
  const std::lock_guard lock(mutex_);
  std::ranges::move(queues, std::back_inserter(queues_));
}

}  // namespace weft::ofi

namespace weft {

std::unique_ptr<Transport> make_ofi(
    const Group& group, uint32_t num_signals, const TransportOptions& options, std::string_view kind
) {
  return std::make_unique<ofi::OfiTransport>(group, num_signals, options, kind, false);
}

std::unique_ptr<Transport> make_domains(
    const Group& group, uint32_t num_signals, const TransportOptions& options, std::string_view kind
) {
  return std::make_unique<ofi::OfiTransport>(group, num_signals, options, kind, true);
}

}  // namespace weft
