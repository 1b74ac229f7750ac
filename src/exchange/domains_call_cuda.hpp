// SPDX-License-Identifier: Apache-2.0
// What a dispatch and a combine between domains of GPUs have in common: whose call it is, by which
// plan, and how messages pass and are copied up.
#pragma once

#include <functional>
#include <span>
#include <string_view>

#include "exchange/exchange_domains_cuda.hpp"
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
        far_(*owner.far),
        device_(device),
        plan_(device.on_host()),
        traffic_(*plan_.between),
        stream_(stream),
        options_(options),
        work_(owner.work->data),
        op_(op) {
    options_.stream = stream;
  }

  // Before the first copy: behind the caller's stream, and the last call that used the memory.
  void let_copies_begin() const {
    owner_.let_copies_follow(stream_);
    WEFT_CUDA(far_.context, cudaStreamWaitEvent(owner_.copies.get(), owner_.last_use.get()));
  }

  // See CrossingTransfer::run.
  void transfer(
      const CrossingChunk& chunk,
      std::string_view what,
      std::span<const CrossingSend> sends,
      std::span<const CrossingReceive> receives,
      const std::function<void(size_t, int64_t)>& take
  ) const {
    const CrossingTransfer::Owner owner = {
        *far_.transport, *far_.waiter, far_.settled, far_.context, owner_.settings.timeout};
    CrossingTransfer(owner, chunk, {op_, far_.call_number, what}).run(sends, receives, take, [&] {
      owner_.near->check();
    });
  }

  // Into `work`, in the copy stream.
  void copy_in(uint64_t area, const std::byte* from, int64_t bytes) const {
    if (bytes > 0) {
      WEFT_CUDA(
          far_.context,
          cudaMemcpyAsync(
              work_ + area,
              from,
              static_cast<size_t>(bytes),
              cudaMemcpyHostToDevice,
              owner_.copies.get()
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
  CpuExchange& far_;
  const DomainsPlan& device_;
  const PlanData& plan_;
  const DomainTraffic& traffic_;
  cudaStream_t stream_;
  CallOptions options_;  // of the rounds
  std::byte* work_;

 private:
  std::string_view op_;
};

}  // namespace weft
