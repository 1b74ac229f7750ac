// SPDX-License-Identifier: Apache-2.0
#include "hosts/surviving.hpp"

#include <algorithm>
#include <utility>

#include "call/validate.hpp"
#include "core/check.hpp"
#include "cuda/exchange/readmission.hpp"
#include "group/control_plane.hpp"
#include "group/invitation.hpp"
#include "plan/balance/balance.hpp"

namespace weft {
namespace {

constexpr std::string_view kPrefix = "peer+";  // of the name of a transport between domains
// Calls that may run at once: a call waits until the work of the last but one has ended.
constexpr size_t kMostRunning = 6;

// Returns the configuration of an exchange that knows of no loss.
ExchangeConfig config_among_members(const ExchangeConfig& wanted, std::string_view network) {
  ExchangeConfig config = wanted;
  config.on_peer_loss = PeerLoss::kFail;
  config.on_loss = {};
  config.transport = network;
  return config;
}

// Returns the ranks that are not in `ranks`, which ascend.
std::vector<int> others_than(const std::vector<int>& ranks, int num_ranks) {
  std::vector<int> others;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (!std::ranges::binary_search(ranks, rank)) {
      others.push_back(rank);
    }
  }
  return others;
}

// Adds `more`, but takes over its wait_seconds, as each exchange counts on from the one before.
void add(ExchangeStats& sum, const ExchangeStats& more) {
  sum.num_plans += more.num_plans;
  sum.num_dispatches += more.num_dispatches;
  sum.num_combines += more.num_combines;
  sum.num_copied += more.num_copied;
  sum.num_captured += more.num_captured;
  sum.wait_seconds = more.wait_seconds;
  sum.host_wait_seconds += more.host_wait_seconds;
  sum.crossing_bytes += more.crossing_bytes;
  sum.crossing_bytes_by_arrival += more.crossing_bytes_by_arrival;
}

}  // namespace

SurvivingHosts::SurvivingHosts(
    const Group& group, const ExchangeConfig& wanted, const std::vector<std::vector<int>>& domains
)
    : settings_(wanted),
      context_(context_of(group)),
      domains_(domains),
      network_name_(wanted.transport) {
  const std::optional<Invitation> invitation = invitation_of(group);
  if (!invitation) {
    agree_on_config(group, settings_);
    now_ = std::make_unique<HostsExchange>(
        group, config_among_members(settings_, network_name_), domains_
    );
    settings_.transport = now_->config().transport;
    context_.transport = settings_.transport;
    network_name_ = now_->network().full_transport_name();
    losses_ = std::make_unique<LossWatch>(group, context_, settings_.timeout, kernels());
    return;
  }
  validate_config(settings_, context_);
  settings_.transport = invitation->transport;
  context_.transport = settings_.transport;
  WEFT_CHECK_ARG(
      context_,
      settings_.transport.starts_with(kPrefix),
      "rejoin: the others' exchange is by transport {}, and not on GPUs of several domains",
      settings_.transport
  );
  network_name_ = settings_.transport.substr(kPrefix.size());
  last_call_ = kUnknownCalls;
  const CudaDeviceGuard guard(settings_.device.index);
  WEFT_CUDA(context_, cudaFree(nullptr));  // no other rank has to wait for CUDA's start
  losses_ = std::make_unique<LossWatch>(group, context_, settings_.timeout, kernels());
  losses_->meet(kernels().connect);
  last_call_ = *met_call_ + 1;
  losses_->resume();
}

SurvivingHosts::~SurvivingHosts() {
  losses_.reset();
}

LossWatch::Kernels SurvivingHosts::kernels() {
  return {
      .stop = [this] { now_->stop(); },
      .calls = [this] { return ended_calls(); },
      .connect = [this](const Group& members, const Meeting& who) { connect(members, who); }};
}

// May run on the watch's thread, in place of the calling one, if that waits elsewhere.
void SurvivingHosts::connect(const Group& group, const Meeting& who) {
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  const std::lock_guard lock(memory_mutex_);
  if (now_) {
    add(before_, now_->stats());
    old_plans_.push_back(now_->network().id());
    now_.reset();
  }
  const bool is_new = last_call_ == kUnknownCalls;
  const Facts facts = gather_facts(
      group,
      who,
      {.last_call = is_new ? met_call_.value_or(kUnknownCalls) : last_call_,
       .config = sizes_of(settings_)}
  );
  met_call_ = facts.last_call;
  now_ = std::make_unique<HostsExchange>(
      group,
      config_among_members(settings_, network_name_),
      domains_,
      others_than(who.ranks, context_.num_ranks)
  );
  now_->count_waits_from(before_.wait_seconds);
}

// --- calls ---

