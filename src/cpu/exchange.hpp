// SPDX-License-Identifier: Apache-2.0
// The CPU executor's exchange: what it owns, and the frame that every collective call runs in. The
// operations are in plan/call.cpp, dispatch/call.cpp and combine/call.cpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "call/executor.hpp"
#include "core/check.hpp"
#include "cpu/call.hpp"
#include "cpu/protocol/buffer_pool.hpp"
#include "cpu/protocol/call_board.hpp"
#include "group/invitation.hpp"
#include "plan/build.hpp"
#include "plan/domain_traffic.hpp"
#include "plan/plan_data.hpp"
#include "plan/without.hpp"
#include "survive/survival.hpp"
#include "weft/exchange.hpp"

namespace weft {

// Surroundings of an exchange: domains, transport, and the executor that it works for.
struct CpuPlace {
  // Domains in the form of Topology::domains, the same on every rank; others than the group's are
  // for tests.
  std::vector<std::vector<int>> domains;
  TransportMaker make = make_transport;  // another is for tests
  // --- for an executor on GPUs (network.hpp) ---
  bool is_for_gpu = false;          // plans say what passes between domains even if there is one
  std::string gpu = {};             // its PCI address: threads keep to its neighbourhood
  std::vector<int> lost = {};       // ranks that take no part; `group` speaks for them
  std::function<void()> look = {};  // called while it waits; what it throws ends the wait

  [[nodiscard]] bool is_lost(int rank) const { return std::ranges::find(lost, rank) != lost.end(); }
};

class CpuExchange : public Executor {
 public:
  CpuExchange(const Group& group, const ExchangeConfig& wanted)
      : CpuExchange(group, wanted, CpuPlace{.domains = group.topology().domains}) {}
  CpuExchange(const Group& group, const ExchangeConfig& wanted, CpuPlace place);
  ~CpuExchange() override;

  Plan make_plan(const Routing& routing, const PlanOptions& options, const CallOptions& call)
      override;
  void dispatch(
      const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
  ) override;
  Plan dispatch_routed(
      const Routing& routing,
      const PlanOptions& options,
      const DispatchInput& in,
      const DispatchOutput& out,
      const CallOptions& call
  ) override;
  bool refuse(Op op, const Refusal& reason, const CallOptions& call) override;
  [[nodiscard]] bool is_outgrown() const override { return !broken_ && board_->is_outgrown(); }
  void combine(
      const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
  ) override;
  // Throws why the exchange can no longer be used.
  void check() override {
    if (broken_) {
      std::rethrow_exception(broken_);
    }
  }
  [[nodiscard]] CallReport report() const override;
  void mask(std::span<const int> ranks) override;
  [[nodiscard]] std::string invitation() const override;
  void readmit(std::span<const int> ranks) override;
  bool grow(int64_t max_tokens, int max_topk) override;
  void add_waits(int64_t* sums, int64_t times, const CallOptions& call) override;
  [[nodiscard]] Buffer allocate(const Tensor& shape) override;
  void release_pooled() override { pool_->release_unused(); }
  [[nodiscard]] const Context& context() const override { return context_; }
  [[nodiscard]] const ExchangeConfig& config() const override { return settings_; }
  [[nodiscard]] ExchangeStats stats() const override;
  [[nodiscard]] Footprint footprint() const override;

 protected:  // also for executors that leave plans and the network to this one (network.hpp)
  friend class RecordSwap;  // a step of make_plan
  friend struct CpuInside;  // for tests

  // One collective call: `prepare()` looks at this rank's arguments alone and may refuse them,
  // which makes every rank throw and does no harm; `run(prepared)` talks to the others, and its
  // failures are final, or both are done again by those that are left.
  template <class Prepare, class Run>
  void run_call(Op op, const Prepare& prepare, const Run& run);
  void run_attempts(Op op, const std::function<void()>& attempt);
  // Exception that prepare() threw, once the others have been told.
  struct Refused {
    std::exception_ptr reason;
  };
  void refuse_attempt(Op op, const Refusal& reason);
  // Ends the exchange, unless the attempt failed because ranks are lost.
  void settle(Op op, const Error& error);
  // Makes ranks that go on without lost ranks leave this one out, too.
  void leave();
  // Makes the exchange again among the ranks that are members now, after so many calls; a rank that
  // joins again hears the number from the others.
  void reconnect(uint64_t num_calls);
  // Repeats reconnect() until it works for all.
  void reconnect_at_last(uint64_t num_calls);
  void rejoin(const Group& group, const Invitation& invitation);
  void tell_losses() const;  // of the last call, to on_loss
  [[nodiscard]] IsLost is_lost() const {
    return [this](int rank) { return survival_ ? survival_->is_lost(rank) : place_.is_lost(rank); };
  }
  [[nodiscard]] std::vector<int> lost_ranks() const;  // ascending
  [[nodiscard]] std::vector<int> members() const;     // likewise
  // Returns those without a copy by `balance`.
  [[nodiscard]] std::vector<int32_t> lost_experts(const Balancing& balance) const;
  // Returns the part of a plan that concerns the ranks that are left. Valid until the members
  // change.
  [[nodiscard]] const PlanData& surviving(const Plan& plan);

