// SPDX-License-Identifier: Apache-2.0
// Dispatch on CPU threads. Previous in the data flow: exchange.cpp; next: the caller's experts,
// then combine_cpu.cpp.
//
// Each worker pushes a chunk of arrivals to every receiver, then fans out whatever chunks have
// arrived here, while they are still in cache; the last units zero the padding.
#include <array>
#include <atomic>
#include <cstring>
#include <memory>

#include "core/copy.hpp"
#include "exchange/chunk.hpp"
#include "exchange/cpu_call.hpp"

namespace weft {
namespace {

// Rows of one kind (x or scales) on their way from source to slots.
struct Stream {
  const std::byte* source = nullptr;  // [num_tokens] rows of this rank
  std::byte* out = nullptr;           // [num_rows] rows of this rank's output
  size_t row_bytes = 0;
  const Target CallWord::*target = nullptr;
  const std::vector<uint64_t>* staged =
      nullptr;  // offset of each source's rows in staging; null: direct
};

class Dispatch {
 public:
  Dispatch(
      const CpuRank& rank, const CpuCall& call, const DispatchInput& in, const DispatchOutput& out
  );
  void run();

 private:
  void work();
  void push(int64_t chunk);
  void send(size_t to, int64_t chunk);
  void keep(int64_t chunk);
  void zero(size_t range);
  bool fan_out_next(size_t source);
  void fan_out(size_t source, int64_t chunk);
  void wait_for_arrival();
  [[nodiscard]] bool is_arrived(size_t source, int64_t chunk) const;
  [[nodiscard]] uint64_t wanted(size_t source, int64_t chunk) const;
  void put_row_weights(const Arrivals& pair, int64_t arrival, const float* weights);
  void settle();

