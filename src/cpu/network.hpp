// SPDX-License-Identifier: Apache-2.0
// What an executor that moves rows itself (src/hosts) leaves to the CPU executor of its whole
// group: plans, the handshake of each call, the memory that the network writes, and the network.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "call/validate.hpp"
#include "cpu/exchange.hpp"

namespace weft {

class Network {
 public:
  // `gpu`: PCI address of the GPU that it works for. Collective.
  Network(
      const Group& group,
      const ExchangeConfig& config,
      const std::vector<std::vector<int>>& domains,
      const std::string& gpu
  )
      : cpu_(std::make_unique<CpuExchange>(group, config, domains, gpu)) {}

  [[nodiscard]] const Context& context() const { return cpu_->context_; }
  [[nodiscard]] const Domains& domains() const { return *cpu_->domains_; }
  [[nodiscard]] const SignalMap& signals() const { return cpu_->signals_; }
  [[nodiscard]] Validator validator(const ExchangeConfig& config) const {
    return {context(), config, cpu_->id_};
  }
  [[nodiscard]] const std::string& transport_name() const { return cpu_->settings_.transport; }
  // What messages call the transport from then on; `name` stays the caller's.
  void name_transport(std::string_view name) { cpu_->context_.transport = name; }

  // --- calls; all collective ---
  [[nodiscard]] Plan make_plan(const Routing& routing, const PlanOptions& options) {
    return cpu_->make_plan(routing, options, {});
  }
  // As CpuExchange's own calls run: `prepare()` may refuse, `run(prepared)` fails for good.
  template <class Prepare, class Run>
  void run_call(Op op, const Prepare& prepare, const Run& run) {
    cpu_->run_call(op, prepare, run);
  }
  bool refuse(Op op, std::string_view reason, const CallOptions& call) {
    return cpu_->refuse(op, reason, call);
  }
  // Within run_call: what this rank says, and what all said to it, whose targets are in reach then.
  [[nodiscard]] CallWord new_word(const Call& call) const { return cpu_->new_word(call); }
  [[nodiscard]] std::vector<CallWord> swap(const std::vector<CallWord>& words) {
    std::vector<CallWord> heard = cpu_->board_->swap(words, {});
    cpu_->import_targets(heard);
    return heard;
  }
  [[nodiscard]] uint64_t call_number() const { return cpu_->call_number_; }
  void count(Op op, const CrossingCount& crossings, int64_t row_bytes) {
    ++(op == Op::kDispatch ? cpu_->counters_.num_dispatches : cpu_->counters_.num_combines);
    cpu_->count_crossings(crossings, row_bytes);
  }

  // --- the end of the exchange ---
  // Throws why the exchange can no longer be used.
  void check() const {
    if (cpu_->broken_) {
      std::rethrow_exception(cpu_->broken_);
    }
  }
  [[noreturn]] void fail(const std::exception_ptr& cause) {
    cpu_->broken_ = cause;
    std::rethrow_exception(cause);
  }
  [[nodiscard]] std::exception_ptr cause_of(Op op, const Error& error) const {
    return cpu_->cause_of(op, error);
  }

  // --- memory that the network writes ---
  [[nodiscard]] std::byte* staging() const { return cpu_->staging_.data; }
  [[nodiscard]] uint64_t staging_bytes() const { return cpu_->staging_.ref.bytes; }
  [[nodiscard]] Target staging_at(uint64_t offset) const { return cpu_->staging_at(offset); }
  void reserve_staging(uint64_t bytes) { cpu_->reserve_staging(bytes); }
  // Memory of the caller's, which has been lent to the network; or none.
  void use_as_staging(std::byte* data, const RegionRef& lent) {
    cpu_->staging_ = {.data = data, .ref = lent};
  }

  [[nodiscard]] CpuRank parts() { return cpu_->cpu_rank(); }
  [[nodiscard]] ExchangeStats stats() const { return cpu_->stats(); }
  [[nodiscard]] Footprint footprint() const { return cpu_->footprint(); }

 private:
  std::unique_ptr<CpuExchange> cpu_;
};

}  // namespace weft
