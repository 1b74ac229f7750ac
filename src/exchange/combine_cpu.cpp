// SPDX-License-Identifier: Apache-2.0
// Combine on CPU threads, the adjoint of dispatch_cpu.cpp: rows of an arrival are summed where the
// experts are, one row per arrival travels back, and the token's rank adds its arrivals in rank
// order.
//
// Each worker pre-reduces a chunk for every token rank, then sums whatever chunk of tokens is
// complete.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "core/copy.hpp"
#include "exchange/chunk.hpp"
#include "exchange/cpu_call.hpp"
#include "exchange/row_sum.hpp"

namespace weft {
namespace {

class Combine {
 public:
  Combine(
      const CpuRank& rank, const CpuCall& call, const CombineInput& in, const CombineOutput& out
  );
  void run();

 private:
  struct Scratch {
    std::vector<std::byte>
        rows;                    // [kChunkArrivals] rows that cannot be stored at the peer directly
    std::vector<float> weights;  // of one chunk's routes
    std::vector<std::byte> own_row;  // this rank's partial sum of one token
    std::vector<const std::byte*> terms;
  };

  void swap_source_weights();
  void work();
  void reduce(size_t to, int64_t chunk, Scratch& scratch);
  void reduce_arrival(
      const Arrivals& pair, int64_t i, const float* scale, std::byte* out, Scratch& scratch
  );
  bool sum_next(Scratch& scratch);
  void sum_token(int64_t token, Scratch& scratch);
  void give_weights(int64_t token);
  [[nodiscard]] const float* scale_of(size_t peer, int64_t arrival, Scratch& scratch) const;
  [[nodiscard]] bool is_complete(int64_t unit) const;
  [[nodiscard]] int64_t chunks_needed(size_t peer, int64_t unit) const;
  [[nodiscard]] uint32_t signal_of(size_t peer, int64_t chunk) const;
  [[nodiscard]] uint64_t wanted(size_t peer, int64_t chunk) const;
  void wait_for_partial_sums();
  void settle();

