// SPDX-License-Identifier: Apache-2.0
// One combine between domains of GPUs, on the rank that makes it. Its steps in the order of the
// call: combine_domains_cuda.cpp, combine_domains_weights_cuda.cpp, combine_domains_sums_cuda.cpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hosts/call.hpp"
#include "hosts/combine_areas.hpp"

namespace weft {

class CombineAcross : DomainsCall {
 public:
  CombineAcross(
      DomainsCudaExchange& owner,
      const DomainsPlan& device,
      const CombineInput& in,
      const CombineOutput& out,
      cudaStream_t stream,
      const CallOptions& options
  );

  void run();

 private:
  [[nodiscard]] int64_t weights_bytes(int64_t count) const { return count * weights_.weight_bytes; }
  [[nodiscard]] std::vector<CallWord> own_words() const;

  // --- weights ---
  // The weights of crossing tokens go to their carriers, and those of carried tokens come.
  void swap_weights(std::span<const CallWord> words);
  [[nodiscard]] PackLaunch weights_launch() const;

  // --- sums ---
  // This domain's sums for the tokens of others, and their messages.
  std::vector<CrossingSend> sum_carried(std::span<const CallWord> words);
  // The last round, though its number is the first: others wait for the rounds before.
  void sum_own();
  void launch_round(size_t round, const CombineInput& in, const CombineOutput& out);
  // The sums of other domains come in beside this one's.
  void swap_sums(std::vector<CrossingSend> sends);
  // Message c of a domain.
  void copy_sums(size_t domain, int64_t c) const;
  void add_parts() const;

  [[nodiscard]] Tensor rows_view(uint64_t area, int64_t rows) const {
    return view(area, in_.rows.dtype, rows, in_.rows.cols);
  }
  [[nodiscard]] Tensor weights_view(uint64_t area, int64_t rows) const {
    return view(area, DType::kFloat32, rows, topk_);
  }

  const CombineInput& in_;
  const CombineOutput& out_;
  int32_t topk_;
  CrossingChunk sums_;
  CrossingChunk weights_;
  CombineAreas areas_;
  size_t num_launched_ = 0;
};

}  // namespace weft
