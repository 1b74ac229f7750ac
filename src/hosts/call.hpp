// SPDX-License-Identifier: Apache-2.0
// Common parts of a dispatch and a combine between domains of GPUs: their exchange and plan, and
// how messages are packed, pass and are copied up.
//
// A call queues all that the GPU has to do, copies of messages that have not come included, and
// leaves the network to a thread.
#pragma once

#include <exception>
#include <memory>
#include <string_view>
#include <vector>

#include "hosts/exchange.hpp"
#include "hosts/message_rows.hpp"
#include "plan/build.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

// A call's exchange, its plan, and where it runs.
struct HostsCallSite {
  HostsExchange& owner;
  const HostsPlan& device;
  cudaStream_t stream;
  const CallOptions& options;
};

class HostsCall {
 protected:
  HostsCall(Op op, const HostsCallSite& site);

  void check_room(const CallRoom& call) const;

  // --- order of the two streams ---
  // Before the first copy: puts the copy stream behind the caller's stream and the last call that
  // used the memory.
  void let_copies_begin() const;
  // Put the copy stream behind what is in the caller's, and the caller's behind the copies; rounds
  // that come behind copies do not run if a transfer has failed.
  void let_copies_follow() const;
  void follow_copies() const;

  // --- messages ---
  // Packs the rows that `launch` names for rank `to`, in the copy stream.
  [[nodiscard]] MessageSend pack(
      PackLaunch launch, const MessageArea& area, size_t to, const Target& target, uint32_t signal
  ) const;
  // Returns what pack() needs to know of the weights of this rank's tokens.
  [[nodiscard]] PackLaunch weights_launch(const ConstTensor& weights) const;
  // Returns the weights of this rank's own tokens as rounds take them: by k. If the routing is a
  // map, packs them into `area` of the GPU's memory.
  [[nodiscard]] ConstTensor weights_by_k(const ConstTensor& weights, uint64_t area) const;
  // Lists what comes from the sources that this rank forwards for; `first_signal(source)`.
  template <class FirstSignal>
  [[nodiscard]] std::vector<MessageReceive> from_sources(const FirstSignal& first_signal) const {
    std::vector<MessageReceive> receives;
    for (const ForwardedSource& one : traffic_.forwarded) {
      const auto source = static_cast<uint32_t>(one.source);
      receives.push_back({one.source, one.crossings.size(), first_signal(source)});
    }
    return receives;
  }
  // Starts the transfer and returns its number in this call.
  size_t start(Transfer transfer);
  // Holds the copy stream up until message c of a transfer's receive i has come.
  void let_copies_await(size_t transfer, size_t i, int64_t c) const;
  // Copies `from` into the GPU's memory, in the copy stream.
  void copy_in(uint64_t area, const std::byte* from, int64_t bytes) const;

  // --- rounds ---
  [[nodiscard]] CudaExchange& node() const { return *owner_.node_; }
  // Tells the domain's ranks, so that they do not wait, that rounds from `first` on do not run.
  void refuse_rounds(size_t first, std::string_view reason) const;

  [[nodiscard]] size_t forwarder_of(size_t domain) const {
    return static_cast<size_t>(
        traffic_.domains->forwarder_into(static_cast<int>(domain), plan_.shape.rank)
    );
  }
  [[nodiscard]] int64_t num_sent(size_t domain) const {
    return static_cast<int64_t>(traffic_.sent[domain].size());
  }
  // Returns a part of the GPU's memory as a tensor.
  [[nodiscard]] Tensor view(uint64_t area, DType dtype, int64_t rows, int64_t cols) const {
    return {work_ + area, dtype, rows, cols, -1, owner_.settings_.device};
  }

 private:
  HostsExchange& owner_;
  Op op_;
  std::vector<std::vector<uint32_t>> before_;  // [transfer][receive] messages of earlier calls
  bool has_receives_ = false;

 protected:
  Network& network_;
  const HostsPlan& device_;
  const PlanData& plan_;
  const DomainTraffic& traffic_;
  cudaStream_t stream_;
  CallOptions options_;  // of the rounds
  std::byte* work_;
};

template <class OneCall, class Validate, class In, class Out>
void HostsExchange::run_call(
    const Plan& plan,
    const Validate& validate,
    const In& in,
    const Out& out,
    const CallOptions& options
) {
  const CudaDeviceGuard guard(settings_.device.index);
  settle();
  last_op_ = OneCall::kOp;
  const cudaStream_t stream = stream_of(options);
  const PlanData& header = header_of(plan);
  const std::exception_ptr refusal = refusal_of([&] {
    validate(header);
    begin_call(OneCall::kOp, stream);
  });
  if (!refusal) {
    const Call ahead = OneCall::call_of(header, in, out);
    make_room(ahead, OneCall::token_bytes(header, ahead), stream);
  }
  const auto prepare = [&] {
    rethrow(refusal);
    const auto& device = device_plan_as<HostsPlan>(header, context());
    const HostsCallSite site = {*this, device, stream, options};
    return std::make_unique<OneCall>(site, in, out);
  };
  network_->run_call(OneCall::kOp, prepare, [](const auto& one) { one->run(); });
  num_rounds_ += device_plan_as<HostsPlan>(header, context()).rounds().size();
  end_call(options, stream);
}

}  // namespace weft
