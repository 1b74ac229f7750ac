// SPDX-License-Identifier: Apache-2.0
// CpuExchange among fewer and fewer ranks.
#include <algorithm>

#include "cpu/exchange.hpp"
#include "group/control_plane.hpp"

namespace weft {

void CpuExchange::settle(Op op, const Error& error) {
  const bool may_be_loss =
      error.code() == ErrorCode::kPeerFailed || error.code() == ErrorCode::kTimeout ||
      error.code() == ErrorCode::kTransport || error.code() == ErrorCode::kNotAvailable;
  bool is_loss = false;
  try {
    is_loss = survival_ && may_be_loss && survival_->settle(op_name(op));
  } catch (const Error&) {  // this rank is the one that was lost
    broken_ = std::current_exception();
    throw;
  }
  if (!is_loss) {
    break_off(op, error);
  }
}

void CpuExchange::reconnect(uint64_t num_calls) {
  const Group group = survival_->group();
  transport_->close();  // whoever still waits for this rank in the attempt that was cut short
  group.barrier();      // nobody who is left is in that any more
  if (survival_->has_strays()) {
    pool_->withdraw();
  }
  surviving_.clear();
  control_ = {};
  staging_ = {};
  std::ranges::fill(settled_, 0);
  transport_ = make_(
      settings_.transport,
      group,
      signals_.size(),
      {.timeout = settings_.timeout, .members = survival_->members()}
  );
  waiter_->follow(*transport_);
  pool_ = std::make_shared<BufferPool>(transport_);
  connect(group, num_calls);
}

const PlanData& CpuExchange::surviving(const Plan& plan) {
  const PlanData& whole = contents_of(plan);
  if (!survival_ || survival_->epoch() == 0 || whole.exchange_id != id_ ||
      !has_traffic_with(is_lost(), whole)) {
    return whole;
  }
  const auto found = surviving_.find(whole.call);
  return found != surviving_.end()
             ? found->second
             : surviving_.emplace(whole.call, without(is_lost(), whole)).first->second;
}

CallReport CpuExchange::report() const {
  if (!survival_) {
    return Executor::report();
  }
  return {
      .epoch = survival_->epoch(),
      .alive = survival_->members(),
      .lost = survival_->lost_in_call()};
}

void CpuExchange::mask(std::span<const int> ranks) {
  if (!survival_) {
    Executor::mask(ranks);
    return;
  }
  check();
  for (const int rank : ranks) {
    WEFT_CHECK_ARG(
        context_,
        rank >= 0 && rank < context_.num_ranks && rank != context_.rank,
        "mask: rank {} (expected others of the {} ranks)",
        rank,
        context_.num_ranks
    );
  }
  survival_->give_up(ranks);
}

}  // namespace weft
