// SPDX-License-Identifier: Apache-2.0
// Loss and return of ranks of a CpuExchange.
#include <algorithm>
#include <array>
#include <numeric>
#include <span>
#include <utility>

#include "call/validate.hpp"
#include "core/clock.hpp"
#include "cpu/exchange.hpp"
#include "group/control_plane.hpp"
#include "plan/balance/balance.hpp"

namespace weft {

void CpuExchange::settle(Op op, const Error& error) {
  const bool may_be_loss =
      error.code() == ErrorCode::kPeerFailed || error.code() == ErrorCode::kTimeout ||
      error.code() == ErrorCode::kTransport || error.code() == ErrorCode::kNotAvailable;
  bool is_loss = false;
  try {
    is_loss = survival_ && may_be_loss && survival_->settle(op_name(op), error.code());
  } catch (const Error&) {  // this rank is the one that was lost
    broken_ = std::current_exception();
    throw;
  }
  const bool is_growing = std::exchange(is_growing_, false);
  if (!is_loss && is_growing) {
    failed_growth_ = std::current_exception();
  } else if (!is_loss) {
    break_off(op, error);
  }
}

namespace {

constexpr uint64_t kUnknownCalls = ~uint64_t{0};

struct Sizes {
  int64_t max_tokens = 0;
  int64_t max_topk = 0;

  [[nodiscard]] Sizes with(const Sizes& other) const {
    return {std::max(max_tokens, other.max_tokens), std::max(max_topk, other.max_topk)};
  }
  bool operator==(const Sizes&) const = default;
};

Sizes sizes_of(const ExchangeConfig& config) {
  return {config.max_tokens, config.max_topk};
}

// Facts that members tell each other before they connect. Ranks that join again learn the number of
// calls and check that theirs is the others' exchange; all take the largest sizes of any.
struct Meeting {
  uint64_t num_calls = 0;
  std::array<int64_t, 2> config = {};
  Sizes sizes;
};

Meeting meet(const Group& group, const std::vector<int>& members, const Meeting& own) {
  const std::vector<Bytes> blocks = group.all_gather(std::as_bytes(std::span(&own, 1)));
  Meeting known = own;
  for (const int rank : members) {
    const auto at = static_cast<size_t>(rank);
    const auto theirs = block_value<Meeting>(blocks[at], at, context_of(group));
    const Sizes most = known.sizes.with(theirs.sizes);
    known = known.num_calls == kUnknownCalls ? theirs : known;
    known.sizes = most;
  }
  if (known.num_calls == kUnknownCalls) {  // ranks that knew are lost, and all plans with them
    known.num_calls = 0;
  }
  return known;
}

}  // namespace

void CpuExchange::reconnect(uint64_t num_calls) {
  const Group group = survival_->group();
  if (transport_) {
    std::ranges::for_each(lost_ranks(), [&](int rank) { transport_->give_up(rank); });
    transport_->close();  // ends waits for this rank in the attempt cut short
  }
  const std::array<int64_t, 2> config = {settings_.hidden, settings_.num_experts};
  const Meeting own = {.num_calls = num_calls, .config = config, .sizes = sizes_of(settings_)};
  // When meet() returns, no member is in that attempt.
  const Meeting met = meet(group, survival_->members(), own);
  WEFT_CHECK_ARG(
      context_,
      met.config == config,
      "rejoin: hidden, num_experts = {} (those of the others: {})",
      fmt::join(config, ", "),
      fmt::join(met.config, ", ")
  );
  if (pool_ && survival_->takes_strays()) {
    pool_->withdraw();
  }
  surviving_.clear();
  if (epoch_ != survival_->epoch()) {
    epoch_ = survival_->epoch();
    last_change_ = met.num_calls;
    domains_ = std::make_shared<const Domains>(place_.domains, context_.rank, is_lost());
  }
  control_ = {};
  staging_ = {};
  set_sizes(met.sizes.max_tokens, static_cast<int>(met.sizes.max_topk));
  transport_ = place_.make(
      transport_name_,
      group,
      signals_.size(),
      {.timeout = settings_.timeout, .members = survival_->members()}
  );
  if (waiter_) {
    waiter_->follow(*transport_, signals_.interrupted(0));
  } else {
    make_waiter();
  }
  pool_ = std::make_shared<BufferPool>(transport_);
  connect(group, met.num_calls);
  if (survival_->takes_newcomers()) {
    first_plan_ = met.num_calls + 1;
    balance_ = {};
  }
}

void CpuExchange::reconnect_at_last(uint64_t num_calls) {
  for (bool is_over = false; !is_over;) {
    try {
      reconnect(num_calls);
      is_over = survival_->finish_call("readmit");
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kInvalidArgument ||
          !survival_->settle("readmit", error.code())) {
        broken_ = std::current_exception();
        leave();
        throw;
      }
    }
  }
}

void CpuExchange::rejoin(const Group& group, const Invitation& invitation) {
  transport_name_ = invitation.transport;
  settings_.transport = transport_name_.substr(0, transport_name_.find(':'));
  context_.transport = settings_.transport;
  workers_ = std::make_unique<WorkerPool>(settings_.num_threads);
  // The others may drop this rank before all have connected, by late news of one before it.
  for (const Deadline deadline(settings_.timeout);;) {
    try {
      survival_ = std::make_unique<Survival>(group, context_, settings_.timeout);
      survival_->begin_call();
      reconnect_at_last(kUnknownCalls);
      return;
    } catch (const PeerError&) {
      if (deadline.has_passed()) {
        throw;
      }
      broken_ = nullptr;
      board_.reset();
      waiter_.reset();  // they refer to the old survival_
    }
  }
}

