// SPDX-License-Identifier: Apache-2.0
// How long does a GPU take for balancing, beyond the plan itself? Counts of all ranks are made up
// and lie there already: one GPU stands for any number of ranks. Two times: the plan (placement and
// quotas), and what a rank does with its own routes (it counts them before and assigns them after).
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "balance_routing.hpp"
#include "cli/standard_streams.hpp"
#include "core/gpu/devices.hpp"
#include "core/gpu/stream.hpp"
#include "cuda/memory/owners.hpp"
#include "cuda/plan/balance/launch.hpp"
#include "measure/gpu_timer_cuda.hpp"
#include "measure/measure.hpp"
#include "measure/results.hpp"
#include "plan/balance/balance.hpp"
#include "plan/random_routing.hpp"
#include "report/json_text.hpp"
#include "report/table.hpp"

namespace weft::bench {
namespace {

using namespace weft::program;

constexpr int kSkipped = 77;  // for CTest: nothing to measure here

class DeviceNumbers {
 public:
  explicit DeviceNumbers(size_t size) : size_(size) { buffer_.create(size, nullptr, {}); }
  explicit DeviceNumbers(const std::vector<int32_t>& numbers) : DeviceNumbers(numbers.size()) {
    WEFT_CUDA(
        Context{}, cudaMemcpy(get(), numbers.data(), buffer_.bytes(), cudaMemcpyHostToDevice)
    );
  }
  [[nodiscard]] int32_t* get() const { return buffer_.get(); }
  [[nodiscard]] std::vector<int32_t> read() const {
    std::vector<int32_t> numbers(size_);
    WEFT_CUDA(
        Context{}, cudaMemcpy(numbers.data(), get(), buffer_.bytes(), cudaMemcpyDeviceToHost)
    );
    return numbers;
  }

 private:
  size_t size_;
  CudaBuffer<int32_t> buffer_;
};

// Returns as many routes to each expert as were counted, shuffled.
std::vector<int32_t> routes_of(const int32_t* counts, int num_experts, uint64_t seed) {
  std::vector<int32_t> routes;
  for (int expert = 0; expert < num_experts; ++expert) {
    routes.insert(routes.end(), static_cast<size_t>(counts[expert]), expert);
  }
  RandomSource random(seed);
  for (size_t i = routes.size(); i > 1; --i) {
    std::swap(routes[i - 1], routes[random.below(i)]);
  }
  return routes;
}

// Both launches of rank 0 over memory of their own.
class Rig {
 public:
  Rig(const BalanceShape& shape, int replicas, const RouteCounts& counts)
      : shape_{shape.ranks, shape.experts, replicas},
        wanted_(plan_balance(counts, shape.ranks, {.replicas = replicas})),
        experts_(routes_of(counts.data(), shape.experts, shape.seed)),
        counts_(counts),
        routes_(experts_) {
    plan_.shape = shape_;
    plan_.counts = counts_.get();
    plan_.replicas = replicas_.get();
    plan_.rows = rows_.get();
    plan_.quotas = quotas_.get();
    plan_.places = {first_.get(), next_.get()};
    assign_.shape = shape_;
    assign_.topk_idx = routes_.get();
    assign_.index_bytes = sizeof(int32_t);
    assign_.stride = 1;
    assign_.topk = 1;  // only how many routes there are counts
    assign_.num_tokens = static_cast<int64_t>(experts_.size());
    assign_.block_counts = block_counts_.get();
    assign_.counts = own_counts_.get();
    assign_.quotas = plan_.quotas;
    assign_.places = plan_.places;
    assign_.physical = physical_.get();
    prepare_balance();
    check_balance(shape_);
  }

  void plan(cudaStream_t stream) const { launch_plan_balance(plan_, {}, stream); }
  void assign(cudaStream_t stream) const {
    launch_count_routes(assign_, stream);
    launch_assign_routes(assign_, stream);
  }
  // Returns whether both launches gave what a CPU gives.
  [[nodiscard]] bool is_right() const {
    return replicas_.read() == wanted_.replicas() &&
           std::ranges::equal(quotas_.read(), wanted_.quotas) &&
           physical_.read() == assign_routes(wanted_, 0, experts_);
  }

 private:
  [[nodiscard]] size_t count() const { return static_cast<size_t>(shape_.count()); }
  [[nodiscard]] size_t ranks() const { return static_cast<size_t>(shape_.num_ranks); }
  [[nodiscard]] size_t num_experts() const { return static_cast<size_t>(shape_.num_experts); }

