// SPDX-License-Identifier: Apache-2.0
// Parts that an executor that moves rows itself (src/hosts) leaves to the CPU executor of its whole
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

class Network : private CpuExchange {
 public:
  using CpuExchange::CpuExchange;  // collective

  [[nodiscard]] const Context& context() const { return context_; }
  [[nodiscard]] const Domains& domains() const { return *domains_; }
  [[nodiscard]] uint64_t id() const { return id_; }  // PlanData::exchange_id
  [[nodiscard]] const SignalMap& signals() const { return signals_; }
  [[nodiscard]] Validator validator(const ExchangeConfig& config) const {
    return {context_, config, id_};
  }
  [[nodiscard]] const std::string& transport_name() const { return settings_.transport; }
  // Name by which to make the transport again.
  [[nodiscard]] const std::string& full_transport_name() const { return transport_name_; }
  // Sets what messages call the transport from then on; `name` stays the caller's.
  void name_transport(std::string_view name) { context_.transport = name; }

  // --- calls; all collective ---
  using CpuExchange::is_outgrown;
  using CpuExchange::make_plan;
  using CpuExchange::refuse;
  using CpuExchange::run_call;
  // Within run_call: makes a word; swaps words with all ranks, whose targets are in reach then.
  using CpuExchange::new_word;
  [[nodiscard]] std::vector<CallWord> swap(const std::vector<CallWord>& words) {
    std::vector<CallWord> heard = board_->swap(words, {});
    import_targets(heard);
    return heard;
  }
  [[nodiscard]] uint64_t call_number() const { return call_number_; }
  // See CallBoard::late().
  [[nodiscard]] std::vector<int> late() const { return board_->late(); }
  void count(Op op, const CrossingCount& crossings, int64_t row_bytes) {
    ++(op == Op::kDispatch ? counters_.num_dispatches : counters_.num_combines);
    count_crossings(crossings, row_bytes);
  }

  // --- the end of the exchange ---
  using CpuExchange::check;
  [[noreturn]] void fail(const std::exception_ptr& cause) {
    broken_ = cause;
    std::rethrow_exception(cause);
  }
  using CpuExchange::break_off;
  using CpuExchange::cause_of;

  // --- memory that the network writes ---
  [[nodiscard]] std::byte* staging() const { return staging_.data; }
  [[nodiscard]] uint64_t staging_bytes() const { return staging_.ref.bytes; }
  using CpuExchange::reserve_staging;
  using CpuExchange::staging_at;
  // Stages in the caller's memory, lent to the network; or in none.
  void use_as_staging(std::byte* data, const RegionRef& lent) {
    staging_ = {.data = data, .ref = lent};
  }

  [[nodiscard]] CpuRank parts() { return cpu_rank(); }
  using CpuExchange::footprint;
  using CpuExchange::stats;
};

}  // namespace weft
