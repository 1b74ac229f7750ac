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
#include "hosts/message_rows.hpp"

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

ExchangeConfig node_config(ExchangeConfig config, const Domains& domains) {
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

HostsExchange::HostsExchange(
    const Group& group, const ExchangeConfig& wanted, const std::vector<std::vector<int>>& domains
)
    : settings_(wanted) {
  agree_on_config(group, settings_, {.rank = group.rank(), .num_ranks = group.num_ranks()});
  const std::string gpu = pci_address(settings_.device.index);
  network_ = std::make_unique<Network>(group, network_config(wanted), domains, gpu);
  const auto members = network_->domains().near();
  node_ = make_node_exchange(
      part_of(group, {members.begin(), members.end()}),
      node_config(wanted, network_->domains()),
      false
  );
  settings_.transport = "peer+" + network_->transport_name();
  network_->name_transport(settings_.transport);
  const Sharing sharing = sharing_of(group, settings_.device);
  node_->join(context(), members, sharing.on_gpu, kPackBlocks);
  waits_on_host_ = sharing.in_process > 1;
  const CudaDeviceGuard guard(settings_.device.index);
  own_stream_ = GpuStream(settings_.device.index);
  copies_ = GpuStream(settings_.device.index);
  caller_event_.create(context());
  copy_event_.create(context());
  last_use_.create(context());
  prepare_message_rows();
  choose_wire_memory();
  max_receives_ = std::max(network_->domains().forwarded().size(), domains.size());
  arrived_.create(kMaxTransfers * max_receives_, context());
  message_counts_.emplace(std::span(arrived_.get(), kMaxTransfers * max_receives_));
  thread_ = std::make_unique<TransferThread>(HostMap::here().cores_near(gpu));
  // Enough for 16-bit rows with weights and small scale rows, and for most plans.
  reserve(settings_.hidden * 2 + settings_.max_topk * 8 + kScaleRoom);
  if (is_direct_) {
    log(LogLevel::kInfo, "exchange: the network reads and writes the GPU's memory itself");
  }
  const uint64_t per_round = 2 * node_->plan_map().num_bytes();
  reserve_image(per_round * (1 + network_->domains().forwarded().size()) + kLeastBytes);
  group.barrier();
}

void HostsExchange::choose_wire_memory() {
  remote_writes_ = remote_writes_of(settings_.device.index, context());
  std::string obstacle = network_->parts().transport.lend_obstacle(settings_.device);
  if (obstacle.empty() && remote_writes_ == RemoteWrites::kUnknown) {
    obstacle = "this GPU does not say when it shows what a card has written";
  }
  if (obstacle.empty() && remote_writes_ == RemoteWrites::kAfterFlush && waits_on_host_) {
    obstacle =
        "what a card has written must be flushed, and ranks that share a GPU wait on the host";
  }
  is_direct_ = obstacle.empty();
  if (!is_direct_) {
    log(LogLevel::kInfo, "exchange: rows go between domains by way of host memory: {}", obstacle);
  }
}

HostsExchange::~HostsExchange() {
  thread_.reset();  // peers may still wait for what it sends
  static_cast<void>(cudaStreamSynchronize(copies_.get()));
  static_cast<void>(cudaStreamSynchronize(own_stream_.get()));
  if (pinned_staging_ != nullptr) {
    static_cast<void>(cudaHostUnregister(const_cast<std::byte*>(pinned_staging_)));
  }
}

void HostsExchange::check() {
  network_->check();
  if (!thread_->is_running()) {
    settle();
  }
  node_->check();
}

ExchangeStats HostsExchange::stats() const {
  ExchangeStats stats = network_->stats();
  const ExchangeStats in_domain = node_->stats();
  const auto members = network_->domains().near();
  for (size_t place = 0; place < members.size(); ++place) {
    stats.wait_seconds[static_cast<size_t>(members[place])] += in_domain.wait_seconds[place];
  }
  return stats;
}

Footprint HostsExchange::footprint() const {
  Footprint sum = node_->footprint();
  const Footprint whole = network_->footprint();
  sum.control_bytes += whole.control_bytes + static_cast<int64_t>(image_bytes_);
  sum.staging_bytes += whole.staging_bytes + static_cast<int64_t>(messages_.bytes + retired_bytes_);
  return sum;
}

std::unique_ptr<Executor> make_cuda_exchange(
    const Group& group, const ExchangeConfig& config, const std::vector<std::vector<int>>& domains
) {
  if (domains.size() > 1) {
    return std::make_unique<HostsExchange>(group, config, domains);
  }
  return make_node_exchange(group, config, true);
}

}  // namespace weft
