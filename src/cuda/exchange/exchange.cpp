// SPDX-License-Identifier: Apache-2.0
// Sets the CUDA executor's exchange up and answers for it. Everything that CUDA would do lazily is
// done here: a call allocates nothing unless it is larger than all before it.
#include "cuda/exchange/exchange.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <random>

#include "call/validate.hpp"
#include "core/env.hpp"
#include "core/gpu/devices.hpp"
#include "core/log.hpp"
#include "core/size_class.hpp"
#include "cuda/layout/patience.hpp"
#include "cuda/plan/balance/launch.hpp"
#include "cuda/plan/count.hpp"
#include "cuda/plan/download.hpp"
#include "cuda/plan/shared_map.hpp"
#include "cuda/plan/spread.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"

namespace weft {
namespace {

// Plans for which memory is taken at first, in kFirstPlanBytes at most.
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

int attribute(cudaDeviceAttr which, int gpu, const Context& context) {
  int value = 0;
  WEFT_CUDA(context, cudaDeviceGetAttribute(&value, which, gpu));
  return value;
}

// Values that the ranks of a domain agree on when an exchange is made.
struct DomainFacts {
  uint64_t stamp = 0;         // the same on all ranks, and of no other exchange
  uint64_t shared_bytes = 0;  // that a block may have on each of the GPUs
};

// Collective. Agrees on facts; `id` is the exchange's number in its process.
DomainFacts agree_on_facts(const Group& group, uint64_t id, uint64_t shared_bytes) {
  static const uint64_t process_bits = uint64_t{std::random_device()()} << 32;
  // Rank 0's stamp: some bits of its own, then the number of the exchange in its process.
  const DomainFacts own = {process_bits | (id & 0xffffffffU), shared_bytes};
  const std::vector<DomainFacts> all = gather_values(group, own);
  const auto least = std::ranges::min(all, {}, &DomainFacts::shared_bytes);
  return {all.front().stamp, least.shared_bytes};
}

}  // namespace

CudaExchange::CudaExchange(const Group& group, const ExchangeConfig& wanted, bool has_eager_rows)
    : settings_(wanted),
      context_({.rank = group.rank(), .num_ranks = group.num_ranks()}),
      id_(next_exchange_id++) {
  const std::optional<Invitation> invitation = invitation_of(group);
  if (invitation) {
    validate_config(settings_, context_);
    check_device(settings_, context_);
  } else {
    agree_on_config(group, settings_, [&] { check_device(settings_, context_); });
  }
  settings_.transport = "peer";
  context_.transport = "peer";
  settings_.copy_engines = settings_.copy_engines && context_.num_ranks > 1;
  const CudaDeviceGuard guard(settings_.device.index);
  const auto ranks = static_cast<uint32_t>(context_.num_ranks);
  const auto experts = static_cast<uint32_t>(settings_.num_experts);
  const auto tokens = static_cast<uint32_t>(std::max<int64_t>(settings_.max_tokens, 1));
  const auto topk = static_cast<uint32_t>(settings_.max_topk);
  const auto hidden = static_cast<uint64_t>(settings_.hidden);
  control_map_ = {
      ranks,
      experts,
      tokens,
      topk,
      has_eager_rows ? eager_row_room(ranks, tokens, topk, hidden) : 0,
      settings_.copy_engines ? copied_token_room(topk, hidden) : 0};
  WEFT_CHECK_ARG(
      context_,
      control_map_.signals().needed() < std::numeric_limits<uint32_t>::max(),
      "exchange: max_tokens = {} makes {} signals among {} ranks (fewer than 2^32 - 1)",
      settings_.max_tokens,
      control_map_.signals().needed(),
      context_.num_ranks
  );
  if (settings_.on_peer_loss == PeerLoss::kRepeat) {
    repeats_ = std::make_unique<CallRepeats>(settings_.device.index, context_);
  }
  if (invitation) {
    rejoin(group, *invitation);
    return;
  }
  memory_ = std::make_shared<PeerMemory>(group, settings_.device.index, control_map_.num_bytes());
  refusals_ = std::make_unique<RefusalBoard>(group);
  const DomainFacts facts = agree_on_facts(group, id_, shared_bytes());
  fused_replicas_ = fused_replicas(facts.shared_bytes);
  agree(group, [&] { set_up(facts.stamp); });  // no rank leaves before all can be written to
  if (goes_on_without_lost(settings_.on_peer_loss)) {
    watch_for_losses(group);
  }
}

uint64_t CudaExchange::shared_bytes() const {
  return static_cast<uint64_t>(
      attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, settings_.device.index, context_)
  );
}

uint32_t CudaExchange::fused_replicas(uint64_t shared_bytes) const {
  const uint32_t num_routes = control_map_.max_tokens * control_map_.max_topk;
  uint32_t possible = 0;
  for (int replicas = 0; replicas <= kMostReplicas && control_map_.eager_row_bytes > 0;
       ++replicas) {
    const PlanMap map = plan_map(replicas);
    const PlanSharedMap fused = {map.num_ranks, map.num_experts, num_routes};
    const uint64_t needed =
        replicas == 0 ? fused.num_bytes() : balanced_shared_bytes(map, num_routes);
    const bool fits =
        fused.num_threads() >= kRoutedThreads && needed + kMostStaticShared <= shared_bytes;
    possible |= fits ? 1U << static_cast<uint32_t>(replicas) : 0U;
  }
  return possible;
}