  PhysicalExperts shape_;
  Balance wanted_;
  std::vector<int32_t> experts_;
  DeviceNumbers counts_;
  DeviceNumbers routes_;
  DeviceNumbers replicas_{ranks() * static_cast<size_t>(shape_.replicas)};
  DeviceNumbers rows_{count()};
  DeviceNumbers quotas_{ranks() * count()};
  DeviceNumbers first_{num_experts()};
  DeviceNumbers next_{count()};
  DeviceNumbers block_counts_{kAssignBlocks * num_experts()};
  DeviceNumbers own_counts_{num_experts()};
  DeviceNumbers physical_{experts_.size()};
  BalanceLaunch plan_;
  AssignLaunch assign_;
};

struct Samples {
  int warmup = 20;
  int iterations = 200;
};

nlohmann::ordered_json measure(
    const BalanceShape& shape,
    int replicas,
    const std::string& routing,
    const RouteCounts& counts,
    const Samples& samples
) {
  const GpuStream owner(0);
  const int gpus[] = {0};
  const cudaStream_t streams[] = {owner.get()};
  GpuTimer timer(gpus, streams);
  const Rig rig(shape, replicas, counts);
  const auto time = [&](const auto& work) {
    return timer.measure(samples.warmup, samples.iterations, [&](int) { work(streams[0]); });
  };
  const auto plan = time([&](cudaStream_t stream) { rig.plan(stream); });
  const auto assign = time([&](cudaStream_t stream) { rig.assign(stream); });
  return {
      {"op", "balance_plan"},
      {"executor", "cuda"},
      {"ranks", shape.ranks},
      {"tokens", shape.tokens},
      {"experts", shape.experts},
      {"topk", kBalanceTopk},
      {"seed", shape.seed},
      {"replicas", replicas},
      {"routing", routing},
      {"us_p50", rounded(percentile(plan, 50), 3)},
      {"us_p99", rounded(percentile(plan, 99), 3)},
      {"assign_us_p50", rounded(percentile(assign, 50), 3)},
      {"assign_us_p99", rounded(percentile(assign, 99), 3)},
      {"checked", rig.is_right()},
  };
}

std::vector<std::string> cells(const nlohmann::ordered_json& row) {
  const auto number = [&](const char* key) {
    return fmt::format("{:.1f}", row[key].get<double>());
  };
  return {
      row["routing"],
      fmt::format("{}", row["ranks"].get<int>()),
      fmt::format("{}", row["experts"].get<int>()),
      fmt::format("{}", row["replicas"].get<int>()),
      number("us_p50"),
      number("us_p99"),
      number("assign_us_p50"),
      row["checked"].get<bool>() ? "yes" : "WRONG",
  };
}

int run(int argc, char** argv) {
  CLI::App app("How long does a GPU take for balancing?");
  std::string json_path;
  std::string routing_path;
  int64_t tokens = 4096;
  Samples samples;
  int replicas = 2;
  bool is_smoke = false;
  app.add_option("--routing", routing_path, "Take the last step of this routing file too (top-8)")
      ->check(CLI::ExistingFile);
  app.add_option("--json", json_path, "Write the results to this file");
  app.add_option("--tokens", tokens, "Tokens of each rank")->check(CLI::Range(1, 1 << 20));
  app.add_option("--replicas", replicas, "Most replicas on each rank")
      ->check(CLI::Range(1, kMostReplicas))
      ->capture_default_str();
  app.add_option("--iterations", samples.iterations, "Samples")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  app.add_flag("--smoke", is_smoke, "Small, as a test");
  CLI11_PARSE(app, argc, argv);

  const GpuList gpus = list_gpus();
  if (gpus.gpus.empty()) {
    fmt::print("no GPU to measure ({})\n", gpus.none_reason);
    return kSkipped;
  }
  samples = is_smoke ? Samples{1, 2} : samples;
  auto rows = nlohmann::ordered_json::array();
  Table table(columns("routing|ranks|experts|replicas|plan p50 us|p99 us|assign p50 us|checked"));
  for (const NamedRouting& routing : balance_routings(routing_path)) {
    for (const int ranks : {8, 64}) {
      for (const int experts : {128, 256}) {
        BalanceShape shape = {ranks, experts, is_smoke ? 64 : tokens, 1};
        const RouteCounts counts = routing.counts(shape);
        if (!counts.empty()) {
          rows.push_back(measure(shape, replicas, routing.name, counts, samples));
          table.add_row(cells(rows.back()));
        }
      }
    }
  }
  fmt::print("{}", table.text());
  if (!json_path.empty()) {
    save_results(json_path, rows, {});
  }
  return std::ranges::all_of(rows, [](const auto& row) { return row["checked"]; }) ? 0 : 1;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::program::open_standard_streams();
  return weft::bench::run(argc, argv);
}
