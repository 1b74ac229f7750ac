// SPDX-License-Identifier: Apache-2.0
// The calls that `weft bench` times on GPUs: one rank's exchange, its tensors, and whether what
// comes out is right.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <vector>

#include "bench/options.hpp"
#include "bench/run.hpp"
#include "core/gpu/stream.hpp"
#include "measure/bench_check.hpp"
#include "weft/exchange.hpp"

namespace weft::program {

class GpuCalls {
 public:
  // Collective. The arguments must stay.
  GpuCalls(const Group& group, const BenchOptions& options, const BenchRouting& routing);
  GpuCalls(const GpuCalls&) = delete;
  GpuCalls& operator=(const GpuCalls&) = delete;

  // Of the calls that follow; 0: by themselves.
  void take(int num_sms, int num_senders) {
    num_sms_ = num_sms;
    num_senders_ = num_senders;
  }

  // Queues one call; of the routing `version`.
  void run(BenchOp op, size_t version);
  // With a row budget, as a graph needs it.
  [[nodiscard]] Plan plan_in_budget(size_t version);
  [[nodiscard]] Plan plan_and_dispatch(size_t version);

  // Collective: of all ranks. Plans in full; of the rows a sample, every element of them.
  [[nodiscard]] Verdict check();

  [[nodiscard]] Exchange& exchange() { return exchange_; }
  [[nodiscard]] const Exchange& exchange() const { return exchange_; }
  [[nodiscard]] const std::vector<Plan>& plans() const { return plans_; }  // by version
  [[nodiscard]] cudaStream_t stream() const { return own_stream_.get(); }
  [[nodiscard]] int gpu() const { return device_.index; }
  [[nodiscard]] int64_t row_bytes() const;
  [[nodiscard]] int64_t max_tokens() const;  // of any rank
  // Without a number of rows: exactly as many as there are.
  [[nodiscard]] PlanOptions plan_options(std::optional<int64_t> row_budget = {}) const {
    PlanOptions options = options_.plan_options();
    options.row_budget = row_budget;
    return options;
  }

 private:
  [[nodiscard]] int64_t num_tokens() const { return routing_.versions[0][rank_].num_tokens; }
  [[nodiscard]] ExchangeConfig config() const;
  [[nodiscard]] CallOptions call() const {
    return {
        .stream = stream(),
        .num_sms = num_sms_,
        .num_senders = num_senders_,
        .copy_engines = options_.is_copied};
  }
  [[nodiscard]] Routing routing_of(size_t version) const;
  // In memory that peers do not know.
  Tensor plain(int64_t rows) { return plain(rows, options_.hidden, options_.dtype); }
  Tensor plain(int64_t rows, int64_t cols, DType dtype);
  [[nodiscard]] DispatchInput input(int64_t num_tokens) const;
  [[nodiscard]] DispatchOutput output(int64_t num_rows) const;
  void dispatch(const Plan& plan);
  void combine(const Plan& plan);
  [[nodiscard]] bool is_dispatch_right(const std::vector<Plan>& expected) const;

  const Group& group_;
  const BenchOptions& options_;
  const BenchRouting& routing_;
  size_t rank_;
  Device device_;
  GpuStream own_stream_;
  Exchange exchange_;
  int num_sms_ = 0;
  int num_senders_ = 0;
  std::vector<std::shared_ptr<std::byte>> indices_;  // by version
  std::vector<Plan> plans_;                          // by version
  int64_t max_rows_ = 1;
  std::vector<std::shared_ptr<std::byte>> memory_;
  Buffer rows_;
  Tensor staged_rows_;
  Tensor experts_;
  Tensor x_;
  Tensor scales_;
  Tensor row_scales_;
  Tensor out_;
};

}  // namespace weft::program
