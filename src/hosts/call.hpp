// SPDX-License-Identifier: Apache-2.0
// Common parts of a dispatch and a combine between domains of GPUs: whose call it is, by which
// plan, and how messages are packed, pass and are copied up.
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

// Exchange whose call it is, its plan, and where it runs.
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
  // Before the first copy: copies come behind the caller's stream, and behind the last call that
  // used the memory.
  void let_copies_begin() const;
  // Work in the copy stream goes on behind what is in the caller's, and the other way round; rounds
  // that come behind copies do not run if these have brought nothing.
  void let_copies_follow() const;
  void follow_copies() const;

  // --- messages ---
  // Packs what `launch` says of rows for a rank, in the copy stream.
  [[nodiscard]] MessageSend pack(
      PackLaunch launch, const MessageArea& area, size_t to, const Target& target, uint32_t signal
  ) const;
  // Returns what `pack` needs to know of weights of this rank's tokens.
  [[nodiscard]] PackLaunch weights_launch(const ConstTensor& weights) const;
  // The weights of this rank's own tokens as rounds know them: by k, also if the routing is a map.
  // `area` of the GPU's memory is theirs.
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
  // The copy stream goes on once message c of a transfer's receive i has come.
  void let_copies_await(size_t transfer, size_t i, int64_t c) const;
  // Into the GPU's memory, in the copy stream.
  void copy_in(uint64_t area, const std::byte* from, int64_t bytes) const;

  // --- rounds ---
  [[nodiscard]] CudaExchange& node() const { return *owner_.node_; }
  // The rounds from `first` on do not run: the domain's ranks must hear of it instead of waiting.
  void refuse_rounds(size_t first, std::string_view reason) const;

  [[nodiscard]] size_t forwarder_of(size_t domain) const {
    return static_cast<size_t>(
        traffic_.domains->forwarder_into(static_cast<int>(domain), plan_.shape.rank)
    );
  }
  [[nodiscard]] int64_t num_sent(size_t domain) const {
    return static_cast<int64_t>(traffic_.sent[domain].size());
  }
  // A part of the GPU's memory, as a tensor.
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
