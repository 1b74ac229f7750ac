// SPDX-License-Identifier: Apache-2.0
// Calls by copy engines: this rank packs a block for each peer (dispatch: rows; combine: sums), its
// copy engines carry them, the stream tells the peers, and a kernel takes what peers have copied
// here. Copies need addresses on the host, so rows lie in the control region, which every rank has
// mapped as long as the exchange lives.
#include "core/gpu/driver.hpp"
#include "cuda/exchange/exchange.hpp"

namespace weft {

// Decides by what all ranks pass alike, but for captures: only the host knows which area is free,
// and a replay does not ask it.
bool CudaExchange::goes_by_copies(
    const CopiedRows& rows, const CallOptions& call, cudaStream_t stream
) const {
  return call.copy_engines && view_.num_ranks > 1 &&
         settings_.max_tokens < 1 << kCopiedArrivalBits &&
         static_cast<uint64_t>(rows.num_bytes(settings_.max_tokens)) <=
             control_map_.copied_stride &&
         !is_capturing(stream, context_);
}

CopiedLaunch CudaExchange::next_copies(const CopiedRows& rows) {
  ++num_copies_;
  return {.rows = rows, .number = num_copies_, .area = num_copies_ % 2, .packed = packed_.get()};
}

PeerAddress CudaExchange::copied_address(const CopiedLaunch& copied) const {
  const auto own_rank = static_cast<uint32_t>(view_.rank);
  return {
      .region = memory_->control().region,
      .offset = control_map_.copied_offset(copied.area, own_rank)};
}

// Copies go one after the other, as one fills the link; each rank begins with another peer.
void CudaExchange::queue_copies(
    const CopiedLaunch& copied,
    std::span<const int32_t> arrivals,
    int64_t most_arrivals,
    cudaStream_t stream
) const {
  const uint64_t place = copied_address(copied).offset;
  const uint32_t signal = control_map_.signals().copied(static_cast<uint32_t>(view_.rank));
  const std::byte* from = copied.packed;
  for (int step = 1; step < view_.num_ranks; ++step) {
    const auto peer = static_cast<size_t>((view_.rank + step) % view_.num_ranks);
    const bool is_lost = (lost_ >> peer & 1U) != 0;
    const int64_t count = arrivals.empty() ? most_arrivals : arrivals[peer];
    const auto bytes = static_cast<size_t>(copied.rows.num_bytes(count));
    std::byte* control = view_.control[peer];
    if (bytes > 0 && !is_lost) {
      WEFT_CUDA(
          context_, cudaMemcpyAsync(control + place, from, bytes, cudaMemcpyDeviceToDevice, stream)
      );
    }
    if (!is_lost) {
      write_word(stream, reinterpret_cast<uint32_t*>(control) + signal, copied.number, context_);
    }
    from += control_map_.copied_stride;
  }
}

}  // namespace weft