  const CpuRank& rank_;
  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  const CombineOutput& out_;
  const size_t self_;
  const size_t num_ranks_;
  const size_t row_bytes_;
  const bool has_weights_;
  int64_t num_reduce_units_ = 0;
  int64_t num_sum_units_ = 0;
  std::atomic<int64_t> next_reduce_ = 0;
  std::atomic<int64_t> next_sum_ = 0;
};

Combine::Combine(
    const CpuRank& rank, const CpuCall& call, const CombineInput& in, const CombineOutput& out
)
    : rank_(rank),
      call_(call),
      plan_(call.plan),
      in_(in),
      out_(out),
      self_(static_cast<size_t>(call.plan.shape.rank)),
      num_ranks_(static_cast<size_t>(call.plan.shape.num_ranks)),
      row_bytes_(static_cast<size_t>(in.rows.row_bytes())),
      has_weights_(in.weights.is_given()),
      num_sum_units_(num_chunks(call.plan.shape.num_tokens)) {
  for (size_t peer = 0; peer < num_ranks_; ++peer) {
    if (peer != self_) {
      num_reduce_units_ = std::max(num_reduce_units_, num_chunks(plan_.received[peer].size()));
    }
  }
}

void Combine::run() {
  if (in_.scale == CombineScale::kSourceWeights) {
    swap_source_weights();
  }
  rank_.workers.run([this](int) { work(); });
  settle();
}

// The token ranks hold the weights, the expert ranks multiply: hand them over first.
void Combine::swap_source_weights() {
  const auto* weights = reinterpret_cast<const float*>(in_.source_weights.data);
  std::vector<Missing> wanted;
  for (size_t step = 1; step < num_ranks_; ++step) {
    const size_t peer = (self_ + step) % num_ranks_;
    const Arrivals& pair = plan_.sent[peer];
    std::vector<float> routes;
    routes.reserve(pair.slot.size());
    for (size_t a = 0; a < pair.token.size(); ++a) {
      for (auto j = pair.route_begin[a]; j < pair.route_begin[a + 1]; ++j) {
        routes.push_back(weights[weight_index(plan_, pair.token[a], pair.k[static_cast<size_t>(j)])]
        );
      }
    }
    const Target& target = call_.words[peer].source_weights;
    const Put put = {
        .source = routes.data(),
        .bytes = routes.size() * sizeof(float),
        .region = target.region.slot,
        .signal = rank_.signals.source_weights(static_cast<uint32_t>(self_)),
        .offset = target.offset};
    rank_.transport.put(static_cast<int>(peer), {&put, 1});
    const uint32_t signal = rank_.signals.source_weights(static_cast<uint32_t>(peer));
    wanted.push_back(
        {.peer = static_cast<int>(peer), .signal = signal, .wanted = ++rank_.settled[signal]}
    );
  }
  rank_.waiter.until_raised({.op = "combine", .call = call_.number, .what = "weights"}, wanted);
}

void Combine::work() {
  Scratch scratch;
  scratch.own_row.resize(row_bytes_);
  for (;;) {
    const int64_t unit = next_reduce_.fetch_add(1, std::memory_order_relaxed);
    if (unit < num_reduce_units_) {
      for (size_t step = 1; step < num_ranks_; ++step) {
        reduce((self_ + step) % num_ranks_, unit, scratch);
      }
    }
    if (sum_next(scratch) || unit < num_reduce_units_) {
      continue;
    }
    if (next_sum_.load() >= num_sum_units_ || rank_.workers.is_stopping()) {
      return;
    }
    wait_for_partial_sums();
  }
}

// One chunk of arrivals from `to`, summed and sent back.
void Combine::reduce(size_t to, int64_t chunk, Scratch& scratch) {
  const Arrivals& pair = plan_.received[to];
  const ChunkRange range = chunk_range(pair.size(), chunk);
  if (range.first == range.last) {
    return;
  }
  const Target& rows_at = call_.words[to].rows;
  const Target& weights_at = call_.words[to].weights;
  const auto signal =
      rank_.signals.combine(static_cast<uint32_t>(self_), static_cast<uint32_t>(chunk));
  const auto first = static_cast<size_t>(pair.route_begin[static_cast<size_t>(range.first)]);
  const auto last = static_cast<size_t>(pair.route_begin[static_cast<size_t>(range.last)]);
  const auto num_rows = static_cast<size_t>(range.last - range.first);
  const uint64_t rows_offset = rows_at.offset + static_cast<uint64_t>(range.first) * row_bytes_;
  const uint64_t weights_offset = weights_at.offset + first * sizeof(float);

  std::byte* rows = rank_.transport.mapped(static_cast<int>(to), rows_at.region.slot);
  const bool is_mapped = rows != nullptr;
  if (is_mapped) {
    rows += rows_offset;
  } else {
    scratch.rows.resize(static_cast<size_t>(kChunkArrivals) * row_bytes_);
    rows = scratch.rows.data();
  }
  for (int64_t i = range.first; i < range.last; ++i) {
    std::byte* const row = rows + static_cast<size_t>(i - range.first) * row_bytes_;
    reduce_arrival(pair, i, scale_of(to, i, scratch), row, scratch);
  }
  scratch.weights.clear();
  if (has_weights_) {
    const auto* row_weights = reinterpret_cast<const float*>(in_.weights.data);
    for (size_t j = first; j < last; ++j) {
      scratch.weights.push_back(row_weights[row_weight_index(plan_, pair, j)]);
    }
  }
  std::array<Put, kChunkArrivals + 1> puts;
  size_t num_puts = 0;
  for (size_t i = 0; i < num_rows && !is_mapped; ++i) {
    puts[num_puts++] = {
        .source = rows + i * row_bytes_,
        .bytes = row_bytes_,
        .region = rows_at.region.slot,
        .signal = signal,
        .offset = rows_offset + i * row_bytes_};
  }
  if (has_weights_) {
    puts[num_puts++] = {
        .source = scratch.weights.data(),
        .bytes = scratch.weights.size() * sizeof(float),
        .region = weights_at.region.slot,
        .signal = signal,
        .offset = weights_offset};
  }
  if (num_puts > 0) {
    rank_.transport.put(static_cast<int>(to), {puts.data(), num_puts});
  }
  if (is_mapped) {
    rank_.transport.raise(static_cast<int>(to), signal, num_rows);
  }
}

void Combine::reduce_arrival(
    const Arrivals& pair, int64_t i, const float* scale, std::byte* out, Scratch& scratch
) {
  scratch.terms.clear();
  for (const int32_t slot : pair.slots(i)) {
    scratch.terms.push_back(in_.rows.data + static_cast<size_t>(slot) * row_bytes_);
  }
  sum_rows(out, scratch.terms, scale, in_.rows.dtype, in_.rows.cols);
}

// The factors of an arrival's rows, or null. Only layouts of one row per route are scaled.
const float* Combine::scale_of(size_t peer, int64_t arrival, Scratch& scratch) const {
  const Arrivals& pair = plan_.received[peer];
  const auto a = static_cast<size_t>(arrival);
  const auto first = static_cast<size_t>(pair.route_begin[a]);
  switch (in_.scale) {
    case CombineScale::kNone:
      return nullptr;
    case CombineScale::kPlanWeights:
      return pair.weight.data() + first;
    case CombineScale::kSourceWeights:
      break;
  }
  if (peer != self_) {
    const std::byte* staged = call_.staging_data + call_.staging.source_weights[peer];
    return reinterpret_cast<const float*>(staged) + first;
  }
  const auto* weights = reinterpret_cast<const float*>(in_.source_weights.data);
  scratch.weights.clear();
  for (size_t j = first; j < static_cast<size_t>(pair.route_begin[a + 1]); ++j) {
    scratch.weights.push_back(weights[weight_index(plan_, pair.token[a], pair.k[j])]);
  }
  return scratch.weights.data();
}

// Claims the next chunk of tokens if all their partial sums are here.
bool Combine::sum_next(Scratch& scratch) {
  int64_t unit = next_sum_.load(std::memory_order_relaxed);
  if (unit >= num_sum_units_ || !is_complete(unit) ||
      !next_sum_.compare_exchange_strong(unit, unit + 1)) {
    return false;
  }
  const ChunkRange range = chunk_range(plan_.shape.num_tokens, unit);
  for (int64_t token = range.first; token < range.last; ++token) {
    sum_token(token, scratch);
    if (has_weights_) {
      give_weights(token);
    }
  }
  return true;
}

void Combine::sum_token(int64_t token, Scratch& scratch) {
  const auto t = static_cast<size_t>(token);
  const auto first = static_cast<size_t>(plan_.token_begin[t]);
  const auto last = static_cast<size_t>(plan_.token_begin[t + 1]);
  std::byte* const out = out_.x.data + t * row_bytes_;
  if (first == last) {
    std::memset(out, 0, row_bytes_);
    return;
  }
  std::array<const std::byte*, kMaxTopk> partial;
  for (size_t a = first; a < last; ++a) {
    const auto peer = static_cast<size_t>(plan_.token_arrivals[a].rank);
    const auto index = static_cast<size_t>(plan_.token_arrivals[a].index);
    if (peer != self_) {
      partial[a - first] = call_.staging_data + call_.staging.rows[peer] + index * row_bytes_;
      continue;
    }
    // A lone partial sum is the token already.
    std::byte* const own = last - first == 1 ? out : scratch.own_row.data();
    const auto i = static_cast<int64_t>(index);
    reduce_arrival(plan_.received[self_], i, scale_of(self_, i, scratch), own, scratch);
    partial[a - first] = own;
  }
  if (partial[0] == out) {
    return;
  }
  sum_rows(out, {partial.data(), last - first}, nullptr, in_.rows.dtype, in_.rows.cols);
}

// Gradients of the token's weights, back to where the weights came from.
void Combine::give_weights(int64_t token) {
  auto* const out = reinterpret_cast<float*>(out_.weights.data);
  const auto t = static_cast<size_t>(token);
  const auto cols = static_cast<size_t>(out_.weights.cols);
  std::memset(out + t * cols, 0, cols * sizeof(float));
  for (auto a = plan_.token_begin[t]; a < plan_.token_begin[t + 1]; ++a) {
    const TokenArrival& arrival = plan_.token_arrivals[static_cast<size_t>(a)];
    const auto peer = static_cast<size_t>(arrival.rank);
    const auto index = static_cast<size_t>(arrival.index);
    const Arrivals& pair = plan_.sent[peer];
    const auto* row_weights = reinterpret_cast<const float*>(in_.weights.data);
    const auto* staged =
        reinterpret_cast<const float*>(call_.staging_data + call_.staging.weights[peer]);
    const auto begin = static_cast<size_t>(pair.route_begin[index]);
    const auto end = static_cast<size_t>(pair.route_begin[index + 1]);
    for (size_t j = begin; j < end; ++j) {
      out[weight_index(plan_, token, pair.k[j])] =
          peer == self_ ? row_weights[row_weight_index(plan_, pair, j)] : staged[j];
    }
  }
}

// Chunks of `peer` that hold the partial sums of all tokens up to the end of a unit.
int64_t Combine::chunks_needed(size_t peer, int64_t unit) const {
  const std::vector<int32_t>& tokens = plan_.sent[peer].token;
  const auto end = static_cast<int32_t>(chunk_range(plan_.shape.num_tokens, unit).last);
  return num_chunks(std::lower_bound(tokens.begin(), tokens.end(), end) - tokens.begin());
}

bool Combine::is_complete(int64_t unit) const {
  for (size_t peer = 0; peer < num_ranks_; ++peer) {
    if (peer == self_) {
      continue;
    }
    const int64_t begin = unit == 0 ? 0 : std::max<int64_t>(0, chunks_needed(peer, unit - 1) - 1);
    // Starts at the chunk that the unit shares with the one before: what this unit reads, it has
    // acquired.
    for (int64_t chunk = begin; chunk < chunks_needed(peer, unit); ++chunk) {
      if (rank_.transport.signal_value(signal_of(peer, chunk)) < wanted(peer, chunk)) {
        return false;
      }
    }
  }
  return true;
}

uint32_t Combine::signal_of(size_t peer, int64_t chunk) const {
  return rank_.signals.combine(static_cast<uint32_t>(peer), static_cast<uint32_t>(chunk));
}

uint64_t Combine::wanted(size_t peer, int64_t chunk) const {
  const ChunkRange range = chunk_range(plan_.sent[peer].size(), chunk);
  return rank_.settled[signal_of(peer, chunk)] + static_cast<uint64_t>(range.last - range.first) +
         (has_weights_ ? 1 : 0);
}

void Combine::wait_for_partial_sums() {
  const auto ready = [this] {
    const int64_t unit = next_sum_.load(std::memory_order_relaxed);
    return unit >= num_sum_units_ || is_complete(unit);
  };
  const auto missing = [this] {
    std::vector<Missing> late;
    const int64_t unit = next_sum_.load(std::memory_order_relaxed);
    for (size_t peer = 0; peer < num_ranks_ && unit < num_sum_units_; ++peer) {
      for (int64_t chunk = 0; peer != self_ && chunk < chunks_needed(peer, unit); ++chunk) {
        const uint64_t seen = rank_.transport.signal_value(signal_of(peer, chunk));
        if (seen < wanted(peer, chunk)) {
          late.push_back(
              {.peer = static_cast<int>(peer),
               .signal = signal_of(peer, chunk),
               .seen = seen,
               .wanted = wanted(peer, chunk)}
          );
          break;
        }
      }
    }
    return late;
  };
  rank_.waiter.until(
      {.op = "combine", .call = call_.number, .what = "partial sums"},
      ready,
      missing,
      [this] { return rank_.workers.is_stopping(); }
  );
}

void Combine::settle() {
  for (size_t peer = 0; peer < num_ranks_; ++peer) {
    const int64_t chunks = peer == self_ ? 0 : num_chunks(plan_.sent[peer].size());
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      rank_.settled[signal_of(peer, chunk)] = wanted(peer, chunk);
    }
  }
}

}  // namespace

void combine_cpu(
    const CpuRank& rank, const CpuCall& call, const CombineInput& in, const CombineOutput& out
) {
  Combine(rank, call, in, out).run();
}

}  // namespace weft
