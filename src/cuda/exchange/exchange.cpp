// SPDX-License-Identifier: Apache-2.0
// Sets the CUDA executor's exchange up and answers for it. Everything that CUDA would do lazily is
// done here: a call allocates nothing unless it is larger than all before it.
#include "cuda/exchange/exchange.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <span>

#include "call/config_agreement.hpp"
#include "core/env.hpp"
#include "core/gpu/devices.hpp"
#include "core/size_class.hpp"
#include "cuda/plan/download.hpp"
#include "cuda/plan/shared_map.hpp"
#include "transport/agree.hpp"

namespace weft {
namespace {

// Plans that may be alive before more memory is asked for, in so many bytes at most.
constexpr uint64_t kFirstPlans = 64;
constexpr uint64_t kFewPlans = 4;
constexpr uint64_t kFirstPlanBytes = 128 << 20;
constexpr int kUsualRanks = 8;  // of a domain; their staging is ready for every token of all

std::atomic<uint64_t> next_exchange_id = 1;

void check_device(const ExchangeConfig& config, const Context& context) {
  const GpuList list = list_gpus();
  WEFT_CHECK(
      context,
      config.device.index < static_cast<int>(list.gpus.size()),
      list.gpus.empty() ? ErrorCode::kNotAvailable : ErrorCode::kInvalidArgument,
      "exchange: device cuda {} ({})",
      config.device.index,
      list.gpus.empty() ? list.none_reason : fmt::format("{} GPUs are visible", list.gpus.size())
  );
  WEFT_CHECK_ARG(
      context,
      config.transport == "auto" || config.transport == "peer",
      "exchange: transport {} on a GPU (expected auto or peer)",
      config.transport
  );
  WEFT_CHECK_ARG(
      context,
      context.num_ranks <= kMaxDomainRanks,
      "exchange: {} ranks in one domain of GPUs (at most {})",
      context.num_ranks,
      kMaxDomainRanks
  );
  const GpuInfo& gpu = list.gpus[static_cast<size_t>(config.device.index)];
  WEFT_CHECK(
      context,
      config.mover != Mover::kBulk || gpu.major >= 9,
      ErrorCode::kUnsupported,
      "exchange: mover bulk on {} of compute capability {}.{} (needs 9.0)",
      gpu.name,
      gpu.major,
      gpu.minor
  );
}

// What the ranks of a domain settle when an exchange is made.
struct DomainFacts {
  uint64_t stamp = 0;         // the same on all ranks, and of no other exchange
  uint64_t shared_bytes = 0;  // that a block may have on each of the GPUs
};

// Collective. `id` is the exchange's number in this process.
DomainFacts agree_on_facts(const Group& group, uint64_t id, int gpu, const Context& context) {
  static const uint64_t process_bits = uint64_t{std::random_device()()} << 32;
  int shared_bytes = 0;
  WEFT_CUDA(
      context, cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu)
  );
  // Rank 0's stamp: some bits of its own, then the number of the exchange in its process.
  const DomainFacts own = {process_bits | (id & 0xffffffffU), static_cast<uint64_t>(shared_bytes)};
  DomainFacts all = own;
  bool is_first = true;
  for (const auto& bytes : group.all_gather(std::as_bytes(std::span(&own, 1)))) {
    DomainFacts one;
    std::memcpy(&one, bytes.data(), sizeof one);
    all.stamp = is_first ? one.stamp : all.stamp;
    all.shared_bytes = std::min(all.shared_bytes, one.shared_bytes);
    is_first = false;
  }
  return all;
}

}  // namespace

CudaExchange::CudaExchange(const Group& group, const ExchangeConfig& wanted, bool has_early_rows)
    : settings(wanted),
      context({.rank = group.rank(), .num_ranks = group.num_ranks()}),
      id(next_exchange_id++) {
  agree_on_config(group, settings, context, [&] { check_device(settings, context); });
  settings.transport = "peer";
  context.transport = "peer";
  settings.copy_engines = settings.copy_engines && context.num_ranks > 1;
  const CudaDeviceGuard guard(settings.device.index);
  const auto ranks = static_cast<uint32_t>(context.num_ranks);
  const auto experts = static_cast<uint32_t>(settings.num_experts);
  const auto tokens = static_cast<uint32_t>(std::max<int64_t>(settings.max_tokens, 1));
  const auto topk = static_cast<uint32_t>(settings.max_topk);
  const auto hidden = static_cast<uint64_t>(settings.hidden);
  control_map = {
      ranks,
      experts,
      tokens,
      topk,
      has_early_rows ? early_row_room(ranks, tokens, topk, hidden) : 0,
      settings.copy_engines ? copied_token_room(topk, hidden) : 0};
  plan_map = {ranks, experts, tokens, topk};
  memory = std::make_shared<PeerMemory>(group, settings.device.index, control_map.num_bytes());
  refusals = std::make_unique<RefusalBoard>(group);
  const DomainFacts facts = agree_on_facts(group, id, settings.device.index, context);
  const PlanSharedMap beside = {ranks, experts, tokens * topk};
  can_plan_beside = control_map.early_row_bytes > 0 && beside.num_threads() >= kRoutedThreads &&
                    beside.num_bytes() + kMostStaticShared <= facts.shared_bytes;
  agree(group, [&] { set_up(facts.stamp); });  // nobody leaves before everybody can be written to
}