  const CpuRank& rank_;
  const CpuCall& call_;
  const PlanData& plan_;
  const size_t self_;
  const size_t num_ranks_;
  const float* weights_;  // null: none travel
  float* row_weights_;
  std::vector<Stream> streams_;
  int64_t num_push_units_ = 0;
  std::atomic<int64_t> next_unit_ = 0;
  std::vector<std::atomic<int64_t>> next_arrival_;  // [num_ranks] first chunk nobody has claimed
};

Dispatch::Dispatch(
    const CpuRank& rank, const CpuCall& call, const DispatchInput& in, const DispatchOutput& out
)
    : rank_(rank),
      call_(call),
      plan_(call.plan),
      self_(static_cast<size_t>(call.plan.shape.rank)),
      num_ranks_(static_cast<size_t>(call.plan.shape.num_ranks)),
      weights_(reinterpret_cast<const float*>(in.weights.data)),
      row_weights_(reinterpret_cast<float*>(out.weights.data)),
      next_arrival_(num_ranks_) {
  const CallWord& own = call.words[self_];
  const auto add = [&](const ConstTensor& source, const Tensor& to, const Target CallWord::*target
                   ) {
    if (!source.is_given()) {
      return;
    }
    const bool is_direct = (own.*target).by_slot != 0;
    const auto& offsets = target == &CallWord::rows ? call.staging.rows : call.staging.scales;
    streams_.push_back(
        {source.data,
         to.data,
         static_cast<size_t>(source.row_bytes()),
         target,
         is_direct ? nullptr : &offsets}
    );
  };
  add(in.x, out.rows, &CallWord::rows);
  add(in.scales, out.scales, &CallWord::scales);
  for (const Arrivals& pair : plan_.sent) {
    num_push_units_ = std::max(num_push_units_, num_chunks(pair.size()));
  }
}

void Dispatch::run() {
  rank_.workers.run([this](int) { work(); });
  settle();
}

void Dispatch::work() {
  const int64_t num_units = num_push_units_ + static_cast<int64_t>(plan_.padding.size());
  for (;;) {
    const int64_t unit = next_unit_.fetch_add(1, std::memory_order_relaxed);
    if (unit < num_push_units_) {
      push(unit);
    } else if (unit < num_units) {
      zero(static_cast<size_t>(unit - num_push_units_));
    }
    bool has_fanned_out = false;
    for (size_t step = 1; step < num_ranks_; ++step) {
      has_fanned_out |= fan_out_next((self_ + step) % num_ranks_);
    }
    if (unit < num_units || has_fanned_out) {
      continue;
    }
    bool is_done = true;
    for (size_t source = 0; source < num_ranks_; ++source) {
      is_done = is_done && (source == self_ || next_arrival_[source].load() >=
                                                   num_chunks(plan_.received[source].size()));
    }
    if (is_done || rank_.workers.is_stopping()) {
      return;
    }
    wait_for_arrival();
  }
}

// One chunk to every receiver: most of them take the same tokens, whose rows are read from memory
// once.
void Dispatch::push(int64_t chunk) {
  for (size_t step = 1; step < num_ranks_; ++step) {
    send((self_ + step) % num_ranks_, chunk);
  }
  keep(chunk);
}

void Dispatch::send(size_t to, int64_t chunk) {
  const Arrivals& pair = plan_.sent[to];
  const ChunkRange range = chunk_range(pair.size(), chunk);
  if (range.first == range.last) {
    return;
  }
  const uint32_t signal =
      rank_.signals.dispatch(static_cast<uint32_t>(self_), static_cast<uint32_t>(chunk));
  std::array<Put, 2 * kChunkArrivals + 1> puts;
  size_t num_puts = 0;
  for (const Stream& stream : streams_) {
    const Target& target = call_.words[to].*stream.target;
    for (int64_t i = range.first; i < range.last; ++i) {
      const auto row = static_cast<uint64_t>(target.by_slot != 0 ? pair.slots(i)[0] : i);
      const auto token = static_cast<size_t>(pair.token[static_cast<size_t>(i)]);
      puts[num_puts++] = {
          .source = stream.source + token * stream.row_bytes,
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
    size_t num_weights = 0;
    for (int64_t i = range.first; i < range.last; ++i) {
      const auto a = static_cast<size_t>(i);
      for (auto j = pair.route_begin[a]; j < pair.route_begin[a + 1]; ++j) {
        weights[num_weights++] =
            weights_[weight_index(plan_, pair.token[a], pair.k[static_cast<size_t>(j)])];
      }
    }
    puts[num_puts++] = {
        .source = weights.data(),
        .bytes = num_weights * sizeof(float),
        .region = target.region.slot,
        .signal = signal,
        .offset = target.offset + first * sizeof(float)};
  }
  rank_.transport.put(static_cast<int>(to), {puts.data(), num_puts});
}

// Arrivals from this rank to itself go to all their slots at once.
void Dispatch::keep(int64_t chunk) {
  const Arrivals& pair = plan_.sent[self_];
  const ChunkRange range = chunk_range(pair.size(), chunk);
  for (int64_t i = range.first; i < range.last; ++i) {
    const auto a = static_cast<size_t>(i);
    for (const Stream& stream : streams_) {
      const std::byte* row = stream.source + static_cast<size_t>(pair.token[a]) * stream.row_bytes;
      for (const int32_t slot : pair.slots(i)) {
        copy_bytes(
            stream.out + static_cast<size_t>(slot) * stream.row_bytes, row, stream.row_bytes
        );
      }
    }
    if (weights_ != nullptr) {
      std::array<float, kMaxTopk> weights;
      size_t num_weights = 0;
      for (auto j = pair.route_begin[a]; j < pair.route_begin[a + 1]; ++j) {
        weights[num_weights++] =
            weights_[weight_index(plan_, pair.token[a], pair.k[static_cast<size_t>(j)])];
      }
      put_row_weights(pair, i, weights.data());
    }
  }
}

void Dispatch::zero(size_t range) {
  const auto [begin, end] = plan_.padding[range];
  const auto first = static_cast<size_t>(begin);
  const auto count = static_cast<size_t>(end - begin);
  for (const Stream& stream : streams_) {
    std::memset(stream.out + first * stream.row_bytes, 0, count * stream.row_bytes);
  }
  if (row_weights_ != nullptr) {  // padding exists only where a row has one weight
    std::memset(row_weights_ + first, 0, count * sizeof(float));
  }
}

// Claims the next chunk of one source if it is complete.
bool Dispatch::fan_out_next(size_t source) {
  int64_t chunk = next_arrival_[source].load(std::memory_order_relaxed);
  if (chunk >= num_chunks(plan_.received[source].size()) || !is_arrived(source, chunk) ||
      !next_arrival_[source].compare_exchange_strong(chunk, chunk + 1)) {
    return false;
  }
  fan_out(source, chunk);
  return true;
}

void Dispatch::fan_out(size_t source, int64_t chunk) {
  const Arrivals& pair = plan_.received[source];
  const ChunkRange range = chunk_range(pair.size(), chunk);
  for (int64_t i = range.first; i < range.last; ++i) {
    const std::span<const int32_t> slots = pair.slots(i);
    for (const Stream& stream : streams_) {
      const auto at_slot = [&](int32_t slot) {
        return stream.out + static_cast<size_t>(slot) * stream.row_bytes;
      };
      // Direct: the row lies in its primary slot already.
      const std::byte* row = stream.staged == nullptr
                                 ? at_slot(slots[0])
                                 : call_.staging_data + (*stream.staged)[source] +
                                       static_cast<size_t>(i) * stream.row_bytes;
      for (const int32_t slot : slots.subspan(stream.staged == nullptr ? 1 : 0)) {
        copy_bytes(at_slot(slot), row, stream.row_bytes);
      }
    }
    if (row_weights_ != nullptr) {
      const auto* staged =
          reinterpret_cast<const float*>(call_.staging_data + call_.staging.weights[source]);
      put_row_weights(pair, i, staged + pair.route_begin[static_cast<size_t>(i)]);
    }
  }
}

void Dispatch::put_row_weights(const Arrivals& pair, int64_t arrival, const float* weights) {
  const auto a = static_cast<size_t>(arrival);
  const auto first = static_cast<size_t>(pair.route_begin[a]);
  const auto last = static_cast<size_t>(pair.route_begin[a + 1]);
  if (pair.one_row) {  // the row's other places belong to other ranks
    const auto topk = static_cast<size_t>(plan_.shape.topk);
    std::memset(
        row_weights_ + static_cast<size_t>(pair.slot[first]) * topk, 0, topk * sizeof(float)
    );
  }
  for (size_t j = first; j < last; ++j) {
    row_weights_[row_weight_index(plan_, pair, j)] = weights[j - first];
  }
}

// Puts that complete a chunk, on top of what the signal had before the call.
uint64_t Dispatch::wanted(size_t source, int64_t chunk) const {
  const ChunkRange range = chunk_range(plan_.received[source].size(), chunk);
  const uint32_t signal =
      rank_.signals.dispatch(static_cast<uint32_t>(source), static_cast<uint32_t>(chunk));
  return rank_.settled[signal] + static_cast<uint64_t>(range.last - range.first) * streams_.size() +
         (weights_ != nullptr ? 1 : 0);
}

bool Dispatch::is_arrived(size_t source, int64_t chunk) const {
  const uint32_t signal =
      rank_.signals.dispatch(static_cast<uint32_t>(source), static_cast<uint32_t>(chunk));
  return rank_.transport.signal_value(signal) >= wanted(source, chunk);
}

void Dispatch::wait_for_arrival() {
  // Sources with an unclaimed chunk, as (source, chunk); empty when others claimed the last ones.
  const auto each_unclaimed = [this](auto&& visit) {
    for (size_t source = 0; source < num_ranks_; ++source) {
      const int64_t chunk = next_arrival_[source].load(std::memory_order_relaxed);
      if (source != self_ && chunk < num_chunks(plan_.received[source].size())) {
        visit(source, chunk);
      }
    }
  };
  const auto ready = [&] {
    bool is_ready = true;  // nothing unclaimed: the worker is done
    bool has_arrival = false;
    each_unclaimed([&](size_t source, int64_t chunk) {
      is_ready = false;
      has_arrival = has_arrival || is_arrived(source, chunk);
    });
    return is_ready || has_arrival;
  };
  const auto missing = [&] {
    std::vector<Missing> late;
    each_unclaimed([&](size_t source, int64_t chunk) {
      const uint32_t signal =
          rank_.signals.dispatch(static_cast<uint32_t>(source), static_cast<uint32_t>(chunk));
      late.push_back(
          {.peer = static_cast<int>(source),
           .signal = signal,
           .seen = rank_.transport.signal_value(signal),
           .wanted = wanted(source, chunk)}
      );
    });
    return late;
  };
  rank_.waiter.until(
      {.op = "dispatch", .call = call_.number, .what = "rows"},
      ready,
      missing,
      [this] { return rank_.workers.is_stopping(); }
  );
}

void Dispatch::settle() {
  for (size_t source = 0; source < num_ranks_; ++source) {
    const int64_t chunks = source == self_ ? 0 : num_chunks(plan_.received[source].size());
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const uint32_t signal =
          rank_.signals.dispatch(static_cast<uint32_t>(source), static_cast<uint32_t>(chunk));
      rank_.settled[signal] = wanted(source, chunk);
    }
  }
}

}  // namespace

void dispatch_cpu(
    const CpuRank& rank, const CpuCall& call, const DispatchInput& in, const DispatchOutput& out
) {
  Dispatch(rank, call, in, out).run();
}

}  // namespace weft
