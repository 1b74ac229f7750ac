// SPDX-License-Identifier: Apache-2.0
#include "moe/batch.hpp"

#include <algorithm>

#include "moe/random.hpp"

namespace weft::moe {

TokenRange tokens_of_rank(int64_t global_batch, int rank, int num_ranks) {
  const int64_t first = global_batch * rank / num_ranks;
  return {first, global_batch * (rank + 1) / num_ranks - first};
}

void BatchSource::draw(int64_t step, TokenRange tokens, Batch& batch) const {
  const auto count = static_cast<size_t>(tokens.count);
  batch.windows.resize(count * window_);
  batch.targets.resize(count);
  const auto stream = static_cast<uint64_t>(step) + 1;  // 0 is that of the initial parameters
  const uint64_t num_positions = text_.size() - window_;
  for (size_t t = 0; t < count; ++t) {
    const uint64_t token = static_cast<uint64_t>(tokens.first) + t;
    const size_t position = random_bits(seed_, stream, token) % num_positions;
    std::ranges::copy(text_.subspan(position, window_), batch.windows.data() + t * window_);
    batch.targets[t] = text_[position + window_];
  }
}

}  // namespace weft::moe