void CudaExchange::set_up(uint64_t stamp) {
  int major = 0;
  int minor = 0;
  const int gpu = settings.device.index;
  WEFT_CUDA(context, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu));
  WEFT_CUDA(context, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu));
  WEFT_CUDA(context, cudaDeviceGetAttribute(&num_gpu_sms, cudaDevAttrMultiProcessorCount, gpu));
  compute_capability = major * 10 + minor;
  num_gpu_sms = std::max(2, num_gpu_sms / memory->ranks_on_this_gpu());

  const std::optional<std::string> tuning_file = Env::read().tuning;
  tuning = BlockChoice(tuning_file ? load_tuning(*tuning_file) : built_in_tuning());
  own = std::make_shared<CudaRankState>();
  own->memory = memory;
  own->stream = GpuStream(gpu);
  own->last_call.create(context);
  own->local.create(1, context);
  own->fault.create(1, context);
  host_shape.create(plan_map.shape_bytes() + sizeof(uint32_t), context);
  plan_scratch.create(plan_scratch_bytes(plan_map) / sizeof(int32_t) + 1, context);
  if (settings.copy_engines) {
    const auto peers = static_cast<uint64_t>(context.num_ranks - 1);
    packed.create(peers * control_map.copied_stride(), context);
  }
  weft::prepare_plan(plan_map);
  prepare_given_plan();
  prepare_wait_records();
  weft::prepare_dispatch();
  prepare_copied_dispatch();
  prepare_routed_dispatch();
  prepare_combine();
  prepare_copied_combine();
  prepare_refusal();
  plans = std::make_shared<PlanPool>(memory, plan_map.num_bytes());
  add_plans(std::clamp(kFirstPlanBytes / plan_map.num_bytes(), kFewPlans, kFirstPlans));
  buffers = std::make_shared<BlockPool>(memory);
  view = {
      .rank = context.rank,
      .num_ranks = context.num_ranks,
      .map = control_map,
      .stamp = stamp,
      .control = {},
      .regions = memory->table(),
      .local = own->local.get(),
      .fault = own->fault.get(),
      .timeout_ns = static_cast<uint64_t>(
          std::chrono::duration_cast<std::chrono::nanoseconds>(settings.timeout).count()
      )};
  for (int rank = 0; rank < context.num_ranks; ++rank) {
    view.control[rank] = memory->control_of(rank);
  }
  const uint32_t base = epoch_base(stamp);
  num_copies = base;
  std::byte* const stamp_place = memory->control().data + control_map.stamp_offset();
  WEFT_CUDA(context, cudaMemcpy(stamp_place, &stamp, sizeof stamp, cudaMemcpyHostToDevice));
  WEFT_CUDA(
      context, cudaMemcpy(&own->local.get()->epoch, &base, sizeof base, cudaMemcpyHostToDevice)
  );
  // Enough for 16-bit rows, in combine and staged in dispatch, there with small scale rows beside
  // them. What needs more makes it grow, and then peers that are ahead may be too busy to map it.
  const int64_t rows = std::max<int64_t>(settings.max_tokens, 1) *
                       std::min(context.num_ranks, std::max(settings.max_topk, kUsualRanks));
  const auto row_bytes = static_cast<uint64_t>(settings.hidden * 2 + kScaleRoom);
  static_cast<void>(staging_of(static_cast<uint64_t>(rows) * row_bytes, nullptr));
  WEFT_CUDA(context, cudaDeviceSynchronize());
}

CudaExchange::~CudaExchange() {
  // A thread of another GPU may destroy it; a kernel of ours may still run.
  int before = -1;
  static_cast<void>(cudaGetDevice(&before));
  static_cast<void>(cudaSetDevice(settings.device.index));
  static_cast<void>(cudaStreamSynchronize(own->stream.get()));
  memory->close();
  if (before >= 0 && before != settings.device.index) {
    static_cast<void>(cudaSetDevice(before));
  }
}

