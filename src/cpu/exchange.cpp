// SPDX-License-Identifier: Apache-2.0
// Sets the CPU executor's exchange up, owns the memory that peers write, and answers for it. Each
// operation has its own file: plan/call.cpp, dispatch/call.cpp, combine/call.cpp.
#include "cpu/exchange.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <thread>

#include "call/validate.hpp"
#include "core/env.hpp"
#include "core/host_map.hpp"
#include "core/size_class.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"
#include "plan/build.hpp"
#include "transport/common.hpp"

namespace weft {
namespace {

std::atomic<uint64_t> next_exchange_id = 1;

// Returns this rank's share of its host's cores.
int default_num_threads(const Group& group) {
  const auto& hosts = group.topology().host_of;
  const auto mine =
      std::count(hosts.begin(), hosts.end(), hosts[static_cast<size_t>(group.rank())]);
  const auto cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  return std::max(1, cores / static_cast<int>(mine));
}

}  // namespace

CpuExchange::CpuExchange(const Group& group, const ExchangeConfig& wanted, CpuPlace place)
    : settings_(wanted),
      context_(context_of(group)),
      id_(next_exchange_id++),
      place_(std::move(place)),
      domains_(std::make_shared<const Domains>(place_.domains, context_.rank, [this](int rank) {
        return place_.is_lost(rank);
      })) {
  const std::optional<Invitation> invitation = invitation_of(group);
  Env env;
  if (invitation) {
    env = Env::read();
    validate_config(settings_, context_);
    WEFT_CHECK_ARG(
        context_,
        goes_on_without_lost(settings_.on_peer_loss),
        "rejoin: on_peer_loss = fail (expected shrink, as on the others)"
    );
  } else {
    agree_on_config(group, settings_, [&] { env = Env::read(); });
  }
  if (settings_.num_threads == 0) {
    settings_.num_threads = env.num_threads > 0 ? env.num_threads : default_num_threads(group);
  }
  if (settings_.transport == "auto") {
    settings_.transport = env.transport;
  }
  if (settings_.fan_out == FanOut::kAuto) {
    settings_.fan_out = num_memory_nodes() == 1 ? FanOut::kSource : FanOut::kReceiver;
  }
  set_sizes(settings_.max_tokens, settings_.max_topk);
  if (invitation) {
    rejoin(group, *invitation);
    return;
  }
  transport_ = place_.make(
      settings_.transport,
      group,
      signals_.size(),
      {.timeout = settings_.timeout,
       .members = place_.lost.empty() ? std::vector<int>() : members(),
       .device = place_.gpu}
  );
  const bool has_kind = settings_.transport.starts_with(fmt::format("{}:", transport_->name()));
  transport_name_ = has_kind ? settings_.transport : std::string(transport_->name());
  settings_.transport = transport_->name();
  context_.transport = settings_.transport;
  if (goes_on_without_lost(settings_.on_peer_loss)) {
    survival_ = std::make_unique<Survival>(group, context_, settings_.timeout);
  }
  make_waiter();
  agree(group, [&] {
    workers_ = std::make_unique<WorkerPool>(
        settings_.num_threads,
        place_.gpu.empty() ? std::vector<int>() : HostMap::here().cores_near(place_.gpu)
    );
  });
  pool_ = std::make_shared<BufferPool>(transport_);
  connect(group, 0);
}

void CpuExchange::set_sizes(int64_t max_tokens, int max_topk) {
  const SignalMap signals = {
      .num_ranks = static_cast<uint32_t>(context_.num_ranks),
      .max_chunks = static_cast<uint32_t>(num_chunks(max_tokens)),
      .has_crossings = domains_->has_several(),
      .num_forwarded_pairs = domains_->max_forwarded_pairs()};
  WEFT_CHECK_ARG(
      context_,
      signals.needed() < std::numeric_limits<uint32_t>::max(),
      "exchange: max_tokens = {} makes {} signals among {} ranks (fewer than 2^32 - 1)",
      max_tokens,
      signals.needed(),
      context_.num_ranks
  );
  signals_ = signals;
  settled_.assign(signals_.size(), 0);
  settings_.max_tokens = max_tokens;
  settings_.max_topk = max_topk;
}

void CpuExchange::make_waiter() {
  const auto look = [survival = survival_.get()] { survival->look(); };
  waiter_ = std::make_unique<Waiter>(
      *transport_,
      context_,
      settings_.timeout,
      signals_.interrupted(0),
      Company{
          .survival = survival_.get(), .is_lost = is_lost(), .look = survival_ ? look : place_.look}
  );
}

// Tells every rank where this rank's control region is. Calls are numbered on from `num_calls`.
void CpuExchange::connect(const Group& group, uint64_t num_calls) {
  const auto ranks = static_cast<uint64_t>(context_.num_ranks);
  control_map_ = {
      .num_ranks = ranks,
      .word_bytes = sizeof(CallWord),
      .payload_bytes = (static_cast<uint64_t>(settings_.num_experts) + ranks) * sizeof(int32_t),
      .record_bytes =
          domains_->has_several()
              ? max_bundle_bytes(settings_.max_tokens, settings_.max_topk, domains_->max_members())
              : max_record_bytes(settings_.max_tokens, settings_.max_topk)};
  agree(group, [&] { control_ = transport_->allocate(control_map_.num_bytes()); });
  const std::vector<Bytes> refs = group.all_gather(std::as_bytes(std::span(&control_.ref, 1)));
  agree(group, [&] {  // no rank leaves the constructor before all can be written to
    control_slots_.assign(refs.size(), 0);
    for (size_t rank = 0; rank < refs.size(); ++rank) {
      if (!is_lost()(static_cast<int>(rank))) {
        const auto ref = block_value<RegionRef>(refs[rank], rank, context_);
        transport_->import(static_cast<int>(rank), ref);
        control_slots_[rank] = ref.slot;
        continue;
      }
      for (const int parity : {0, 1}) {  // no rank posts these words: they count nothing
        std::memset(
            control_.data + control_map_.call_offset(parity, rank), 0, control_map_.call_stride()
        );
      }
    }
    board_ = std::make_unique<CallBoard>(
        *transport_,
        *waiter_,
        context_,
        control_map_,
        signals_,
        control_.data,
        control_slots_,
        num_calls,
        is_lost()
    );
  });
}

void CpuExchange::leave() {
  if (survival_) {
    survival_->leave();
  }
}

CpuExchange::~CpuExchange() {
  leave();
  if (transport_) {
    transport_->close();  // a Buffer may keep the memory alive, peers shall not wait for it
  }
}

// Repeats `attempt` until its outcome, a refusal too, is that of all ranks.
void CpuExchange::run_attempts(Op op, const std::function<void()>& attempt) {
  check();
  const uint64_t num_calls = board_->last_call();
  const ExchangeStats counters = survival_ ? counters_ : ExchangeStats();
  const uint64_t epoch = survival_ ? survival_->epoch() : 0;
  if (survival_) {
    survival_->begin_call(std::exchange(is_second_part_, false));
  }
  std::exception_ptr refusal;
  for (bool is_over = false, is_first = true; !is_over; is_first = false) {
    refusal = nullptr;
    try {
      if (!is_first) {
        counters_ = counters;
        reconnect(num_calls);
      }
      if (survival_) {
        survival_->look();
      }
      try {
        attempt();
      } catch (const Refused& refused) {
        refusal = refused.reason;
      } catch (const Error& error) {
        // Raised on every rank from the same handshakes, before anything was written.
        if (error.code() != ErrorCode::kInvalidArgument) {
          throw;
        }
        refusal = std::current_exception();
      }
      is_over = !survival_ || survival_->finish_call(op_name(op));
    } catch (const Error& error) {
      settle(op, error);
    } catch (...) {
      broken_ = std::current_exception();
      leave();
      throw;
    }
  }
  if (survival_ && survival_->epoch() != epoch) {
    tell_losses();
  }
  if (refusal) {
    std::rethrow_exception(refusal);
  }
}

std::exception_ptr CpuExchange::cause_of(Op op, const Error& error) const {
  const bool is_unmapped = error.code() == ErrorCode::kNotAvailable;
  if (error.code() != ErrorCode::kTransport && !is_unmapped) {
    return std::current_exception();
  }
  const auto* lost = dynamic_cast<const LostPeerError*>(&error);
  const int peer = lost == nullptr ? -1 : lost->peer();
  // The memory of a peer that dies is gone a moment before its death can be seen.
  const std::chrono::milliseconds patience(lost != nullptr && is_unmapped ? 1000 : 0);
  std::string end = waiter_->end_of(peer, patience);
  if (end.empty() && lost != nullptr && !is_unmapped) {
    end = fmt::format("rank {} broke off", peer);
  }
  if (end.empty()) {
    return std::current_exception();
  }
  try {
    WEFT_RAISE(
        context_,
        ErrorCode::kPeerFailed,
        "{}: {} during call {} ({})",
        op_name(op),
        end,
        call_number_,
        error.what()
    );
  } catch (const Error&) {
    return std::current_exception();
  }
}

void CpuExchange::break_off(Op op, const Error& error) {
  broken_ = cause_of(op, error);
  leave();
  for (int peer = 0; peer < context_.num_ranks && error.code() == ErrorCode::kInterrupted; ++peer) {
    try {
      if (peer != context_.rank) {
        transport_->raise(peer, signals_.interrupted(context_.rank), call_number_);
      }
    } catch (const Error&) {  // a peer that is gone needs no word
    }
  }
  std::rethrow_exception(broken_);
}

bool CpuExchange::refuse(Op op, const Refusal& reason, const CallOptions& /*call*/) {
  if (!broken_) {
    run_attempts(op, [&] { refuse_attempt(op, reason); });
  }
  return true;
}

// Refuses a plan and dispatch in its plan, where every rank throws.
void CpuExchange::refuse_attempt(Op op, const Refusal& reason) {
  call_number_ = board_->next_call();
  try {
    board_->refuse(op == Op::kPlanAndDispatch ? Op::kPlan : op, reason);
  } catch (const Error& error) {
    const bool is_told = error.code() == ErrorCode::kInvalidArgument;
    if (survival_ || is_told || error.code() == ErrorCode::kInterrupted) {
      throw;
    }
    // The others never called: the caller throws this rank's reason.
    broken_ = std::current_exception();
  } catch (...) {
    broken_ = std::current_exception();
  }
}

CallWord CpuExchange::new_word(const Call& call) const {
  CallWord word;
  word.call = call_number_;
  word.op = call.op;
  word.signature = signature_of(call);
  return word;
}

// Grows in steps; no rank writes there between calls.
void CpuExchange::reserve_staging(uint64_t bytes) {
  if (bytes <= staging_.ref.bytes) {
    return;
  }
  if (staging_.data != nullptr) {
    transport_->release(staging_.ref);
    staging_ = {};
  }
  staging_ = transport_->allocate(size_class(bytes));
}

Target CpuExchange::staging_at(uint64_t offset) const {
  return {.region = staging_.ref, .offset = offset, .place = Place::kStaging};
}

bool CpuExchange::may_touch_peers(const PlanData& plan) const {
  if (domains_->has_several() && !plan.between) {
    return false;  // without forwarders rows come from ranks of other domains, too
  }
  const uint32_t own_slot = control_slots_[static_cast<size_t>(context_.rank)];
  return settings_.fan_out == FanOut::kSource &&
         transport_->mapped(context_.rank, own_slot) != nullptr;
}

void CpuExchange::import_targets(std::span<const CallWord> words) {
  for (size_t rank = 0; rank < words.size(); ++rank) {
    const CallWord& word = words[rank];
    for (const Target& target :
         {word.rows, word.scales, word.weights, word.source_weights, word.own_rows}) {
      if (target.region.generation != 0 && rank != static_cast<size_t>(context_.rank)) {
        transport_->import(static_cast<int>(rank), target.region);
      }
    }
  }
}

Buffer CpuExchange::allocate(const Tensor& shape) {
  Tensor tensor = shape;
  const auto region = pool_->take(static_cast<uint64_t>(tensor.num_bytes()));
  tensor.data = region->data;
  return {tensor, std::const_pointer_cast<Region>(region)};
}

void CpuExchange::count_crossings(const CrossingCount& count, int64_t row_bytes) {
  counters_.crossing_bytes += count.rows * row_bytes;
  counters_.crossing_bytes_by_arrival += count.arrivals * row_bytes;
}

void CpuExchange::add_waits(int64_t* sums, int64_t times, const CallOptions& /*call*/) {
  for (const double seconds : waiter_->wait_seconds()) {
    *sums++ += times * static_cast<int64_t>(seconds * 1e6);
  }
}

ExchangeStats CpuExchange::stats() const {
  ExchangeStats stats = counters_;
  stats.wait_seconds = waiter_->wait_seconds();
  return stats;
}

Footprint CpuExchange::footprint() const {
  return {
      .control_bytes = static_cast<int64_t>(control_.ref.bytes),
      .staging_bytes = static_cast<int64_t>(staging_.ref.bytes),
      .buffer_bytes = static_cast<int64_t>(pool_->used_bytes()),
      .pooled_bytes = static_cast<int64_t>(pool_->unused_bytes())};
}

std::unique_ptr<Executor> make_cpu_exchange(const Group& group, const ExchangeConfig& config) {
  return std::make_unique<CpuExchange>(group, config);
}

}  // namespace weft