// Ends like a call: in the same way, and with the same members, on all that are left.
void CpuExchange::readmit(std::span<const int> ranks) {
  if (!survival_) {
    Executor::readmit(ranks);
    return;
  }
  check();
  survival_->check_lost(ranks);
  if (ranks.empty()) {
    return;
  }
  const uint64_t num_calls = board_->last_call();
  survival_->begin_call();
  const std::vector<int> missing = survival_->readmit(ranks);
  reconnect_at_last(num_calls);
  tell_losses();
  survival_->check_back(ranks, missing);
}

bool CpuExchange::grow(int64_t max_tokens, int max_topk) {
  if (!survival_) {
    return Executor::grow(max_tokens, max_topk);
  }
  struct Wish {
    Sizes sizes;
    int64_t has_failed = 0;  // this growth, on a rank that lost no other
  };
  const Sizes before = sizes_of(settings_);
  const Sizes own = before.with({max_tokens, max_topk});
  failed_growth_ = nullptr;
  run_attempts(Op::kPlan, [&] {
    const Wish wish = {.sizes = own, .has_failed = failed_growth_ ? 1 : 0};
    const std::vector<Bytes> blocks =
        survival_->group().all_gather(std::as_bytes(std::span(&wish, 1)));
    Sizes most = own;
    for (const int rank : survival_->members()) {
      const auto at = static_cast<size_t>(rank);
      const auto theirs = block_value<Wish>(blocks[at], at, context_);
      if (failed_growth_) {
        throw Refused{failed_growth_};
      }
      WEFT_CHECK_ARG(context_, theirs.has_failed == 0, "grow: rank {} could not", rank);
      most = most.with(theirs.sizes);
    }
    const Sizes now = sizes_of(settings_);
    if (now.with(most) != now) {
      ExchangeConfig config = settings_;
      config.max_tokens = most.max_tokens;
      config.max_topk = static_cast<int>(most.max_topk);
      validate_config(config, context_);
      set_sizes(config.max_tokens, config.max_topk);
      is_growing_ = true;
      try {
        reconnect(board_->last_call());
      } catch (const Error&) {
        set_sizes(now.max_tokens, static_cast<int>(now.max_topk));
        throw;
      }
      is_growing_ = false;
    }
  });
  return sizes_of(settings_) != before;
}

std::string CpuExchange::invitation() const {
  return survival_ ? survival_->invitation(transport_name_) : Executor::invitation();
}

const PlanData& CpuExchange::surviving(const Plan& plan) {
  const PlanData& whole = contents_of(plan);
  WEFT_CHECK_ARG(
      context_,
      whole.exchange_id != id_ || whole.call >= first_plan_,
      "plan {} is from before ranks joined again, in call {}",
      whole.call,
      first_plan_ - 1
  );
  // Evaluates to the same value on every rank, whether or not it exchanged rows with a lost one.
  const bool is_forwarded_otherwise = whole.between != nullptr && whole.call <= last_change_;
  if (!survival_ || survival_->epoch() == 0 || whole.exchange_id != id_ ||
      !(is_forwarded_otherwise || has_traffic_with(is_lost(), whole))) {
    return whole;
  }
  const auto found = surviving_.find(whole.call);
  return found != surviving_.end()
             ? found->second
             : surviving_.emplace(whole.call, without(is_lost(), whole)).first->second;
}

Plan CpuExchange::dispatch_routed(
    const Routing& routing,
    const PlanOptions& options,
    const DispatchInput& in,
    const DispatchOutput& out,
    const CallOptions& call
) {
  Plan plan = make_plan(routing, options, call);
  is_second_part_ = true;
  dispatch(plan, in, out, call);
  return plan;
}

CallReport CpuExchange::report() const {
  if (!survival_) {
    return Executor::report();
  }
  return {
      .epoch = survival_->epoch(),
      .alive = survival_->members(),
      .lost = survival_->lost_in_call(),
      .lost_experts = lost_experts(balance_)};
}

std::vector<int> CpuExchange::lost_ranks() const {
  std::vector<int> lost;
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    if (is_lost()(rank)) {
      lost.push_back(rank);
    }
  }
  return lost;
}

std::vector<int> CpuExchange::members() const {
  std::vector<int> members(static_cast<size_t>(context_.num_ranks));
  std::iota(members.begin(), members.end(), 0);
  std::erase_if(members, is_lost());
  return members;
}

std::vector<int32_t> CpuExchange::lost_experts(const Balancing& balance) const {
  const PhysicalExperts shape = {context_.num_ranks, settings_.num_experts, balance.replicas};
  return experts_without_copy(shape, balance.placement, lost_ranks());
}

void CpuExchange::tell_losses() const {
  if (settings_.on_loss && survival_ && !survival_->lost_in_call().empty()) {
    settings_.on_loss(report());
  }
}

void CpuExchange::mask(std::span<const int> ranks) {
  if (!survival_) {
    Executor::mask(ranks);
    return;
  }
  check();
  check_masked(ranks, context_);
  survival_->give_up(ranks);
}

}  // namespace weft