void CudaExchange::check_aligned(
    std::string_view op, std::string_view name, const ConstTensor& tensor
) const {
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  WEFT_CHECK_ARG(
      context,
      address % 16 == 0,
      "{}: {} begins at address {:#x} (expected a multiple of 16)",
      op,
      name,
      address
  );
}

void CudaExchange::join_domains(
    const Context& whole, std::span<const int> ranks, int num_sharing, int num_kept_sms
) {
  int num_sms = 0;
  WEFT_CUDA(
      context,
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, settings.device.index)
  );
  num_gpu_sms = std::max(2, (num_sms - num_kept_sms) / num_sharing);
  context = whole;
  rank_names.assign(ranks.begin(), ranks.end());
}

int CudaExchange::sms_of(const CallOptions& call) const {
  const int wanted = call.num_sms > 0 ? call.num_sms : settings.num_sms;
  return std::clamp(wanted > 0 ? wanted : num_gpu_sms, 2, num_gpu_sms);
}

Mover CudaExchange::mover() const {
  if (settings.mover != Mover::kAuto) {
    return settings.mover;
  }
  return compute_capability >= 90 ? Mover::kBulk : Mover::kVector;
}

const PeerRegion& CudaExchange::staging_of(uint64_t bytes, cudaStream_t stream) {
  if (bytes <= staging.bytes && staging.data != nullptr) {
    return staging;
  }
  WEFT_CHECK(
      context,
      !is_capturing(stream),
      ErrorCode::kUnsupported,
      "exchange: a captured call needs {} bytes of staging, {} are there (make a call of this size "
      "before the capture)",
      bytes,
      staging.bytes
  );
  const uint64_t wanted = size_class(std::max<uint64_t>({bytes, 2 * staging.bytes, 1}));
  const auto grown = memory->allocate_reachable(wanted, settings.timeout);
  WEFT_CHECK(
      context,
      grown.has_value(),
      ErrorCode::kNotAvailable,
      "exchange: some rank cannot map {} bytes of staging (or has not within {} ms)",
      wanted,
      settings.timeout.count()
  );
  if (staging.data != nullptr) {
    retired.push_back(staging);
  }
  staging = *grown;
  return staging;
}

void CudaExchange::add_plans(uint64_t num_plans) {
  WEFT_CHECK(
      context,
      plans->grow(num_plans, settings.timeout),
      ErrorCode::kNotAvailable,
      "plan: some rank cannot map memory for {} more plans (or has not within {} ms)",
      num_plans,
      settings.timeout.count()
  );
}

Buffer CudaExchange::allocate(const Tensor& shape) {
  const CudaDeviceGuard guard(settings.device.index);
  const auto block = buffers->take(static_cast<uint64_t>(std::max<int64_t>(shape.num_bytes(), 1)));
  Tensor tensor = shape;
  tensor.data = block->data;
  return {tensor, std::const_pointer_cast<Block>(block)};
}

void CudaExchange::release_pooled() {
  const CudaDeviceGuard guard(settings.device.index);
  buffers->release_unused();
  // Freeing waits for all kernels of the GPU: it shall not meet a later call, where peers wait for
  // this rank.
  static_cast<void>(memory->wait_freed(std::chrono::seconds(2)));
}

LocalState CudaExchange::read_local() const {
  LocalState now;
  const cudaStream_t stream = own->stream.get();
  WEFT_CUDA(
      context, cudaMemcpyAsync(&now, own->local.get(), sizeof now, cudaMemcpyDeviceToHost, stream)
  );
  WEFT_CUDA(context, cudaStreamSynchronize(stream));
  return now;
}

ExchangeStats CudaExchange::stats() const {
  const CudaDeviceGuard guard(settings.device.index);
  const LocalState now = read_local();
  ExchangeStats stats = counters;
  for (int peer = 0; peer < view.num_ranks; ++peer) {
    stats.wait_seconds.push_back(static_cast<double>(now.wait_ns[peer]) * 1e-9);
  }
  return stats;
}

Footprint CudaExchange::footprint() const {
  const uint64_t control = memory->control().bytes + own->local.bytes() + plan_scratch.bytes() +
                           plans->bytes() + packed.bytes();
  uint64_t staged = staging.bytes;
  for (const PeerRegion& region : retired) {
    staged += region.bytes;
  }
  return {
      .control_bytes = static_cast<int64_t>(control),
      .staging_bytes = static_cast<int64_t>(staged),
      .buffer_bytes = static_cast<int64_t>(buffers->used_bytes()),
      .pooled_bytes = static_cast<int64_t>(buffers->unused_bytes())};
}

}  // namespace weft
