// SPDX-License-Identifier: Apache-2.0
// A million small random exchanges on GPUs, ranks delayed at random, every bit compared with the
// reference. Ends with 1 at the first difference, naming the seed that shows it again.
//
// One exchange serves many batches of cases; while its ranks run a batch, other threads make the
// next.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <optional>
#include <thread>

#include "plan/random_routing.hpp"
#include "support/gpus.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  int64_t num_calls = 1'000'000;
  uint64_t seed = 1;
  int batch = 64;          // cases
  int exchange_life = 40;  // batches
  double most_seconds = 0;
};

using Batch = std::vector<CaseData>;

ExchangeSetup setup_of(uint64_t seed) {
  RandomSource random(seed);
  ExchangeSetup setup = random_setup(seed);
  setup.num_ranks = std::array{1, 2, 3, 4, 4, 8}[random.below(6)];
  setup.num_experts = setup.num_ranks * static_cast<int>(random.between(1, 4));
  setup.max_tokens = random.between(1, 24);
  setup.hidden = 8 * random.between(1, 6);
  const int all = static_cast<int>(gpus_here().gpus.size());
  setup.num_gpus = random.below(4) == 0 ? 1 : all;
  setup.mover =
      gpus_here().gpus[0].major >= 9 && random.below(2) == 0 ? Mover::kBulk : Mover::kVector;
  setup.num_sms = std::array{0, 2, 4, 9}[random.below(4)];
  setup.has_own_stream = random.below(2) == 0;
  setup.timeout = std::chrono::seconds(20);
  return setup;
}

// Makes `size` cases with one thread for every two hardware threads.
Batch make_batch(const ExchangeSetup& setup, uint64_t first_seed, int size) {
  std::vector<std::optional<CaseData>> made(static_cast<size_t>(size));
  std::atomic<size_t> next = 0;
  {
    std::vector<std::jthread> threads;
    for (unsigned i = 0; i < std::max(1U, std::thread::hardware_concurrency() / 2); ++i) {
      threads.emplace_back([&] {
        for (size_t at = next++; at < made.size(); at = next++) {
          Case spec = random_case(setup, first_seed + at);
          spec.is_late = at % 16 == 3;
          made[at] = make_case_data(setup, spec);
        }
      });
    }
  }
  Batch batch;
  for (auto& data : made) {
    batch.push_back(std::move(*data));
  }
  return batch;
}

int64_t num_calls(const Batch& batch) {
  int64_t sum = 0;
  for (const CaseData& data : batch) {
    sum += 1 + static_cast<int64_t>(data.calls.size());
  }
  return sum;
}

// Two batches, one in use and one in the making.
class Soak {
 public:
  explicit Soak(const Options& options) : options_(options), begin_(Clock::now()) {}

  bool run() {
    for (uint64_t round = options_.seed; !is_over(); ++round) {
      const ExchangeSetup setup = setup_of(round);
      const uint64_t seed = round << 24;
      current_ = make_batch(setup, seed, options_.batch);
      run_threads(setup.num_ranks, [&](const Group& group) { serve(group, setup, seed); });
    }
    print();
    return failure_.empty();
  }

  [[nodiscard]] const std::string& failure() const { return failure_; }

 private:
  // One rank's share of a round; rank 0 also makes the batches and counts.
  void serve(const Group& group, const ExchangeSetup& setup, uint64_t seed) {
    Exchange exchange(group, setup.config(group.rank()));
    RandomSource random(seed + static_cast<uint64_t>(group.rank()));
    bool goes_on = true;
    for (int i = 1; goes_on; ++i) {
      std::jthread maker;
      if (group.rank() == 0) {
        maker = std::jthread([&, i] {
          const auto first =
              seed + static_cast<uint64_t>(i) * static_cast<uint64_t>(options_.batch);
          next_ = make_batch(setup, first, options_.batch);
        });
      }
      std::string failure;
      for (size_t at = 0; at < current_.size(); at += kTogether) {
        if (random.below(8) == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(random.below(400)));
        }
        const size_t count = std::min(kTogether, current_.size() - at);
        const std::string one = run_cases(exchange, {current_.data() + at, count});
        failure = failure.empty() ? one : failure;
        group.barrier();  // looking at a plan may wait for all kernels on the GPU
      }
      if (maker.joinable()) {
        maker.join();
      }
      goes_on = agree(group, failure, i);
    }
  }

  // Collective, after a batch: whether there is another.
  bool agree(const Group& group, const std::string& failure, int num_batches) {
    const auto* text = reinterpret_cast<const std::byte*>(failure.data());
    const auto failures = group.all_gather({text, failure.size()});
    bool is_good = true;
    for (const Bytes& each : failures) {
      is_good = is_good && each.empty();
    }
    if (group.rank() == 0) {
      for (const Bytes& each : failures) {
        failure_.append(reinterpret_cast<const char*>(each.data()), each.size());
        failure_ += each.empty() ? "" : "\n";
      }
      num_done_ += num_calls(current_);
      current_.swap(next_);
      goes_on_ = is_good && num_batches < options_.exchange_life && !is_over();
      if (Clock::now() - shown_ > std::chrono::seconds(2)) {
        print();
      }
    }
    group.barrier();
    return goes_on_;
  }

  [[nodiscard]] bool is_over() const {
    const std::chrono::duration<double> elapsed = Clock::now() - begin_;
    return !failure_.empty() || num_done_ >= options_.num_calls ||
           (options_.most_seconds > 0 && elapsed.count() > options_.most_seconds);
  }

  void print() {
    shown_ = Clock::now();
    const std::chrono::duration<double> elapsed = shown_ - begin_;
    fmt::print("soak: {} of {} calls, {:.0f} s\n", num_done_, options_.num_calls, elapsed.count());
    std::fflush(stdout);
  }

  static constexpr size_t kTogether = 4;  // plans alive at once

  const Options& options_;
  Clock::time_point begin_;
  Clock::time_point shown_ = begin_;
  Batch current_;
  Batch next_;
  int64_t num_done_ = 0;
  std::atomic<bool> goes_on_ = true;
  std::string failure_;
};

int soak(int argc, char** argv) {
  Options options;
  CLI::App app("Soak on GPUs: random plans, dispatches and combines, every bit compared");
  app.add_option("--calls", options.num_calls, "How many in all")->capture_default_str();
  app.add_option("--seed", options.seed, "Of the first exchange")->capture_default_str();
  app.add_option("--batch", options.batch, "Cases made at once")->capture_default_str();
  app.add_option("--batches", options.exchange_life, "Of one exchange")->capture_default_str();
  app.add_option("--seconds", options.most_seconds, "Ends after so long; 0: never")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  if (gpus_here().gpus.empty()) {
    fmt::print("soak: no GPU: {}\n", gpus_here().none_reason);
    return 0;
  }
  Soak run(options);
  try {
    if (run.run()) {
      fmt::print("soak: all bits right\n");
      return 0;
    }
    fmt::print(stderr, "soak: {}\n", run.failure());
  } catch (const std::exception& error) {
    fmt::print(stderr, "soak: {}\n", error.what());
  }
  return 1;
}

}  // namespace
}  // namespace weft::test

int main(int argc, char** argv) {
  return weft::test::soak(argc, argv);
}
