// SPDX-License-Identifier: Apache-2.0
// The CPU executor's exchange: what it owns, and the frame that every collective call runs in. The
// operations are in plan_call.cpp, dispatch_call.cpp and combine_call.cpp.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <vector>

#include "core/check.hpp"
#include "exchange/buffer_pool.hpp"
#include "exchange/call_board.hpp"
#include "exchange/cpu_call.hpp"
#include "exchange/exchange_state.hpp"
#include "plan/domain_traffic.hpp"
#include "plan/plan_data.hpp"
#include "weft/exchange.hpp"

namespace weft {

struct CpuExchange final : Exchange::State {
  CpuExchange(const Group& group, const ExchangeConfig& wanted)
      : CpuExchange(group, wanted, group.topology().domains) {}
  // `domains` as Topology::domains; others than the group's are for tests. The same on every rank.
  // `gpu`: PCI address of the GPU that it works for, whose neighbourhood its threads keep to.
  CpuExchange(
      const Group& group,
      const ExchangeConfig& wanted,
      std::vector<std::vector<int>> domains,
      const std::string& gpu = {}
  );
  ~CpuExchange() override;

  Plan make_plan(const Routing& routing, const PlanOptions& options, const CallOptions& call)
      override;
  void dispatch(
      const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
  ) override;
  void refuse_routed(const Error& reason, const CallOptions& call) override;
  void combine(
      const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
  ) override;
  void check() override {}
  [[nodiscard]] Buffer allocate(const Tensor& shape) override;
  void release_pooled() override { pool->release_unused(); }
  [[nodiscard]] int rank() const override { return context.rank; }
  [[nodiscard]] int num_ranks() const override { return context.num_ranks; }
  [[nodiscard]] const ExchangeConfig& config() const override { return settings; }
  [[nodiscard]] ExchangeStats stats() const override;
  [[nodiscard]] Footprint footprint() const override;

  // One collective call: `prepare()` looks at this rank's arguments alone and may refuse them,
  // which makes every rank throw and does no harm; `run(prepared)` talks to the others, and its
  // failures are final.
  template <class Prepare, class Run>
  auto run_call(Op op, const Prepare& prepare, const Run& run);

  // A peer that died, else one that left (perhaps because of a death), or -1 if none has within so
  // long.
  [[nodiscard]] int find_gone_peer(std::chrono::milliseconds patience) const;
  // The exception being handled, or that a peer is gone if the call failed because of it.
  [[nodiscard]] std::exception_ptr cause_of(Op op, const Error& error) const;

  [[nodiscard]] CallWord new_word(Op op) const;
  // Makes room for what peers write here in this call. Nobody writes there between calls.
  void reserve_staging(uint64_t bytes);
  [[nodiscard]] Target staging_at(uint64_t offset) const;
  // Makes reachable what the peers named in their words.
  void import_targets(std::span<const CallWord> words);
  // Token ranks shall store and read rows in the experts' ranks themselves (FanOut::kSource).
  [[nodiscard]] bool may_touch_peers() const;
  void count_crossings(const CrossingCount& count, int64_t row_bytes);
  [[nodiscard]] CpuRank cpu_rank() { return {*transport, *waiter, *workers, signals, settled}; }

  ExchangeConfig settings;  // "auto" and 0 resolved
  Context context;
  uint64_t id;
  std::shared_ptr<const Domains> domains;
  std::shared_ptr<Transport> transport;
  ControlMap control_map;
  SignalMap signals;
  std::vector<uint64_t> settled;
  std::unique_ptr<Waiter> waiter;
  std::unique_ptr<WorkerPool> workers;
  std::unique_ptr<CallBoard> board;
  std::shared_ptr<BufferPool> pool;
  Region control;
  std::vector<uint32_t> control_slots;  // [num_ranks] of each rank's control region
  Region staging;
  uint64_t call_number = 0;
  std::exception_ptr broken;  // why the exchange can no longer be used
  ExchangeStats counters;

 private:
  void connect(const Group& group);
};

template <class Prepare, class Run>
auto CpuExchange::run_call(Op op, const Prepare& prepare, const Run& run) {
  if (broken) {
    std::rethrow_exception(broken);
  }
  call_number = board->next_call();
  const auto prepared = [&] {
    try {
      return prepare();
    } catch (const std::exception& refusal) {  // no memory is a reason, too
      try {
        board->refuse(op, refusal.what());
      } catch (...) {  // the others never called: still this rank's own error is the one to throw
        broken = std::current_exception();
      }
      throw;
    }
  }();
  try {
    return run(prepared);
  } catch (const Error& error) {
    // Raised on every rank from the same call words, before anything was written.
    if (error.code() == ErrorCode::kInvalidArgument) {
      throw;
    }
    broken = cause_of(op, error);
    std::rethrow_exception(broken);
  } catch (...) {
    broken = std::current_exception();
    throw;
  }
}

}  // namespace weft
