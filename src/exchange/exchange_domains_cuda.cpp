// SPDX-License-Identifier: Apache-2.0
// Sets the CUDA executor of a group of several domains up, owns what its calls use and answers for
// it.
#include "exchange/exchange_domains_cuda.hpp"

#include <algorithm>
#include <array>

#include "core/host_map.hpp"
#include "core/log.hpp"
#include "exchange/buffer_pool.hpp"
#include "exchange/config_agreement.hpp"
#include "group/control_plane.hpp"
#include "transport/peer/gpu_identity.hpp"

namespace weft {
namespace {

constexpr uint64_t kLeastBytes = uint64_t{1} << 20U;  // pages of its own for what is pinned
constexpr int kPlanThreads = 4;
constexpr int64_t kSmallScaleBytes = 256;
constexpr int64_t kGrowing = -1;     // stands for the number of a plan in words
constexpr size_t kMaxTransfers = 2;  // of a call

ExchangeConfig far_config(ExchangeConfig config) {
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
  far = std::make_unique<CpuExchange>(
      group, far_config(wanted), domains, pci_address(settings.device.index)
  );
  const auto members = far->domains->near();
  near = std::make_unique<CudaExchange>(
      part_of(group, {members.begin(), members.end()}), near_config(wanted, *far->domains), false
  );
  settings.transport = "peer+" + far->settings.transport;
  far->context.transport = settings.transport;
  const Sharing sharing = sharing_of(group, settings.device);
  near->join_domains(far->context, members, sharing.on_gpu, kPackBlocks);
  waits_on_host = sharing.in_process > 1;
  const CudaDeviceGuard guard(settings.device.index);
  own_stream = GpuStream(settings.device.index);
  copies = GpuStream(settings.device.index);
  caller_event.create(far->context);
  copy_event.create(far->context);
  last_use.create(far->context);
  prepare_crossing_rows();
  max_receives = std::max(far->domains->carried().size(), domains.size());
  arrived.create(kMaxTransfers * max_receives, far->context);
  message_counts.emplace(std::span(arrived.get(), kMaxTransfers * max_receives));
  thread =
      std::make_unique<TransferThread>(HostMap::here().cores_near(pci_address(settings.device.index)
      ));
  // Enough for 16-bit rows with weights and small scale rows, and for most plans.
  reserve(settings.hidden * 2 + settings.max_topk * 8 + kSmallScaleBytes);
  const uint64_t per_round = 2 * near->plan_map.num_bytes();
  reserve_image(per_round * (1 + far->domains->carried().size()) + kLeastBytes);
  group.barrier();
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
  if (far->broken) {
    std::rethrow_exception(far->broken);
  }
  if (!thread->is_running()) {
    settle();
  }
  near->check();
}

ExchangeStats DomainsCudaExchange::stats() const {
  ExchangeStats stats = far->stats();
  const ExchangeStats in_domain = near->stats();
  const auto members = far->domains->near();
  for (size_t place = 0; place < members.size(); ++place) {
    stats.wait_seconds[static_cast<size_t>(members[place])] += in_domain.wait_seconds[place];
  }
  return stats;
}

Footprint DomainsCudaExchange::footprint() const {
  Footprint sum = near->footprint();
  const Footprint network = far->footprint();
  sum.control_bytes += network.control_bytes + static_cast<int64_t>(image_bytes);
  sum.staging_bytes += network.staging_bytes + static_cast<int64_t>(message_bytes);
  return sum;
}

cudaStream_t DomainsCudaExchange::stream_of(const CallOptions& call) const {
  return call.stream == nullptr ? own_stream.get() : static_cast<cudaStream_t>(call.stream);
}

void DomainsCudaExchange::begin_call(std::string_view op, cudaStream_t stream) {
  near->check();
  WEFT_CHECK(
      far->context,
      !near->is_capturing(stream),
      ErrorCode::kUnsupported,
      "{}: a call between domains cannot be captured in a graph",
      op
  );
  WEFT_CUDA(far->context, cudaStreamSynchronize(copies.get()));
}

void DomainsCudaExchange::let_copies_follow(cudaStream_t stream) {
  WEFT_CUDA(far->context, cudaEventRecord(caller_event.get(), stream));
  WEFT_CUDA(far->context, cudaStreamWaitEvent(copies.get(), caller_event.get()));
}

void DomainsCudaExchange::let_follow_copies(cudaStream_t stream) {
  WEFT_CUDA(far->context, cudaEventRecord(copy_event.get(), copies.get()));
  WEFT_CUDA(far->context, cudaStreamWaitEvent(stream, copy_event.get()));
}

void DomainsCudaExchange::end_call(const CallOptions& call, cudaStream_t stream) {
  WEFT_CUDA(far->context, cudaEventRecord(last_use.get(), stream));
  if (call.stream != nullptr) {
    if (waits_on_host) {
      settle();
    }
    return;
  }
  const std::exception_ptr failure = refusal_of([&] { settle(); });
  const std::exception_ptr fault = refusal_of([&] { near->finish(stream); });
  rethrow(failure);  // nothing runs any more
  rethrow(fault);
}

// The job owns what it needs: the call's plan and tensors may be gone.
void DomainsCudaExchange::start_transfer(std::string_view op, Transfer transfer) {
  const auto one = std::make_shared<const Transfer>(std::move(transfer));
  const auto look = [this] {
    WEFT_CHECK(
        far->context,
        !near->has_fault(),
        ErrorCode::kInternal,
        "exchange: the GPU's part of a call between domains has failed"
    );
  };
  const auto run = [this, op, one, look, call = far->call_number] {
    const CrossingTransfer::Owner owner = {
        *far->transport, *far->waiter, far->settled, far->context, settings.timeout};
    const auto take = [&](size_t i, int64_t c) {
      message_counts->set(place_of(one->number, i), one->before[i] + static_cast<uint32_t>(c) + 1);
    };
    CrossingTransfer(owner, one->chunk, {op, call, one->what})
        .run(one->sends, one->receives, take, look);
  };
  const auto give_up = [this, one] {
    for (size_t i = 0; i < one->receives.size(); ++i) {
      const int64_t count = one->chunk.num_chunks(one->receives[i].count);
      message_counts->set(place_of(one->number, i), one->before[i] + static_cast<uint32_t>(count));
    }
  };
  thread->start({run, give_up});
}

void DomainsCudaExchange::settle() {
  try {
    thread->wait();
  } catch (const Error& error) {
    const std::exception_ptr fault = refusal_of([&] { near->check(); });  // says more
    far->broken = fault ? fault : far->cause_of(last_op, error);
    std::rethrow_exception(far->broken);
  } catch (...) {
    far->broken = std::current_exception();
    throw;
  }
}

void DomainsCudaExchange::refuse_rounds(
    DeviceOp op, size_t first, size_t last, cudaStream_t stream
) {
  for (size_t round = first; round < last; ++round) {
    try {
      near->refuse(op, stream);
    } catch (const Error& error) {  // the error that led here is what matters
      log(LogLevel::kDebug, "exchange: {}", error.what());
    }
  }
}

void DomainsCudaExchange::make_room(Op op, int64_t bytes_of_token, cudaStream_t stream) {
  if (bytes_of_token <= token_bytes) {
    return;
  }
  far->run_call(
      op,
      [] { return 0; },
      [&](int /*nothing*/) {
        WEFT_CUDA(far->context, cudaStreamSynchronize(stream));
        CallWord word = far->new_word(op);
        word.signature = {kGrowing, bytes_of_token};
        const std::vector<CallWord> to(static_cast<size_t>(far->context.num_ranks), word);
        static_cast<void>(far->board->swap(to, {}));
      }
  );
  reserve(bytes_of_token);  // nobody launches anything before the words of the call itself
}

// For as many tokens as each rank may ever have, all of them crossing.
void DomainsCudaExchange::reserve(int64_t bytes_of_token) {
  const Domains& domains = *far->domains;
  token_bytes = bytes_of_token;
  room = crossing_room(
      {.num_others = static_cast<uint64_t>(domains.num_domains()) - 1,
       .num_carried = domains.carried().size(),
       .max_tokens = settings.max_tokens,
       .max_topk = settings.max_topk,
       .token_bytes = token_bytes}
  );
  reserve_staging(room.staging);
  retired.emplace_back(std::move(messages));
  retired.emplace_back(std::move(done));
  retired.push_back(std::move(work));
  message_bytes = room.messages;
  messages = std::make_unique<PinnedBuffer<std::byte>>();
  messages->create(message_bytes, far->context);
  done = std::make_unique<PinnedBuffer<uint32_t>>();
  done->create(room.num_messages, far->context);
  work = near->buffers->take(room.work);
}

// Copies out of memory that is not pinned would not wait in the stream for what comes there.
void DomainsCudaExchange::reserve_staging(uint64_t bytes) {
  if (pinned_staging != nullptr) {
    WEFT_CUDA(far->context, cudaHostUnregister(const_cast<std::byte*>(pinned_staging)));
    pinned_staging = nullptr;
  }
  far->reserve_staging(std::max(bytes, kLeastBytes));
  WEFT_CUDA(
      far->context,
      cudaHostRegister(far->staging.data, far->staging.ref.bytes, cudaHostRegisterPortable)
  );
  pinned_staging = far->staging.data;
}

void DomainsCudaExchange::reserve_image(uint64_t bytes) {
  if (bytes > image_bytes) {
    image_bytes = size_class(std::max(bytes, kLeastBytes));
    retired.emplace_back(std::move(image));
    image = std::make_unique<PinnedBuffer<std::byte>>();
    image->create(image_bytes, far->context);
  }
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