template <class Call>
auto SurvivingHosts::run_call(Op op, const Call& call) {
  const LossWatch::Wait wait(losses_.get());
  running_op_ = op;
  check();
  if (losses_->has_left()) {
    go_on_without_ended(op);
  }
  const uint64_t before = last_call_;
  try {
    return call();
  } catch (const Error& error) {
    if (const std::optional<ErrorCode> harm = find_harm()) {
      while (last_call_ > before) {  // of the two that dispatch_routed() makes
        uncount_call();
      }
      end_by(op, error.code() == ErrorCode::kTimeout ? error.code() : *harm);
    }
    count_call();  // `call` was refused
    throw;
  }
}

Plan SurvivingHosts::make_plan(
    const Routing& routing, const PlanOptions& options, const CallOptions& call
) {
  return run_call(Op::kPlan, [&] {
    Plan plan = now_->make_plan(routing, options, call);
    count_call();
    return plan;
  });
}

Plan SurvivingHosts::dispatch_routed(
    const Routing& routing,
    const PlanOptions& options,
    const DispatchInput& in,
    const DispatchOutput& out,
    const CallOptions& call
) {
  return run_call(Op::kPlanAndDispatch, [&] {
    Plan plan = now_->make_plan(routing, options, call);
    count_call();
    now_->dispatch(plan, in, out, call);
    count_call();
    return plan;
  });
}

void SurvivingHosts::dispatch(
    const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
) {
  run_call(Op::kDispatch, [&] {
    check_plan(Op::kDispatch, plan, call);
    now_->dispatch(plan, in, out, call);
    count_call();
  });
}

void SurvivingHosts::combine(
    const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
) {
  run_call(Op::kCombine, [&] {
    check_plan(Op::kCombine, plan, call);
    now_->combine(plan, in, out, call);
    count_call();
  });
}

bool SurvivingHosts::refuse(Op op, const Refusal& reason, const CallOptions& call) {
  if (broken_ || losses_->has_news()) {
    return true;  // no rank makes this call
  }
  const LossWatch::Wait wait(losses_.get());
  const bool is_told = now_->refuse(op, reason, call);
  count_call();
  return is_told;
}

void SurvivingHosts::check_plan(Op op, const Plan& plan, const CallOptions& call) {
  try {
    WEFT_CHECK_ARG(
        context_,
        std::ranges::find(old_plans_, header_of(plan).exchange_id) == old_plans_.end(),
        "{}: ranks were lost or came back since the plan was made (make it again)",
        op_name(op)
    );
  } catch (const Error& error) {
    static_cast<void>(now_->refuse(op, error, call));
    throw;
  }
}

void SurvivingHosts::count_call() {
  ++last_call_;
  rounds_after_.push_back(now_->num_queued_rounds());
  if (rounds_after_.size() > kMostRunning) {
    rounds_after_.pop_front();
  }
}

void SurvivingHosts::uncount_call() {
  --last_call_;
  rounds_after_.pop_back();
}

void SurvivingHosts::check() {
  if (broken_) {
    std::rethrow_exception(broken_);
  }
  losses_->follow_caller();
  if (losses_->has_news()) {
    go_on_without_ended(running_op_);
  }
  try {
    now_->check();
    WEFT_CHECK(
        context_,
        !now_->has_thrown_fault(),
        ErrorCode::kPeerFailed,
        "{}: the GPU's part of a call between domains has failed",
        op_name(running_op_)
    );
  } catch (const Error& error) {
    end_by(running_op_, error.code());
  }
}

void SurvivingHosts::go_on_without_ended(Op op) {
  look_for_losses(op, ErrorCode::kPeerFailed);
  try {
    WEFT_RAISE(
        context_,
        ErrorCode::kPeerFailed,
        "{}: a rank has ended, and the others do not agree that it has",
        op_name(op)
    );
  } catch (const Error&) {
    set_broken();
    throw;
  }
}

std::optional<ErrorCode> SurvivingHosts::find_harm() const {
  try {
    now_->check();
  } catch (const Error& error) {
    return error.code();
  }
  return now_->has_thrown_fault() ? std::optional(ErrorCode::kPeerFailed) : std::nullopt;
}

void SurvivingHosts::end_by(Op op, ErrorCode cause) {
  if (cause != ErrorCode::kInterrupted) {
    look_for_losses(op, cause);
  }
  set_broken();
  throw;
}

HostsExchange& SurvivingHosts::now() const {
  if (losses_->has_news()) {
    static_cast<void>(losses_->has_answered());  // the watch may be about to make another
  }
  if (!now_) {
    std::rethrow_exception(broken_);
  }
  return *now_;
}

// --- losses ---

