// SPDX-License-Identifier: Apache-2.0
#include "measure/limits.hpp"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <sched.h>
#include <thread>

#include "core/check.hpp"
#include "core/copy.hpp"
#include "core/host_map.hpp"
#include "measure/measure.hpp"

namespace weft::program {
namespace {

constexpr int kStreams = 32;  // write streams per (source, receiver) pair
constexpr int kMinRounds = 3;

void pin_to_core(int index) {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) {
    return;
  }
  int skipped = index % CPU_COUNT(&usable);
  int core = 0;
  while (!CPU_ISSET(core, &usable) || skipped-- > 0) {
    ++core;
  }
  stay_on({&core, 1});
}

}  // namespace

CopyRig::CopyRig(const CopyShape& shape) : shape_(shape) {
  WEFT_CHECK_ARG(
      Context{},
      shape.num_ranks >= 1 && shape.copies >= 1 && shape.row_bytes > 0 && shape.row_bytes % 16 == 0,
      "limits: {} ranks, {} copies of rows of {} B (at least one each, row bytes a multiple of 16)",
      shape.num_ranks,
      shape.copies,
      shape.row_bytes
  );
  if (shape.threads_per_rank == 0) {
    shape_.threads_per_rank = std::max(1, num_usable_cores() / shape.num_ranks);
  }
  num_sources_ = std::max<int64_t>(shape.source_bytes / shape.row_bytes, 1);
  const int64_t num_rows = shape.num_ranks * kStreams * rows_per_stream();
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    sources_.emplace_back(static_cast<size_t>(num_sources_ * shape.row_bytes), std::byte{1});
    targets_.push_back(make_targets(rank));
    receivers_.push_back(SharedMemory::create(static_cast<uint64_t>(num_rows * shape.row_bytes)));
    std::memset(receivers_.back().data(), 0, receivers_.back().bytes());
  }
}

int64_t CopyRig::rows_per_stream() const {
  const int64_t num_copies = num_sources_ * shape_.copies;
  const int64_t rows_per_pair = (num_copies + shape_.num_ranks - 1) / shape_.num_ranks;
  return (rows_per_pair + kStreams - 1) / kStreams;
}

// Copies go to the ranks in turn, within a rank to streams in a scrambled order, each growing by
// one row: the pattern of rows that are grouped by expert.
std::vector<CopyRig::Target> CopyRig::make_targets(int rank) const {
  std::vector<int64_t> sent(static_cast<size_t>(shape_.num_ranks), 0);
  std::vector<Target> targets;
  for (int64_t i = 0; i < num_sources_ * shape_.copies; ++i) {
    const auto to = static_cast<int>((rank + i) % shape_.num_ranks);
    const int64_t n = sent[static_cast<size_t>(to)]++;
    const int64_t stream = n * 13 % kStreams;  // 13 and 32 share no factor: each stream in turn
    const int64_t row = (rank * kStreams + stream) * rows_per_stream() + n / kStreams;
    targets.push_back({to, static_cast<int32_t>(row)});
  }
  return targets;
}

// One thread's share of one round.
void CopyRig::copy(int rank, int thread, CopyMethod method) {
  const auto row_bytes = static_cast<size_t>(shape_.row_bytes);
  const int64_t begin = num_sources_ * thread / shape_.threads_per_rank;
  const int64_t end = num_sources_ * (thread + 1) / shape_.threads_per_rank;
  const auto& my_targets = targets_[static_cast<size_t>(rank)];
  std::byte* const source = sources_[static_cast<size_t>(rank)].data();
  for (int64_t i = begin * shape_.copies; i < end * shape_.copies; ++i) {
    const Target target = my_targets[static_cast<size_t>(i)];
    std::byte* own = source + i / shape_.copies * shape_.row_bytes;
    std::byte* shared =
        receivers_[static_cast<size_t>(target.rank)].data() + target.row * shape_.row_bytes;
    switch (method) {
      case CopyMethod::kMemcpy:
        copy_bytes(shared, own, row_bytes);
        break;
      case CopyMethod::kStream:
        copy_streaming(shared, own, row_bytes);
        break;
      case CopyMethod::kGather:
        copy_bytes(own, shared, row_bytes);
        break;
    }
  }
  streaming_fence();
}

double CopyRig::measure(const CopySettings& settings) {
  const int num_threads = shape_.num_ranks * shape_.threads_per_rank;
  std::barrier sync(num_threads);
  std::atomic<bool> is_done = false;
  double best_seconds = 0;

  const auto work = [&](int index) {
    if (settings.is_pinned) {
      pin_to_core(index);
    }
    const Stopwatch total;
    for (int round = 0; !is_done.load(); ++round) {
      sync.arrive_and_wait();
      const Stopwatch watch;
      copy(index / shape_.threads_per_rank, index % shape_.threads_per_rank, settings.method);
      sync.arrive_and_wait();
      if (index == 0) {
        const double seconds = watch.seconds();
        best_seconds = round == 0 ? seconds : std::min(best_seconds, seconds);
        is_done = round + 1 >= kMinRounds && total.seconds() > settings.seconds;
      }
      sync.arrive_and_wait();
    }
  };
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < num_threads; ++i) {
      threads.emplace_back(work, i);
    }
  }
  const double rows = static_cast<double>(shape_.num_ranks) * static_cast<double>(num_sources_);
  const double bytes = rows * shape_.copies * static_cast<double>(shape_.row_bytes);
  return bytes / best_seconds / 1e9;
}

CopyRates copy_rates(const CopyShape& shape) {
  CopyRig rig(shape);
  const double memcpy = rig.measure({.method = CopyMethod::kMemcpy});
  const double stream = rig.measure({.method = CopyMethod::kStream});
  return {std::max(memcpy, stream), rig.measure({.method = CopyMethod::kGather})};
}

}  // namespace weft::program
