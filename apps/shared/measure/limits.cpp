// SPDX-License-Identifier: Apache-2.0
#include "measure/limits.hpp"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <map>
#include <mutex>
#include <pthread.h>
#include <sched.h>
#include <thread>
#include <vector>

#include "core/check.hpp"
#include "core/copy.hpp"
#include "group/shared_memory.hpp"
#include "measure/measure.hpp"

namespace weft::program {
namespace {

constexpr int kStreams = 32;  // write streams per (source, receiver) pair
constexpr int kMinRounds = 3;

// Where a copy goes: row of a receiver's memory.
struct Target {
  int32_t rank = 0;
  int32_t row = 0;
};

// Copies go to the ranks in turn, within a rank to streams in a scrambled order, each growing by
// one row: the pattern of rows that are grouped by expert.
std::vector<Target> make_targets(const CopyShape& shape, int rank, int64_t num_copies) {
  const int64_t rows_per_pair = (num_copies + shape.num_ranks - 1) / shape.num_ranks;
  const int64_t rows_per_stream = (rows_per_pair + kStreams - 1) / kStreams;
  std::vector<int64_t> sent(static_cast<size_t>(shape.num_ranks), 0);
  std::vector<Target> targets;
  targets.reserve(static_cast<size_t>(num_copies));
  for (int64_t i = 0; i < num_copies; ++i) {
    const auto to = static_cast<int>((rank + i) % shape.num_ranks);
    const int64_t n = sent[static_cast<size_t>(to)]++;
    const int64_t stream = n * 13 % kStreams;  // 13 and 32 share no factor: each stream in turn
    const int64_t row = (rank * kStreams + stream) * rows_per_stream + n / kStreams;
    targets.push_back({to, static_cast<int32_t>(row)});
  }
  return targets;
}

int64_t rows_per_receiver(const CopyShape& shape, int64_t num_copies) {
  const int64_t rows_per_pair = (num_copies + shape.num_ranks - 1) / shape.num_ranks;
  return shape.num_ranks * kStreams * ((rows_per_pair + kStreams - 1) / kStreams);
}

void pin_to_core(int index) {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) {
    return;
  }
  int seen = 0;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &usable) || seen++ != index % CPU_COUNT(&usable)) {
      continue;
    }
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    static_cast<void>(pthread_setaffinity_np(pthread_self(), sizeof(one), &one));
    return;
  }
}

CopyShape with_threads(CopyShape shape) {
  if (shape.threads_per_rank == 0) {
    shape.threads_per_rank = std::max(1, num_usable_cores() / shape.num_ranks);
  }
  return shape;
}

}  // namespace

struct CopyRig::State {
  CopyShape shape;
  int64_t num_sources = 0;  // rows per rank
  std::vector<std::vector<std::byte>> sources;
  std::vector<std::vector<Target>> targets;
  std::vector<SharedMemory> receivers;

  explicit State(const CopyShape& asked) : shape(with_threads(asked)) {
    WEFT_CHECK_ARG(
        Context{},
        shape.num_ranks >= 1 && shape.copies >= 1 && shape.row_bytes > 0 &&
            shape.row_bytes % 16 == 0,
        "limits: {} ranks, {} copies of rows of {} B (at least one each, row bytes a multiple of "
        "16)",
        shape.num_ranks,
        shape.copies,
        shape.row_bytes
    );
    num_sources = std::max<int64_t>(shape.source_bytes / shape.row_bytes, 1);
    const int64_t num_rows = rows_per_receiver(shape, num_sources * shape.copies);
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      sources.emplace_back(static_cast<size_t>(num_sources * shape.row_bytes), std::byte{1});
      targets.push_back(make_targets(shape, rank, num_sources * shape.copies));
      receivers.push_back(SharedMemory::create(static_cast<uint64_t>(num_rows * shape.row_bytes)));
      std::memset(receivers.back().data(), 0, receivers.back().bytes());
    }
  }

  [[nodiscard]] double bytes_per_round() const {
    return static_cast<double>(shape.num_ranks) * static_cast<double>(num_sources) * shape.copies *
           static_cast<double>(shape.row_bytes);
  }

  // One thread's share of one round.
  void copy(int rank, int thread, CopyMethod method) {
    const auto row_bytes = static_cast<size_t>(shape.row_bytes);
    const int64_t begin = num_sources * thread / shape.threads_per_rank;
    const int64_t end = num_sources * (thread + 1) / shape.threads_per_rank;
    const auto& my_targets = targets[static_cast<size_t>(rank)];
    for (int64_t i = begin * shape.copies; i < end * shape.copies; ++i) {
      const Target target = my_targets[static_cast<size_t>(i)];
      std::byte* own =
          sources[static_cast<size_t>(rank)].data() + i / shape.copies * shape.row_bytes;
      std::byte* shared =
          receivers[static_cast<size_t>(target.rank)].data() + target.row * shape.row_bytes;
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
};

CopyRig::CopyRig(const CopyShape& shape) : state_(std::make_unique<State>(shape)) {}
CopyRig::~CopyRig() = default;

double CopyRig::measure(const CopySettings& settings) {
  const int num_threads = state_->shape.num_ranks * state_->shape.threads_per_rank;
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
      state_->copy(
          index / state_->shape.threads_per_rank,
          index % state_->shape.threads_per_rank,
          settings.method
      );
      sync.arrive_and_wait();
      if (index == 0) {
        const double seconds = watch.seconds();
        best_seconds = round == 0 ? seconds : std::min(best_seconds, seconds);
        is_done = round + 1 >= kMinRounds && total.seconds() > settings.seconds;
      }
      sync.arrive_and_wait();
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back(work, i);
  }
  for (auto& thread : threads) {
    thread.join();
  }
  return state_->bytes_per_round() / best_seconds / 1e9;
}

CopyRates copy_rates(const CopyShape& shape) {
  static std::mutex mutex;
  static std::map<CopyShape, CopyRates> known;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = known.try_emplace(with_threads(shape));
  if (is_new) {
    CopyRig rig(shape);
    entry->second.scatter = std::max(
        rig.measure({.method = CopyMethod::kMemcpy}), rig.measure({.method = CopyMethod::kStream})
    );
    entry->second.gather = rig.measure({.method = CopyMethod::kGather});
  }
  return entry->second;
}

CopyRates copy_rates(int num_ranks, int64_t row_bytes) {
  return copy_rates({.num_ranks = num_ranks, .row_bytes = row_bytes});
}

double dispatch_limit_us(const ExchangeBytes& bytes, const CopyRates& rates) {
  return bytes.logical / rates.scatter / 1e3;
}

double combine_limit_us(const ExchangeBytes& bytes, const CopyRates& rates) {
  return bytes.logical / rates.gather / 1e3;
}

}  // namespace weft::program