std::optional<LossWatch::Calls> SurvivingHosts::ended_calls() const {
  const auto whole = now_ ? now_->num_whole_rounds() : std::nullopt;
  if (!whole) {
    return std::nullopt;
  }
  LossWatch::Calls calls = {.last = last_call_, .first_void = last_call_ + 1};
  for (size_t i = rounds_after_.size(); i > 0 && rounds_after_[i - 1] > *whole; --i) {
    --calls.first_void;
  }
  return calls;
}

LossWatch::Calls SurvivingHosts::stopped_calls() {
  now_->stop();
  return awaited_calls();
}

LossWatch::Calls SurvivingHosts::awaited_calls() const {
  std::optional<LossWatch::Calls> calls;
  await_stopped(context_, settings_.timeout, [&] {
    calls = ended_calls();
    return calls.has_value();
  });
  return *calls;
}

void SurvivingHosts::look_for_losses(Op op, ErrorCode cause) {
  std::optional<LossWatch::Agreement> agreed;
  try {
    LossWatch::Calls own = {.last = last_call_, .first_void = last_call_ + 1};
    std::optional<int> late;
    if (!losses_->has_answered()) {
      const std::vector<int> silent =
          cause == ErrorCode::kTimeout ? now_->network().late() : std::vector<int>();
      late = silent.empty() ? std::nullopt : std::optional(silent.front());
      own = stopped_calls();
    }
    agreed = losses_->settle(op_name(op), cause, own, late);
  } catch (const Error&) {
    set_broken();
    throw;
  }
  if (agreed) {
    raise_losses(op, *agreed);
  }
}

void SurvivingHosts::raise_losses(Op op, const LossWatch::Agreement& agreed) {
  void_calls_ = agreed.void_calls;
  calls_behind_ = agreed.calls_behind;
  go_on_after(agreed.last);
  losses_->resume();
  losses_->raise(op_name(op), report(), settings_.on_loss);
}

// Counts the change as a call, so that calls before and after it differ.
void SurvivingHosts::go_on_after(uint64_t last_call) {
  last_call_ = last_call + 1;
  rounds_after_.clear();
}

void SurvivingHosts::set_broken() {
  broken_ = std::current_exception();
  losses_->leave();
}

CallReport SurvivingHosts::report() const {
  CallReport report = losses_->report();
  report.void_calls = void_calls_;
  report.calls_behind = calls_behind_;
  const PhysicalExperts shape = {context_.num_ranks, settings_.num_experts, 0};
  report.lost_experts =
      experts_without_copy(shape, {}, others_than(report.alive, context_.num_ranks));
  return report;
}

void SurvivingHosts::mask(std::span<const int> ranks) {
  check();
  check_masked(ranks, context_);
  losses_->mask(ranks);
}

bool SurvivingHosts::grow(int64_t /*max_tokens*/, int /*max_topk*/) {
  refuse_to_grow(settings_, context_);
}

// --- ranks that come back ---

std::string SurvivingHosts::invitation() const {
  return losses_->invitation(std::string(kPrefix) + network_name_);
}

// Ends, like a call, in the same way and with the same members on all ranks that are left.
void SurvivingHosts::readmit(std::span<const int> ranks) {
  const LossWatch::Wait wait(losses_.get());
  check();
  losses_->check_lost(ranks);
  if (ranks.empty()) {
    return;
  }
  std::optional<LossWatch::Agreement> agreed;
  std::vector<int> missing;
  try {
    const LossWatch::Calls own = awaited_calls();
    void_calls_ = calls_behind_ = 0;
    agreed = losses_->assemble("readmit", own);
    if (!agreed) {
      missing = losses_->readmit(ranks, kernels().connect);
    }
  } catch (const Error&) {
    set_broken();
    throw;
  }
  if (agreed) {  // others are in a call that has lost ranks
    raise_losses(running_op_, *agreed);
  }
  go_on_after(*met_call_);
  losses_->resume();
  if (const CallReport now = report(); settings_.on_loss && !now.lost.empty()) {
    settings_.on_loss(now);
  }
  losses_->check_back(ranks, missing);
}

// --- what it answers for ---

// Adds the waits that `now_` counts, which include those of the exchanges before.
void SurvivingHosts::add_waits(int64_t* sums, int64_t times, const CallOptions& call) {
  now().add_waits(sums, times, call);
}

// Any thread may call this. It asks nothing of the watch, which may be about to replace `now_`.
Buffer SurvivingHosts::allocate(const Tensor& shape) {
  const std::lock_guard lock(memory_mutex_);
  WEFT_CHECK(
      context_,
      now_ != nullptr,
      ErrorCode::kNotAvailable,
      "allocate: ranks were lost, and those that are left have not met again"
  );
  return now_->allocate(shape);
}

ExchangeStats SurvivingHosts::stats() const {
  ExchangeStats stats = before_;
  if (now_) {
    add(stats, now().stats());
  }
  return stats;
}

}  // namespace weft