void CudaExchange::set_up(uint64_t stamp) {
  const int gpu = settings_.device.index;
  picks_mover_ = settings_.mover == Mover::kAuto;
  if (picks_mover_) {
    const int major = attribute(cudaDevAttrComputeCapabilityMajor, gpu, context_);
    settings_.mover = major >= 9 ? Mover::kBulk : Mover::kVector;
  }
  const int num_sms = attribute(cudaDevAttrMultiProcessorCount, gpu, context_);
  num_gpu_sms_ = std::max(2, num_sms / memory_->ranks_on_this_gpu());

  const std::optional<std::string> tuning_file = Env::read().tuning;
  tuning_ = BlockChoice(tuning_file ? load_tuning(*tuning_file) : built_in_tuning());
  own_ = std::make_shared<CudaRankState>();
  own_->memory = memory_;
  own_->stream = GpuStream(gpu);
  reserve_streams(gpu);
  own_->last_call.create(context_);
  const cudaStream_t stream = own_->stream.get();
  own_->local.create(1, stream, context_);
  own_->fault.create(2, context_);
  const PlanMap largest = plan_map(kMostReplicas);
  host_shape_.create(largest.shape_bytes() + sizeof(uint32_t), context_);
  plan_scratch_.create(plan_scratch_bytes(largest) / sizeof(int32_t) + 1, stream, context_);
  balance_scratch_.create(balance_scratch_words(largest), stream, context_);
  if (settings_.copy_engines) {
    const auto peers = static_cast<uint64_t>(context_.num_ranks - 1);
    packed_.create(peers * control_map_.copied_stride, stream, context_);
  }
  weft::prepare_plan(plan_map());
  prepare_swap_counts();
  prepare_balance();
  prepare_imported_plan();
  prepare_count_routing();
  prepare_spread_routing();
  weft::prepare_dispatch();
  prepare_copied_dispatch();
  prepare_routed_dispatch();
  prepare_combine();
  prepare_topk_combine();
  prepare_combine_by_route();
  prepare_coded_combine();
  prepare_copied_combine();
  prepare_refusal();
  prepare_waits();
  prepare_gate();
  plans_ = std::make_shared<PlanPool>(memory_, largest.num_bytes());
  add_plans(std::clamp(kFirstPlanBytes / largest.num_bytes(), kFewPlans, kFirstPlans));
  buffers_ = std::make_shared<BlockPool>(memory_);
  view_ = {
      .rank = context_.rank,
      .num_ranks = context_.num_ranks,
      .map = control_map_,
      .stamp = stamp,
      .control = {},
      .regions = memory_->table(),
      .new_regions = memory_->new_table(),
      .local = own_->local.get(),
      .fault = own_->fault.get(),
      .timeout_ns = static_cast<uint64_t>(
          std::chrono::duration_cast<std::chrono::nanoseconds>(settings_.timeout).count()
      )};
  view_.look_ns = Patience::most_of(view_.timeout_ns);
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    view_.control[rank] = memory_->control_of(rank);
  }
  const uint32_t base = epoch_base(stamp);
  std::byte* const stamp_place = memory_->control().data + control_map_.stamp_offset();
  WEFT_CUDA(context_, cudaMemcpy(stamp_place, &stamp, sizeof stamp, cudaMemcpyHostToDevice));
  set_epoch(base);
  // Enough for 16-bit rows, in combine and staged in dispatch, there with small scale rows. What
  // needs more makes it grow, and then peers that are ahead may be too busy to map it.
  const int64_t rows = std::max<int64_t>(settings_.max_tokens, 1) *
                       std::min(context_.num_ranks, std::max(settings_.max_topk, kUsualRanks));
  const auto row_bytes = static_cast<uint64_t>(settings_.hidden * 2 + kScaleRoom);
  static_cast<void>(staging_of(static_cast<uint64_t>(rows) * row_bytes, nullptr));
  WEFT_CUDA(context_, cudaDeviceSynchronize());
}

void CudaExchange::set_epoch(uint64_t epoch) {
  const CudaDeviceGuard guard(settings_.device.index);
  num_copies_ = static_cast<uint32_t>(epoch);
  const cudaStream_t stream = own_->stream.get();
  uint32_t* const place = &own_->local.get()->epoch;
  write_short(place, &epoch, sizeof epoch, stream, context_);
  const GateState gate = {.passed = epoch, .whole = epoch};
  write_short(&own_->local.get()->gate, &gate, sizeof gate, stream, context_);
  const uint32_t has_gates = repeats_ ? 1 : 0;
  write_short(&own_->local.get()->has_gates, &has_gates, sizeof has_gates, stream, context_);
}

