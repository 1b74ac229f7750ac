// SPDX-License-Identifier: Apache-2.0
// Sets the CUDA executor of a group of several domains up and answers for it.
#include "hosts/exchange.hpp"

#include <algorithm>
#include <array>

#include "call/validate.hpp"
#include "core/host_map.hpp"
#include "core/log.hpp"
#include "core/size_class.hpp"
#include "cuda/transport/peer_memory.hpp"
#include "group/control_plane.hpp"
#include "hosts/message_rows.hpp"
#include "hosts/surviving.hpp"

namespace weft {
namespace {

constexpr int kPlanThreads = 4;
constexpr size_t kMaxTransfers = 2;  // of a call

ExchangeConfig network_config(ExchangeConfig config) {
  config.device = {};
  // The network makes plans and moves no rows: more threads than records keep busy are in the way.
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

void add(std::vector<double>& sums, std::span<const double> more) {
  for (size_t i = 0; i < more.size(); ++i) {
    sums[i] += more[i];
  }
}

// Returns such as "0000:17:00.0"; empty: the driver does not say.
std::string pci_address(int device) {
  std::array<char, 32> text = {};
  const int length = static_cast<int>(text.size());
  if (cudaDeviceGetPCIBusId(text.data(), length, device) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
  return text.data();
}

}  // namespace

HostsExchange::HostsExchange(
    const Group& group,
    const ExchangeConfig& wanted,
    const std::vector<std::vector<int>>& domains,
    const std::vector<int>& lost
)
    : settings_(wanted) {
  agree_on_config(group, settings_);
  const std::string gpu = pci_address(settings_.device.index);
  network_ = std::make_unique<Network>(
      group,
      network_config(wanted),
      CpuPlace{
          .domains = domains,
          .is_for_gpu = true,
          .gpu = gpu,
          .lost = lost,
          .look = [this] { check_stopped(); }}
  );
  const auto members = network_->domains().near();
  const Group domain = part_of(group, {members.begin(), members.end()});
  node_ = std::make_unique<CudaExchange>(domain, node_config(wanted, network_->domains()), false);
  settings_.transport = "peer+" + network_->transport_name();
  network_->name_transport(settings_.transport);
  // Lists the ranks on this rank's GPU, itself included. Also those of other domains, whose kernels
  // wait for this rank no less, if by way of the network.
  std::vector<GpuIdentity> sharing = gather_identities(group, settings_.device.index);
  const GpuIdentity own = sharing[static_cast<size_t>(group.rank())];
  for (const int rank : lost) {
    sharing[static_cast<size_t>(rank)] = {};
  }
  std::erase_if(sharing, [&](const GpuIdentity& one) { return !own.is_same_gpu(one); });
  node_->join(context(), members, static_cast<int>(sharing.size()), kPackBlocks);
  waits_on_host_ = std::ranges::count_if(sharing, [&](const GpuIdentity& one) {
                     return own.is_same_process(one);
                   }) > 1;
  const CudaDeviceGuard guard(settings_.device.index);
  own_stream_ = GpuStream(settings_.device.index);
  copies_ = GpuStream(settings_.device.index);
  caller_event_.create(context());
  copy_event_.create(context());
  last_use_.create(context());
  prepare_message_rows();
  choose_wire_memory();
  max_receives_ = std::max(network_->domains().forwarded().size(), domains.size());
  first_round_ = node_->ended_calls().value().last;
  arrived_.create(kMaxTransfers * max_receives_, context());
  has_failed_.create(1, context());
  message_counts_.emplace(std::span(arrived_.get(), kMaxTransfers * max_receives_));
  thread_ = std::make_unique<TransferThread>(HostMap::here().cores_near(gpu));
  // Reserves enough for 16-bit rows with weights and small scale rows, and for most plans.
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
  if (is_stopped_) {
    static_cast<void>(refusal_of([this] { node_->check(); }));  // why calls failed is known
  }
  static_cast<void>(cudaStreamSynchronize(copies_.get()));
  static_cast<void>(cudaStreamSynchronize(own_stream_.get()));
  if (pinned_staging_ != nullptr) {
    static_cast<void>(cudaHostUnregister(const_cast<std::byte*>(pinned_staging_)));
  }
}

void HostsExchange::check() {
  network_->check();
  check_stopped();
  if (!thread_->is_running() || has_failed()) {
    settle();
  }
  node_->check();
}

ExchangeStats HostsExchange::stats() const {
  ExchangeStats stats = network_->stats();
  const ExchangeStats in_domain = node_->stats();
  stats.host_wait_seconds += in_domain.host_wait_seconds;
  const auto members = network_->domains().near();
  for (size_t place = 0; place < members.size(); ++place) {
    stats.wait_seconds[static_cast<size_t>(members[place])] += in_domain.wait_seconds[place];
  }
  add(stats.wait_seconds, earlier_waits_);
  return stats;
}

void HostsExchange::add_waits(int64_t* sums, int64_t times, const CallOptions& call) {
  const cudaStream_t stream = stream_of(call);
  node_->add_waits(sums, times, {.stream = stream});
  std::vector<double> seconds = network_->stats().wait_seconds;
  add(seconds, earlier_waits_);
  const auto num_ranks = static_cast<int32_t>(seconds.size());
  const CudaDeviceGuard guard(settings_.device.index);
  for (int32_t first = 0; first < num_ranks; first += kMaxDomainRanks) {
    WaitSums waits = {.sums = sums, .times = times};
    waits.count = std::min<int32_t>(num_ranks - first, kMaxDomainRanks);
    for (int32_t place = 0; place < waits.count; ++place) {
      const double waited = seconds[static_cast<size_t>(first + place)];
      waits.ranks[place] = first + place;
      waits.host_us[place] = static_cast<int64_t>(waited * 1e6);
    }
    launch_add_waits(waits, stream);
  }
  if (call.stream == nullptr) {
    wait_for(stream);
  }
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
  if (domains.size() == 1) {
    return std::make_unique<CudaExchange>(group, config, true);
  }
  if (goes_on_without_lost(config.on_peer_loss)) {
    return std::make_unique<SurvivingHosts>(group, config, domains);
  }
  return std::make_unique<HostsExchange>(group, config, domains);
}

// --- the memory that calls share: how much, and how it grows ---

void HostsExchange::make_room(Call call, int64_t bytes_of_token, cudaStream_t stream) {
  if (bytes_of_token <= token_bytes_) {
    return;
  }
  call.token_room = bytes_of_token;
  network_->run_call(
      call.op,
      [] { return 0; },
      [&](int /*nothing*/) {
        wait_for(stream);
        const std::vector<CallWord> to(
            static_cast<size_t>(context().num_ranks), network_->new_word(call)
        );
        static_cast<void>(network_->swap(to));
      }
  );
  reserve(bytes_of_token);  // no rank launches before the handshake of the call itself
}

// Makes room for as many tokens as each rank may ever have, all of them inter-node tokens.
void HostsExchange::reserve(int64_t bytes_of_token) {
  const Domains& domains = network_->domains();
  token_bytes_ = bytes_of_token;
  room_ = room_of_calls(
      {.num_others = static_cast<uint64_t>(domains.num_domains()) - 1,
       .num_forwarded = domains.forwarded().size(),
       .max_tokens = settings_.max_tokens,
       .max_topk = settings_.max_topk,
       .token_bytes = token_bytes_}
  );
  reserve_staging(room_.staging);
  reserve_messages(room_.messages);
  retired_.emplace_back(std::move(done_));
  retired_.push_back(std::make_shared<Buffer>(std::move(work_)));
  done_ = std::make_unique<PinnedBuffer<uint32_t>>();
  done_->create(room_.num_messages, context());
  work_ = take_bytes(room_.work);
}

// If refused, falls back to the host's memory for good: it would be refused again.
std::optional<WireMemory> HostsExchange::take_direct(std::string_view what, uint64_t bytes) {
  if (!is_direct_) {
    return {};
  }
  try {
    // The memory is not cleared: that would be one more write to wait for.
    std::byte* data = nullptr;
    WEFT_CUDA(context(), cudaMalloc(reinterpret_cast<void**>(&data), bytes));
    const std::shared_ptr<const void> owner(data, [](void* at) {
      static_cast<void>(cudaFree(at));
    });
    const Region region = network_->parts().transport.lend(data, bytes, settings_.device);
    return WireMemory{.data = data, .bytes = bytes, .lent = region.ref, .owner = owner};
  } catch (const Error& error) {
    log(LogLevel::kInfo, "exchange: {} by way of host memory: {}", what, error.what());
    is_direct_ = false;
    return {};
  }
}

void HostsExchange::retire(WireMemory& memory) {
  if (memory.is_lent()) {
    network_->parts().transport.release(memory.lent);
  }
  retired_bytes_ += memory.bytes;
  retired_.push_back(std::move(memory.owner));
  memory = {};
}

void HostsExchange::reserve_messages(uint64_t bytes) {
  retire(messages_);
  if (auto direct = take_direct("messages", bytes)) {
    messages_ = std::move(*direct);
    return;
  }
  const auto buffer = std::make_shared<PinnedBuffer<std::byte>>();
  buffer->create(bytes, context());
  messages_ = {.data = buffer->get(), .bytes = bytes, .lent = {}, .owner = buffer};
}

// Pins host memory: else copies out of it would not wait in the stream for what comes there.
void HostsExchange::reserve_staging(uint64_t bytes) {
  if (direct_staging_.is_lent()) {
    retire(direct_staging_);
    network_->use_as_staging(nullptr, {});
  }
  if (auto direct = take_direct("staging", std::max(bytes, kLeastBytes))) {
    direct_staging_ = std::move(*direct);
    network_->use_as_staging(direct_staging_.data, direct_staging_.lent);
    return;
  }
  if (pinned_staging_ != nullptr) {
    WEFT_CUDA(context(), cudaHostUnregister(const_cast<std::byte*>(pinned_staging_)));
    pinned_staging_ = nullptr;
  }
  network_->reserve_staging(std::max(bytes, kLeastBytes));
  std::byte* const staging = network_->staging();
  const uint64_t size = network_->staging_bytes();
  WEFT_CUDA(context(), cudaHostRegister(staging, size, cudaHostRegisterPortable));
  pinned_staging_ = staging;
}

void HostsExchange::reserve_image(uint64_t bytes) {
  if (bytes > image_bytes_) {
    image_bytes_ = size_class(std::max(bytes, kLeastBytes));
    retired_.emplace_back(std::move(image_));
    image_ = std::make_unique<PinnedBuffer<std::byte>>();
    image_->create(image_bytes_, context());
  }
}

}  // namespace weft
