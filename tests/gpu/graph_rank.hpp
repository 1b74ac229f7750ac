// SPDX-License-Identifier: Apache-2.0
// plan, dispatch and combine of one rank, captured once in a CUDA graph.
#pragma once

#include <fmt/format.h>

#include <cuda_runtime_api.h>

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "core/gpu/check.hpp"
#include "core/gpu/device_memory.hpp"
#include "support/case_data.hpp"
#include "support/case_memory.hpp"
#include "support/compare.hpp"
#include "support/stream.hpp"

namespace weft::test {

// CUDA graph of what the calls of `work` put into a stream, to be run again and again.
class Graph {
 public:
  Graph(const TestStream& stream, const std::function<void()>& work)
      : stream_(static_cast<cudaStream_t>(stream.get())) {
    cudaGraph_t graph = nullptr;
    WEFT_CUDA(Context{}, cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    try {
      work();
    } catch (...) {
      static_cast<void>(cudaStreamEndCapture(stream_, &graph));
      throw;
    }
    WEFT_CUDA(Context{}, cudaStreamEndCapture(stream_, &graph));
    WEFT_CUDA(Context{}, cudaGraphGetNodes(graph, nullptr, &num_nodes_));
    WEFT_CUDA(Context{}, cudaGraphInstantiate(&graph_, graph, 0));
    WEFT_CUDA(Context{}, cudaGraphDestroy(graph));
    // Else the first launch does it, and may wait for the whole GPU, where kernels of other ranks
    // wait for this one.
    WEFT_CUDA(Context{}, cudaGraphUpload(graph_, stream_));
    stream.wait();
  }
  ~Graph() { static_cast<void>(cudaGraphExecDestroy(graph_)); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() const { WEFT_CUDA(Context{}, cudaGraphLaunch(graph_, stream_)); }
  // Launches and whatever else the calls have queued.
  [[nodiscard]] size_t num_nodes() const { return num_nodes_; }

 private:
  cudaStream_t stream_;
  size_t num_nodes_ = 0;
  cudaGraphExec_t graph_ = nullptr;
};

// One rank's tensors, whose content changes while their places stay.
class GraphRank {
 public:
  GraphRank(Exchange& exchange, const CaseData& first)
      : exchange_(exchange), rank_(static_cast<size_t>(exchange.rank())), memory_(exchange) {
    const RankCall& dispatch = first.calls[0][rank_];
    const RankCall& combine = first.calls[1][rank_];
    idx_ = &memory_.add(first.routing[rank_].topk_idx);
    weights_ = &memory_.add(first.routing[rank_].weights);
    x_ = &memory_.add(dispatch.x);
    x_weights_ = &memory_.add(dispatch.weights);
    rows_ = &memory_.add_output(dispatch.rows, first.spec.output == OutputMemory::kDirect);
    row_weights_ = &memory_.add_output(dispatch.row_weights);
    y_ = &memory_.add(combine.rows);
    y_weights_ = &memory_.add(combine.row_weights);
    sums_ = &memory_.add_output(combine.x);
    sum_weights_ = &memory_.add_output(combine.weights);
    memory_.upload();
  }

  void make_calls(const CaseData& data, void* stream) {
    send(data, stream);
    bring(data, stream);
  }

  // The plan and the dispatch by it.
  void send(const CaseData& data, void* stream) {
    const CallOptions call = call_of(data, stream);
    const Routing routing = {.topk_idx = idx_->tensor(), .weights = weights_->tensor()};
    const PlanOptions& options = data.routing[rank_].options;
    const DispatchInput in = {.x = x_->tensor(), .weights = x_weights_->tensor()};
    const DispatchOutput out = {.rows = rows_->tensor(), .weights = row_weights_->tensor()};
    plan_.reset();
    if (data.spec.is_routed) {
      plan_.emplace(exchange_.dispatch(routing, options, in, out, call));
    } else {
      plan_.emplace(exchange_.plan(routing, options, call));
      exchange_.dispatch(*plan_, in, out, call);
    }
  }

  // The combine by that plan.
  void bring(const CaseData& data, void* stream) {
    exchange_.combine(
        *plan_,
        {.rows = y_->tensor(), .weights = y_weights_->tensor(), .scale = data.spec.scale},
        {.x = sums_->tensor(), .weights = sum_weights_->tensor()},
        call_of(data, stream)
    );
  }

  // The host holds the plan no longer, as callers that drop a handle after the capture.
  void drop_plan() { plan_.reset(); }

  void load(const CaseData& data) {
    const RankCall& dispatch = data.calls[0][rank_];
    const RankCall& combine = data.calls[1][rank_];
    memory_.replace(*idx_, data.routing[rank_].topk_idx);
    memory_.replace(*weights_, data.routing[rank_].weights);
    memory_.replace(*x_, dispatch.x);
    memory_.replace(*x_weights_, dispatch.weights);
    memory_.replace(*y_, combine.rows);
    memory_.replace(*y_weights_, combine.row_weights);
    for (const CaseMemory::Placed* out : {rows_, row_weights_, sums_, sum_weights_}) {
      const ConstTensor view = out->result().view();
      memory_.replace(*out, Matrix(view.dtype, view.rows, view.cols));
    }
    memory_.upload();
  }

  [[nodiscard]] std::string difference(const CaseData& data) {
    memory_.download();
    const RankCall& dispatch = data.calls[0][rank_];
    const RankCall& combine = data.calls[1][rank_];
    for (const std::string& text :
         {shape_difference(data.plans[rank_]),
          first_difference("rows", rows_->result().view(), dispatch.rows.view()),
          first_difference("weights", row_weights_->result().view(), dispatch.row_weights.view()),
          first_difference_but_nan("x", sums_->result().view(), combine.x.view()),
          first_difference("x weights", sum_weights_->result().view(), combine.weights.view())}) {
      if (!text.empty()) {
        return fmt::format("rank {}: {} {}", rank_, text, describe(data.setup, data.spec));
      }
    }
    return {};
  }

 private:
  [[nodiscard]] static CallOptions call_of(const CaseData& data, void* stream) {
    CallOptions call = {.stream = stream};
    call.copy_engines = data.setup.copy_engines;  // but not in a capture
    return call;
  }

  template <class T>
  [[nodiscard]] T read(const T* from) const {
    T value;
    copy_between(
        reinterpret_cast<std::byte*>(&value),
        {},
        reinterpret_cast<const std::byte*>(from),
        exchange_.config().device,
        sizeof value
    );
    return value;
  }

  // Returns how the output's shape on the device differs from `expected`; empty if it does not.
  [[nodiscard]] std::string shape_difference(const Plan& expected) const {
    const Plan::OnDevice device = plan_->on_device();
    const std::span<const int32_t> placement = expected.placement();
    for (size_t i = 0; i < placement.size(); ++i) {
      if (const int32_t expert = read(device.placement + i); expert != placement[i]) {
        return fmt::format("replica {} is of {}, expected {}", i, expert, placement[i]);
      }
    }
    if (read(device.num_rows) != expected.num_rows()) {
      return fmt::format("{} rows, expected {}", read(device.num_rows), expected.num_rows());
    }
    if (read(device.overflow) != static_cast<int32_t>(expected.overflow())) {
      return fmt::format("overflow is {}", read(device.overflow));
    }
    for (int i = 0; i < expected.num_local_experts(); ++i) {
      const int64_t rows = read(device.rows_per_expert + i);
      const int64_t wanted = expected.rows_per_expert()[static_cast<size_t>(i)];
      if (expected.layout() != Layout::kRankMajor && rows != wanted) {
        return fmt::format("expert {} has {} rows, expected {}", i, rows, wanted);
      }
    }
    return {};
  }

  Exchange& exchange_;
  size_t rank_;
  CaseMemory memory_;
  std::optional<Plan> plan_;
  const CaseMemory::Placed* idx_;
  const CaseMemory::Placed* weights_;
  const CaseMemory::Placed* x_;
  const CaseMemory::Placed* x_weights_;
  const CaseMemory::Placed* rows_;
  const CaseMemory::Placed* row_weights_;
  const CaseMemory::Placed* y_;
  const CaseMemory::Placed* y_weights_;
  const CaseMemory::Placed* sums_;
  const CaseMemory::Placed* sum_weights_;
};

}  // namespace weft::test