CudaExchange::~CudaExchange() {
  losses_.reset();
  if (repeats_) {
    on_device_quietly(settings_.device.index, "exchange", [&] {
      release_gates();
      return cudaSuccess;
    });
  }
  // A thread of another GPU may destroy it; kernels of ours may still run, in any stream.
  on_device_quietly(settings_.device.index, "exchange", [&] {
    memory_->close();
    if (!broken_ && (has_fault() || has_misuse())) {
      const std::string text = fault_text(own_->fault.get()[has_fault() ? 0 : 1], view_, {});
      log(LogLevel::kWarn, "exchange: its last calls failed, and nobody was told: {}", text);
    }
    return cudaSuccess;
  });
}

void CudaExchange::join(
    const Context& whole, std::span<const int> ranks, int num_sharing, int num_kept_sms
) {
  const int gpu = settings_.device.index;
  const int num_sms = attribute(cudaDevAttrMultiProcessorCount, gpu, context_);
  num_gpu_sms_ = std::max(2, (num_sms - num_kept_sms) / num_sharing);
  context_ = whole;
  rank_names_.assign(ranks.begin(), ranks.end());
}

int CudaExchange::sms_of(const CallOptions& call) const {
  const int wanted = call.num_sms > 0 ? call.num_sms : settings_.num_sms;
  return std::clamp(wanted > 0 ? wanted : num_gpu_sms_, 2, num_gpu_sms_);
}

const PeerRegion& CudaExchange::staging_of(uint64_t bytes, cudaStream_t stream) {
  if (bytes <= staging_.bytes && staging_.data != nullptr) {
    return staging_;
  }
  WEFT_CHECK(
      context_,
      !is_capturing(stream, context_),
      ErrorCode::kUnsupported,
      "exchange: a captured call needs {} bytes of staging, {} are there (make a call of this size "
      "before the capture)",
      bytes,
      staging_.bytes
  );
  const uint64_t wanted = size_class(std::max<uint64_t>({bytes, 2 * staging_.bytes, 1}));
  const auto grown = memory_->allocate_reachable(wanted, settings_.timeout);
  WEFT_CHECK(
      context_,
      grown.has_value(),
      ErrorCode::kNotAvailable,
      "exchange: some rank cannot map {} bytes of staging (or has not within {} ms)",
      wanted,
      settings_.timeout.count()
  );
  if (staging_.data != nullptr) {
    retired_.push_back(staging_);
  }
  staging_ = *grown;
  return staging_;
}

void CudaExchange::add_plans(uint64_t num_plans) {
  WEFT_CHECK(
      context_,
      plans_->grow(num_plans, settings_.timeout),
      ErrorCode::kNotAvailable,
      "plan: some rank cannot map memory for {} more plans (or has not within {} ms)",
      num_plans,
      settings_.timeout.count()
  );
}

Buffer CudaExchange::allocate(const Tensor& shape) {
  const CudaDeviceGuard guard(settings_.device.index);
  const auto block = buffers_->take(static_cast<uint64_t>(std::max<int64_t>(shape.num_bytes(), 1)));
  Tensor tensor = shape;
  tensor.data = block->data;
  return {tensor, std::const_pointer_cast<Block>(block)};
}

void CudaExchange::release_pooled() {
  const CudaDeviceGuard guard(settings_.device.index);
  buffers_->release_unused();
  // Freeing waits for all kernels of the GPU: it shall not meet a later call, where peers wait for
  // this rank.
  static_cast<void>(memory_->wait_freed(std::chrono::seconds(2)));
}

ExchangeStats CudaExchange::stats() const {
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture relaxed;  // another thread may be capturing
  // Not behind a call that waits for others.
  const auto now =
      read_gpu<LocalState>(own_->local.get(), short_work_stream(settings_.device.index));
  ExchangeStats stats = counters_;
  for (int peer = 0; peer < view_.num_ranks; ++peer) {
    stats.wait_seconds.push_back(static_cast<double>(now.wait_ns[peer]) * 1e-9);
  }
  return stats;
}

void CudaExchange::add_waits(int64_t* sums, int64_t times, const CallOptions& call) {
  const CudaDeviceGuard guard(settings_.device.index);
  WaitSums waits = {
      .local = own_->local.get(), .sums = sums, .times = times, .count = view_.num_ranks};
  for (int32_t place = 0; place < waits.count; ++place) {
    waits.ranks[place] = rank_names_.empty() ? place : rank_names_[static_cast<size_t>(place)];
  }
  launch_add_waits(waits, stream_of(call));
  if (call.stream == nullptr) {
    wait_for(stream_of(call));
  }
}

Footprint CudaExchange::footprint() const {
  const uint64_t control = memory_->control().bytes + own_->local.bytes() + plan_scratch_.bytes() +
                           balance_scratch_.bytes() + plans_->used_bytes() +
                           plans_->unused_bytes() + packed_.bytes();
  uint64_t staged = staging_.bytes;
  for (const PeerRegion& region : retired_) {
    staged += region.bytes;
  }
  return {
      .control_bytes = static_cast<int64_t>(control),
      .staging_bytes = static_cast<int64_t>(staged),
      .buffer_bytes = static_cast<int64_t>(buffers_->used_bytes()),
      .pooled_bytes = static_cast<int64_t>(buffers_->unused_bytes())};
}

}  // namespace weft