  // Returns the exception being handled, or how a peer ended if that failed the call.
  [[nodiscard]] std::exception_ptr cause_of(Op op, const Error& error) const;
  // Ends the exchange. Tells the other ranks of an interrupt, which happens only here.
  [[noreturn]] void break_off(Op op, const Error& error);

  // Steps of make_plan (plan/call.cpp). `all`: by rank, for their arrivals.
  void swap_arrivals(CallWord word, const RankCounts& own, std::span<RankCounts> all);
  [[nodiscard]] Plan plan_by_counts(
      const RouteTable& routes, std::span<const RankCounts> counts, const PlanOptions& options
  );

  [[nodiscard]] CallWord new_word(const Call& call) const;
  // Makes room for what peers write here in this call. No rank writes there between calls.
  void reserve_staging(uint64_t bytes);
  [[nodiscard]] Target staging_at(uint64_t offset) const;
  // Makes reachable what the peers named in their words.
  void import_targets(std::span<const CallWord> words);
  // True if token ranks store and read rows in the experts' ranks (FanOut::kSource).
  [[nodiscard]] bool may_touch_peers(const PlanData& plan) const;
  void count_crossings(const CrossingCount& count, int64_t row_bytes);
  [[nodiscard]] CpuRank cpu_rank() {
    return {*transport_, *waiter_, *workers_, signals_, settled_, is_lost()};
  }

  ExchangeConfig settings_;  // "auto" and 0 resolved
  Context context_;
  uint64_t id_;
  CpuPlace place_;
  std::shared_ptr<const Domains> domains_;  // of those that are left
  std::shared_ptr<Transport> transport_;
  ControlMap control_map_;
  SignalMap signals_;
  std::vector<uint64_t> settled_;
  std::string transport_name_;              // by which it is made again
  std::unique_ptr<Survival> survival_;      // null: PeerLoss::kFail
  std::map<uint64_t, PlanData> surviving_;  // by the call that made them, of older members' plans
  uint64_t first_plan_ = 0;   // plans of earlier calls are unknown to a rank that joined again
  uint64_t last_change_ = 0;  // plans up to that call are of other members
  uint64_t epoch_ = 0;        // of domains_
  Balancing balance_;         // as given to the last plan; none once ranks joined again
  std::unique_ptr<Waiter> waiter_;
  std::unique_ptr<WorkerPool> workers_;
  std::unique_ptr<CallBoard> board_;
  std::shared_ptr<BufferPool> pool_;
  Region control_;
  std::vector<uint32_t> control_slots_;  // [num_ranks] of each rank's control region
  Region staging_;
  uint64_t call_number_ = 0;
  std::exception_ptr broken_;         // why the exchange can no longer be used
  bool is_second_part_ = false;       // the next call is that of dispatch_routed()
  bool is_growing_ = false;           // in grow(), whose sizes are dropped if it fails
  std::exception_ptr failed_growth_;  // why all ranks give up this grow()
  ExchangeStats counters_;

  // Makes room for the signals of so large calls.
  void set_sizes(int64_t max_tokens, int max_topk);
  void connect(const Group& group, uint64_t num_calls);
  void make_waiter();
};

template <class Prepare, class Run>
void CpuExchange::run_call(Op op, const Prepare& prepare, const Run& run) {
  const auto attempt = [&] {
    const auto prepared = [&] {
      try {
        return prepare();
      } catch (const std::exception& reason) {  // no memory is a reason, too
        const std::exception_ptr refused = std::current_exception();
        refuse_attempt(op, reason);
        throw Refused{refused};
      }
    }();
    call_number_ = board_->next_call();
    run(prepared);
  };
  run_attempts(op, std::ref(attempt));
}

}  // namespace weft
