// SPDX-License-Identifier: Apache-2.0
#include "exchange/dispatch_push.hpp"

#include <array>

#include "exchange/chunk.hpp"

namespace weft {

DispatchPush::DispatchPush(
    const CpuRank& rank,
    const CpuCall& call,
    std::span<const RowStream> streams,
    const ConstTensor& weights,
    const RowWeights& row_weights
)
    : rank_(rank),
      call_(call),
      plan_(call.plan),
      streams_(streams),
      weights_(reinterpret_cast<const float*>(weights.data)),
      row_weights_(row_weights),
      self_(static_cast<size_t>(call.plan.shape.rank)) {
  for (const Arrivals& pair : plan_.sent) {
    num_units_ = std::max(num_units_, num_chunks(pair.size()));
  }
}

// Receivers mostly take the same tokens, so a chunk's rows are read from memory once.
void DispatchPush::run(int64_t unit) const {
  const size_t num_ranks = plan_.sent.size();
  for (size_t step = 1; step < num_ranks; ++step) {
    send((self_ + step) % num_ranks, unit);
  }
  keep(unit);
}

void DispatchPush::send(size_t to, int64_t chunk) const {
  const Arrivals& pair = plan_.sent[to];
  const ChunkRange range = chunk_range(pair.size(), chunk);
  if (range.first == range.last) {
    return;
  }
  const uint32_t signal =
      rank_.signals.dispatch(static_cast<uint32_t>(self_), static_cast<uint32_t>(chunk));
  std::array<Put, 2 * kChunkArrivals + 1> puts;
  size_t num_puts = 0;
  uint64_t num_stored = 0;  // arrivals that this rank stores itself, each counted like one put
  for (const RowStream& stream : streams_) {
    const Target& target = call_.words[to].*stream.target;
    if (target.place == Place::kEverySlot) {
      store(to, range, stream);
      num_stored += static_cast<uint64_t>(range.last - range.first);
      continue;
    }
    for (int64_t i = range.first; i < range.last; ++i) {
      const bool is_staged = target.place == Place::kStaging;
      const auto row = static_cast<uint64_t>(is_staged ? i : pair.slots(i)[0]);
      puts[num_puts++] = {
          .source = stream.token(pair.token[static_cast<size_t>(i)]),
          .bytes = stream.row_bytes,
          .region = target.region.slot,
          .signal = signal,
          .offset = target.offset + row * stream.row_bytes};
    }
  }
  std::array<float, kChunkArrivals * kMaxTopk> weights;
  if (weights_ != nullptr) {
    const Target& target = call_.words[to].weights;
    const auto first = static_cast<size_t>(pair.route_begin[static_cast<size_t>(range.first)]);
    puts[num_puts++] = {
        .source = weights.data(),
        .bytes = gather_weights(pair, range.first, range.last, weights.data()) * sizeof(float),
        .region = target.region.slot,
        .signal = signal,
        .offset = target.offset + first * sizeof(float)};
  }
  if (num_puts > 0) {
    rank_.transport.put(static_cast<int>(to), {puts.data(), num_puts});
  }
  if (num_stored > 0) {
    rank_.transport.raise(static_cast<int>(to), signal, num_stored);
  }
}

// Rows to all their slots in the memory of `to`.
void DispatchPush::store(size_t to, ChunkRange range, const RowStream& stream) const {
  const Arrivals& pair = plan_.sent[to];
  const Target& target = call_.words[to].*stream.target;
  std::byte* const base =
      rank_.transport.mapped(static_cast<int>(to), target.region.slot) + target.offset;
  for (int64_t i = range.first; i < range.last; ++i) {
    const std::byte* row = stream.token(pair.token[static_cast<size_t>(i)]);
    for (const int32_t slot : pair.slots(i)) {
      stream.copy_row(base + static_cast<size_t>(slot) * stream.row_bytes, row);
    }
  }
}

// Arrivals from this rank to itself go to all their slots at once.
void DispatchPush::keep(int64_t chunk) const {
  const Arrivals& pair = plan_.sent[self_];
  const ChunkRange range = chunk_range(pair.size(), chunk);
  for (int64_t i = range.first; i < range.last; ++i) {
    for (const RowStream& stream : streams_) {
      const std::byte* row = stream.token(pair.token[static_cast<size_t>(i)]);
      for (const int32_t slot : pair.slots(i)) {
        stream.copy_row(stream.row(slot), row);
      }
    }
    if (weights_ != nullptr) {
      std::array<float, kMaxTopk> weights;
      gather_weights(pair, i, i + 1, weights.data());
      row_weights_.put(pair, i, weights.data());
    }
  }
  streaming_fence();
}

// Weights of arrivals [first, last) in route order; returns their number.
size_t DispatchPush::gather_weights(const Arrivals& pair, int64_t first, int64_t last, float* out)
    const {
  size_t count = 0;
  for (auto a = static_cast<size_t>(first); a < static_cast<size_t>(last); ++a) {
    const auto begin = static_cast<size_t>(pair.route_begin[a]);
    const auto end = static_cast<size_t>(pair.route_begin[a + 1]);
    for (size_t j = begin; j < end; ++j) {
      out[count++] = weights_[weight_index(plan_, pair.token[a], pair.k[j])];
    }
  }
  return count;
}

}  // namespace weft
