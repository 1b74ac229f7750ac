// SPDX-License-Identifier: Apache-2.0
// What a dispatch and a combine between domains of GPUs have in common: whose call it is, by which
// plan, and how messages pass and are copied up.
//
// A call queues all that the GPU has to do, copies of messages that have not come included, and
// leaves the network to a thread.
#pragma once

#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/gpu/driver.hpp"
#include "hosts/exchange.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

class DomainsCall {
 protected:
  DomainsCall(
      std::string_view op,
      DomainsCudaExchange& owner,
      const DomainsPlan& device,
      cudaStream_t stream,
      const CallOptions& options
  )
      : owner_(owner),
        network_(*owner.network),
        device_(device),
        plan_(device.on_host()),
        traffic_(*plan_.between),
        stream_(stream),
        options_(options),
        work_(owner.work->data),
        op_(op) {
    options_.stream = stream;
  }

  void check_room(const CrossingRoom& call) const {
    WEFT_CHECK(
        network_.context(),
        owner_.room.holds(call),
        ErrorCode::kInternal,
        "{}: {} B of staging, {} B and {} messages, {} B on the GPU (there are {}, {}, {} and {})",
        op_,
        call.staging,
        call.messages,
        call.num_messages,
        call.work,
        owner_.room.staging,
        owner_.room.messages,
        owner_.room.num_messages,
        owner_.room.work
    );
  }

  // Before the first copy: behind the caller's stream, and the last call that used the memory.
  void let_copies_begin() const {
    owner_.let_copies_follow(stream_);
    WEFT_CUDA(network_.context(), cudaStreamWaitEvent(owner_.copies.get(), owner_.last_use.get()));
  }

  // What it moves begins to pass. -> the number of the transfer in this call.
  size_t start(Transfer transfer) {
    transfer.number = before_.size();
    for (size_t i = 0; i < transfer.receives.size(); ++i) {
      const size_t place = owner_.place_of(transfer.number, i);
      const int64_t count = transfer.chunk.num_chunks(transfer.receives[i].count);
      transfer.before.push_back(owner_.message_counts->expect(place, count));
    }
    before_.push_back(transfer.before);
    owner_.start_transfer(op_, std::move(transfer));
    return before_.size() - 1;
  }
  // The copy stream goes on once message c of a transfer's receive i has come.
  void let_copies_await(size_t transfer, size_t i, int64_t c) const {
    const size_t place = owner_.place_of(transfer, i);
    const uint32_t count = before_[transfer][i] + static_cast<uint32_t>(c) + 1;
    if (!owner_.waits_on_host) {
      wait_for_word(
          owner_.copies.get(),
          owner_.message_counts->word(place),
          count,
          owner_.direct_staging.is_lent() ? owner_.remote_writes : RemoteWrites::kInOrder,
          network_.context()
      );
      return;
    }
    while (!owner_.message_counts->has_reached(place, count)) {
      std::this_thread::yield();
    }
  }

  // Into `work`, in the copy stream.
  void copy_in(uint64_t area, const std::byte* from, int64_t bytes) const {
    if (bytes > 0) {
      WEFT_CUDA(
          network_.context(),
          cudaMemcpyAsync(
              work_ + area, from, static_cast<size_t>(bytes), cudaMemcpyDefault, owner_.copies.get()
          )
      );
    }
  }

  [[nodiscard]] size_t carrier_of(size_t domain) const {
    return static_cast<size_t>(
        traffic_.domains->carrier_into(static_cast<int>(domain), plan_.shape.rank)
    );
  }
  [[nodiscard]] int64_t num_sent(size_t domain) const {
    return static_cast<int64_t>(traffic_.sent[domain].size());
  }
  // Of `work`.
  [[nodiscard]] Tensor view(uint64_t area, DType dtype, int64_t rows, int64_t cols) const {
    return {work_ + area, dtype, rows, cols, -1, owner_.settings.device};
  }

  DomainsCudaExchange& owner_;
  Network& network_;
  const DomainsPlan& device_;
  const PlanData& plan_;
  const DomainTraffic& traffic_;
  cudaStream_t stream_;
  CallOptions options_;  // of the rounds
  std::byte* work_;

 private:
  std::string_view op_;
  std::vector<std::vector<uint32_t>> before_;  // [transfer][receive] messages of earlier calls
};

}  // namespace weft
