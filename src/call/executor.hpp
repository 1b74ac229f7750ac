// SPDX-License-Identifier: Apache-2.0
// Interface of every executor. Exchange picks one by ExchangeConfig::device.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <unistd.h>
#include <utility>
#include <vector>

#include "call/signature.hpp"
#include "core/context.hpp"
#include "weft/exchange.hpp"

namespace weft {

inline constexpr std::string_view kNothingToPlace =
    "place_rows: the plan is not of the last call, or that call's output has its rows";

class Executor {
 public:
  Executor() = default;
  virtual ~Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Returns an exchange's executor; for tests, an exchange by an executor of no config.
  [[nodiscard]] static Executor& of(Exchange& exchange) { return *exchange.executor_; }
  [[nodiscard]] static Exchange exchange_by(std::unique_ptr<Executor> executor) {
    return Exchange(std::move(executor));
  }

  [[nodiscard]] virtual Plan make_plan(
      const Routing& routing, const PlanOptions& options, const CallOptions& call
  ) = 0;
  virtual void dispatch(
      const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
  ) = 0;
  // Makes a plan and dispatches by it. `options` say the number of rows.
  [[nodiscard]] virtual Plan dispatch_routed(
      const Routing& routing,
      const PlanOptions& options,
      const DispatchInput& in,
      const DispatchOutput& out,
      const CallOptions& call
  );
  // See Exchange::writes_alone().
  [[nodiscard]] virtual bool writes_alone(
      const Routing& /*routing*/,
      const PlanOptions& /*options*/,
      const DispatchInput& /*in*/,
      const CallOptions& /*call*/
  ) const {
    return false;
  }
  // See Exchange::place_rows().
  virtual void place_rows(
      const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
  );
  // See Exchange::receive(). Where every call receives at once there is nothing to do.
  virtual void receive(const Plan& /*plan*/, const CallOptions& /*call*/) {}
  [[nodiscard]] virtual bool is_open(const Plan& /*plan*/) const { return false; }
  // See Exchange::refuse(). Returns false if no other rank hears of it, as the stream is captured.
  virtual bool refuse(Op op, const Refusal& reason, const CallOptions& call) = 0;
  // See Exchange::is_outgrown().
  [[nodiscard]] virtual bool is_outgrown() const = 0;
  virtual void combine(
      const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
  ) = 0;
  virtual void check() = 0;
  // See Exchange::report() and what follows it.
  [[nodiscard]] virtual CallReport report() const;
  virtual void mask(std::span<const int> ranks);
  [[nodiscard]] virtual std::string invitation() const;
  virtual void readmit(std::span<const int> ranks);
  virtual bool grow(int64_t max_tokens, int max_topk);
  // See Exchange::add_waits(). `sums` [num_ranks] is memory of the exchange's device.
  virtual void add_waits(int64_t* sums, int64_t times, const CallOptions& call) = 0;
  // On a GPU, for `weft tune`: sets how many multiprocessors of each later dispatch and combine
  // write to peers (dispatch: push, combine: pre-reduce); the others fan out or sum. 0: by the
  // measured table.
  virtual void set_num_senders(int /*count*/) {}

  [[nodiscard]] virtual Buffer allocate(const Tensor& shape) = 0;
  virtual void release_pooled() = 0;

  // The process that made this executor.
  [[nodiscard]] pid_t maker() const { return maker_; }
  // This rank, as messages name it.
  [[nodiscard]] virtual const Context& context() const = 0;
  [[nodiscard]] virtual const ExchangeConfig& config() const = 0;
  [[nodiscard]] virtual ExchangeStats stats() const = 0;
  [[nodiscard]] virtual Footprint footprint() const = 0;

 private:
  const pid_t maker_ = ::getpid();
};

// Returns the error of a rank that could tell no other, as its stream is being captured.
[[nodiscard]] inline Error untold(const Error& error) {
  std::string text = error.what();
  const std::string note = " (the call was being captured: no other rank hears of it)";
  text.insert(std::min(text.rfind(" at "), text.size()), note);  // before the place in the source
  return {error.code(), text, error.rank(), error.where()};
}

[[nodiscard]] std::unique_ptr<Executor> make_cpu_exchange(
    const Group& group, const ExchangeConfig& config
);
// Makes an executor for GPUs (src/hosts/exchange.cpp); a build without CUDA throws Error
// (kUnsupported) instead. `domains`: as Topology::domains; others than the group's are for tests.
[[nodiscard]] std::unique_ptr<Executor> make_cuda_exchange(
    const Group& group, const ExchangeConfig& config, const std::vector<std::vector<int>>& domains
);

}  // namespace weft
