// SPDX-License-Identifier: Apache-2.0
// GPUs of several domains that go on without ranks that are lost (PeerLoss::kShrink). When that
// happens, or when new processes come, the ranks that are left make another HostsExchange, into
// whose memory no lost rank writes. Nothing is made again inside a call, as on GPUs of one domain
// (cuda/exchange/loss_watch.hpp).
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "call/executor.hpp"
#include "cuda/exchange/loss_watch.hpp"
#include "hosts/exchange.hpp"

namespace weft {

class SurvivingHosts final : public Executor {
 public:
  // Opens the exchange like HostsExchange. A rank of Group::rejoin() waits for the others to call
  // readmit().
  SurvivingHosts(
      const Group& group, const ExchangeConfig& wanted, const std::vector<std::vector<int>>& domains
  );
  ~SurvivingHosts() override;

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
  void combine(
      const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
  ) override;
  bool refuse(Op op, const Refusal& reason, const CallOptions& call) override;
  [[nodiscard]] bool is_outgrown() const override { return false; }  // it keeps its size
  void check() override;
  [[nodiscard]] CallReport report() const override;
  void mask(std::span<const int> ranks) override;
  [[nodiscard]] std::string invitation() const override;
  void readmit(std::span<const int> ranks) override;
  bool grow(int64_t max_tokens, int max_topk) override;
  void add_waits(int64_t* sums, int64_t times, const CallOptions& call) override;
  void set_num_senders(int count) override { now().set_num_senders(count); }
  [[nodiscard]] Buffer allocate(const Tensor& shape) override;
  void release_pooled() override { now().release_pooled(); }
  [[nodiscard]] const Context& context() const override { return context_; }
  [[nodiscard]] const ExchangeConfig& config() const override { return settings_; }
  [[nodiscard]] ExchangeStats stats() const override;
  [[nodiscard]] Footprint footprint() const override { return now().footprint(); }

 private:
  // Returns the exchange of the ranks that are left, which no other thread replaces until this one
  // has made a call. Throws why there is none.
  [[nodiscard]] HostsExchange& now() const;
  // See LossWatch::Connect.
  void connect(const Group& group, const Meeting& who);
  [[nodiscard]] LossWatch::Kernels kernels();

  // Makes one call of `now_`, or two at once, which `call` counts if they have been made; a refused
  // call counts, too. Throws Error (kRanksLost) where ranks were lost before the call, or in it
  // before it could be made.
  template <class Call>
  auto run_call(Op op, const Call& call);
  // Throws Error (kInvalidArgument), on all ranks, for a plan of other members.
  void check_plan(Op op, const Plan& plan, const CallOptions& call);
  void count_call();
  void uncount_call();
  // Returns why `now_` cannot be used any more; nothing: it can.
  [[nodiscard]] std::optional<ErrorCode> find_harm() const;
  // Ends a call for `cause`: throws Error (kRanksLost), or the exception being handled, and that
  // again at every further call.
  [[noreturn]] void end_by(Op op, ErrorCode cause);
  // The watch has seen a rank end: throws Error (kRanksLost), or PeerError if nothing can be done.
  [[noreturn]] void go_on_without_ended(Op op);
  // Does what CudaExchange::look_for_losses() does, where the watch has news or a call has failed.
  // After it returns, this exchange cannot be used any more.
  void look_for_losses(Op op, ErrorCode cause);
  [[noreturn]] void raise_losses(Op op, const LossWatch::Agreement& agreed);
  // Numbers the next calls after `last_call`.
  void go_on_after(uint64_t last_call);
  // Returns how this rank's calls have ended; nothing: they have not yet.
  [[nodiscard]] std::optional<LossWatch::Calls> ended_calls() const;
  // Waits until the calls have ended, and returns how. Throws TimeoutError.
  [[nodiscard]] LossWatch::Calls awaited_calls() const;
  // Ends the calls, and returns how they have ended. Throws TimeoutError.
  [[nodiscard]] LossWatch::Calls stopped_calls();
  // Makes every further call throw the exception being handled.
  void set_broken();

  ExchangeConfig settings_;  // "auto" resolved
  Context context_;
  std::vector<std::vector<int>> domains_;
  std::string network_name_;            // the transport between domains, as asked for
  std::unique_ptr<HostsExchange> now_;  // null: it could not be made
  std::mutex memory_mutex_;             // guards now_ between connect() and allocate()
  // The last call of this rank, counted over all its exchanges; void calls, and one for each change
  // of the members, count.
  uint64_t last_call_ = 0;
  std::optional<uint64_t> met_call_;  // last of the rank that was furthest in connect()
  std::deque<uint64_t>
      rounds_after_;  // HostsExchange::num_queued_rounds() after each of the last calls
  std::vector<uint64_t> old_plans_;  // PlanData::exchange_id of plans of other members
  Op running_op_ = Op::kNone;
  ExchangeStats before_;  // of the exchanges before this one
  std::exception_ptr broken_;
  int64_t void_calls_ = 0;             // CallReport's
  int64_t calls_behind_ = 0;           // likewise
  std::unique_ptr<LossWatch> losses_;  // last: its thread uses the others
};

}  // namespace weft
