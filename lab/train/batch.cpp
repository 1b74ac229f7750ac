// SPDX-License-Identifier: Apache-2.0
#include "train/batch.hpp"

#include <algorithm>
#include <span>

#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "train/layers/random.hpp"

namespace weft::moe {
namespace {

Range tokens_of_shard(int64_t global_batch, int64_t shard, int64_t num_ranks) {
  const int64_t shards = num_shards(num_ranks);
  return {global_batch * shard / shards, global_batch * (shard + 1) / shards};
}

}  // namespace

Range tokens_of_rank(int64_t global_batch, int64_t rank, int64_t num_ranks) {
  const Range shards = shards_of_rank(rank, num_ranks);
  return {
      tokens_of_shard(global_batch, shards.begin, num_ranks).begin,
      tokens_of_shard(global_batch, shards.end - 1, num_ranks).end};
}

Shards make_shards(int64_t global_batch, int64_t rank, int64_t num_ranks) {
  const int64_t first = tokens_of_rank(global_batch, rank, num_ranks).begin;
  const Range own = shards_of_rank(rank, num_ranks);
  Shards shards;
  for (int64_t shard = own.begin; shard < own.end; ++shard) {
    const Range tokens = tokens_of_shard(global_batch, shard, num_ranks);
    shards.push_back({tokens.begin - first, tokens.end - first});
  }
  return shards;
}

std::vector<MicroBatch> make_micro_batches(
    int64_t global_batch, int64_t num_micro_batches, int64_t rank, int64_t num_ranks
) {
  std::vector<MicroBatch> made;
  for (int64_t nth = 0; nth < num_micro_batches; ++nth) {
    const int64_t begin = global_batch * nth / num_micro_batches;
    const int64_t size = global_batch * (nth + 1) / num_micro_batches - begin;
    const Range own = tokens_of_rank(size, rank, num_ranks);
    made.push_back({{begin + own.begin, begin + own.end}, make_shards(size, rank, num_ranks)});
  }
  return made;
}

void BatchSource::draw(int64_t step, Range tokens, Batch& batch) const {
  const auto count = static_cast<size_t>(tokens.size());
  batch.windows.resize(count * window_);
  batch.targets.resize(count);
  const auto stream = static_cast<uint64_t>(step) + 1;  // 0 is that of the initial parameters
  const uint64_t num_positions = text_.size() - window_;
  for (size_t t = 0; t < count; ++t) {
    const uint64_t token = static_cast<uint64_t>(tokens.begin) + t;
    const size_t position = random_bits(seed_, stream, token) % num_positions;
    std::ranges::copy(text_.subspan(position, window_), batch.windows.data() + t * window_);
    batch.targets[t] = text_[position + window_];
  }
}

std::vector<std::byte> read_text(const std::string& path, int window) {
  const std::string text = read_whole_file(path);
  WEFT_CHECK(
      Context{},
      text.size() > static_cast<size_t>(window),
      ErrorCode::kFile,
      "read: {} holds {} B (more than the window of {} B)",
      path,
      text.size(),
      window
  );
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

}  // namespace weft::moe
