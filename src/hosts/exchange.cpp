// SPDX-License-Identifier: Apache-2.0
// Sets the CUDA executor of a group of several domains up and answers for it.
#include "hosts/exchange.hpp"

#include <algorithm>
#include <array>

#include "call/config_agreement.hpp"
#include "core/host_map.hpp"
#include "core/log.hpp"
#include "cuda/transport/gpu_identity.hpp"
#include "group/control_plane.hpp"

namespace weft {
namespace {

constexpr int kPlanThreads = 4;
constexpr size_t kMaxTransfers = 2;  // of a call

ExchangeConfig network_config(ExchangeConfig config) {
  config.device = {};
  // It makes plans and moves no rows: more threads than records would keep busy are in the way.
  config.num_threads = config.num_threads > 0 ? config.num_threads : kPlanThreads;
  config.transport = config.transport == "peer" ? "auto" : config.transport;
  return config;
}

ExchangeConfig near_config(ExchangeConfig config, const Domains& domains) {
  const int per_rank = config.num_experts / domains.num_ranks();
  config.num_experts = per_rank * static_cast<int>(domains.near().size());
  config.transport = "auto";
  config.copy_engines = false;
  return config;
}

// "0000:17:00.0"; empty: the driver does not say.
std::string pci_address(int device) {
  std::array<char, 32> text = {};
  const int length = static_cast<int>(text.size());
  if (cudaDeviceGetPCIBusId(text.data(), length, device) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
  return text.data();
}

// Ranks of the group on this rank's GPU, itself included. Also those of other domains, whose
// kernels wait for this rank no less, if by way of the network.
struct Sharing {
  int on_gpu = 0;
  int in_process = 0;  // of these
};

Sharing sharing_of(const Group& group, const Device& device) {
  const std::vector<GpuIdentity> gpus = gather_identities(group, device.index);
  const GpuIdentity& own = gpus[static_cast<size_t>(group.rank())];
  Sharing sharing;
  for (const GpuIdentity& gpu : gpus) {
    sharing.on_gpu += own.is_same_gpu(gpu) ? 1 : 0;
    sharing.in_process += own.is_same_gpu(gpu) && own.is_same_process(gpu) ? 1 : 0;
  }
  return sharing;
}

}  // namespace

DomainsCudaExchange::DomainsCudaExchange(
    const Group& group, const ExchangeConfig& wanted, const std::vector<std::vector<int>>& domains
)
    : settings(wanted) {
  agree_on_config(group, settings, {.rank = group.rank(), .num_ranks = group.num_ranks()});
  network = std::make_unique<Network>(
      group, network_config(wanted), domains, pci_address(settings.device.index)
  );
  const auto members = network->domains().near();
  near = std::make_unique<CudaExchange>(
      part_of(group, {members.begin(), members.end()}),
      near_config(wanted, network->domains()),
      false
  );
  settings.transport = "peer+" + network->transport_name();
  network->name_transport(settings.transport);
  const Sharing sharing = sharing_of(group, settings.device);
  near->join_domains(network->context(), members, sharing.on_gpu, kPackBlocks);
  waits_on_host = sharing.in_process > 1;
  const CudaDeviceGuard guard(settings.device.index);
  own_stream = GpuStream(settings.device.index);
  copies = GpuStream(settings.device.index);
  caller_event.create(network->context());
  copy_event.create(network->context());
  last_use.create(network->context());
  prepare_crossing_rows();
  choose_wire_memory();
  max_receives = std::max(network->domains().carried().size(), domains.size());
  arrived.create(kMaxTransfers * max_receives, network->context());
  message_counts.emplace(std::span(arrived.get(), kMaxTransfers * max_receives));
  thread =
      std::make_unique<TransferThread>(HostMap::here().cores_near(pci_address(settings.device.index)
      ));
  // Enough for 16-bit rows with weights and small scale rows, and for most plans.
  reserve(settings.hidden * 2 + settings.max_topk * 8 + kScaleRoom);
  if (is_direct) {
    log(LogLevel::kInfo, "exchange: the network reads and writes the GPU's memory itself");
  }
  const uint64_t per_round = 2 * near->plan_map.num_bytes();
  reserve_image(per_round * (1 + network->domains().carried().size()) + kLeastBytes);
  group.barrier();
}

void DomainsCudaExchange::choose_wire_memory() {
  remote_writes = remote_writes_of(settings.device.index, network->context());
  std::string obstacle = network->parts().transport.lend_obstacle(settings.device);
  if (obstacle.empty() && remote_writes == RemoteWrites::kUnknown) {
    obstacle = "this GPU does not say when it shows what a card has written";
  }
  if (obstacle.empty() && remote_writes == RemoteWrites::kAfterFlush && waits_on_host) {
    obstacle =
        "what a card has written must be flushed, and ranks that share a GPU wait on the host";
  }
  is_direct = obstacle.empty();
  if (!is_direct) {
    log(LogLevel::kInfo, "exchange: rows cross by way of host memory: {}", obstacle);
  }
}

DomainsCudaExchange::~DomainsCudaExchange() {
  thread.reset();  // peers may still wait for what it sends
  static_cast<void>(cudaStreamSynchronize(copies.get()));
  static_cast<void>(cudaStreamSynchronize(own_stream.get()));
  if (pinned_staging != nullptr) {
    static_cast<void>(cudaHostUnregister(const_cast<std::byte*>(pinned_staging)));
  }
}

void DomainsCudaExchange::check() {
  network->check();
  if (!thread->is_running()) {
    settle();
  }
  near->check();
}

ExchangeStats DomainsCudaExchange::stats() const {
  ExchangeStats stats = network->stats();
  const ExchangeStats in_domain = near->stats();
  const auto members = network->domains().near();
  for (size_t place = 0; place < members.size(); ++place) {
    stats.wait_seconds[static_cast<size_t>(members[place])] += in_domain.wait_seconds[place];
  }
  return stats;
}

Footprint DomainsCudaExchange::footprint() const {
  Footprint sum = near->footprint();
  const Footprint whole = network->footprint();
  sum.control_bytes += whole.control_bytes + static_cast<int64_t>(image_bytes);
  sum.staging_bytes += whole.staging_bytes + static_cast<int64_t>(messages.bytes + retired_bytes);
  return sum;
}

std::unique_ptr<Exchange::State> make_cuda_exchange(
    const Group& group, const ExchangeConfig& config, const std::vector<std::vector<int>>& domains
) {
  if (domains.size() > 1) {
    return std::make_unique<DomainsCudaExchange>(group, config, domains);
  }
  return std::make_unique<CudaExchange>(group, config, true);
}

}  // namespace weft
