// SPDX-License-Identifier: Apache-2.0
// Measurements of `weft bench`, on the CPU (run.cpp) or on GPUs (gpu_cuda.cpp). Next: report.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/ranks.hpp"
#include "cuda/exchange/tuning.hpp"
#include "measure/bench_check.hpp"
#include "measure/results.hpp"
#include "plan/build.hpp"
#include "report/table.hpp"
#include "routing/source.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"
#include "weft/tensor.hpp"

namespace weft::program {

enum class BenchOp : uint8_t { kPlan, kDispatch, kCombine, kPlanDispatch };

inline constexpr std::array<std::pair<std::string_view, BenchOp>, 4> kBenchOps = {
    {{"plan", BenchOp::kPlan},
     {"dispatch", BenchOp::kDispatch},
     {"combine", BenchOp::kCombine},
     {"plan+dispatch", BenchOp::kPlanDispatch}}};

struct BenchOptions {
  std::vector<std::string> ops;  // names; empty: all
  RankOptions ranks = {};
  MadeUpRouting made_up = {.num_tokens = 2048, .num_experts = 64};  // its seed is also of the rows
  int64_t hidden = 2048;
  DType dtype = DType::kBFloat16;
  Layout layout = Layout::kExpertMajor;
  SumOrder order = SumOrder::kRank;
  int64_t pad_multiple = 128;
  std::string routing_file;  // instead of made-up routing; gives ranks, experts, topk and tokens
  int threads_per_rank = 0;
  std::string transport = "auto";
  bool is_staged = false;  // output in ordinary memory instead of the exchange's
  DeviceChoice device = {};
  std::vector<int> sms = {};  // of a GPU call, each measured; empty: the default
  bool is_graph = false;      // on a GPU also as a replayed graph
  bool is_fp8 = false;        // on a GPU: rows of one byte an element, a scale for 128 of them
  bool is_copied = false;     // on GPUs: rows travel by copy engines
  Mover mover = Mover::kAuto;
  int iterations = 50;
  int warmup = 5;
  bool is_checked = true;
  std::string json_path;
  std::string html_path;

  [[nodiscard]] bool wants(std::string_view op) const {
    return ops.empty() || std::find(ops.begin(), ops.end(), op) != ops.end();
  }
  [[nodiscard]] PlanOptions plan_options() const {
    const int64_t pad = layout == Layout::kRankMajor ? 1 : pad_multiple;
    return {.layout = layout, .pad_multiple = pad, .order = order};
  }
};

// The shapes that published figures are about: "A" to "D"; everything else of the options stays as
// it is. Another name changes nothing.
inline void take_case(BenchOptions& options, std::string_view name) {
  struct Reference {
    std::string_view name;
    int64_t num_tokens;
    int64_t hidden;
    int topk;
    int num_experts;
  };
  constexpr std::array<Reference, 4> kCases = {
      {{"A", 4096, 7168, 8, 256},
       {"B", 8192, 2048, 8, 128},  // Qwen3-30B-A3B
       {"C", 4096, 4096, 2, 8},    // Mixtral
       {"D", 128, 7168, 8, 256}}};
  for (const Reference& one : kCases) {
    if (one.name == name) {
      options.made_up.num_tokens = one.num_tokens;
      options.made_up.topk = one.topk;
      options.made_up.num_experts = one.num_experts;
      options.hidden = one.hidden;
      options.pad_multiple = name == "D" ? 1 : options.pad_multiple;  // decoding pads nothing
    }
  }
}

// The routing that `weft bench` cycles through.
struct BenchRouting {
  int num_experts = 0;
  int topk = 0;
  std::vector<std::vector<RouteTable>> versions;  // [versions][num_ranks]

  // Most tokens of any rank.
  [[nodiscard]] int64_t max_tokens() const {
    int64_t most = 0;
    for (const auto& routes : versions) {
      for (const RouteTable& table : routes) {
        most = std::max(most, table.num_tokens);
      }
    }
    return most;
  }
};

// Makes up or reads the routing. Throws Error (kFile) for a file of another number of ranks.
[[nodiscard]] BenchRouting bench_routing(const BenchOptions& options, int num_ranks);

struct BenchResult {
  ResultRow row;
  std::vector<double> samples_us;  // slowest rank of each
};

struct BenchReport {
  int64_t row_bytes = 0;
  CopyRates rates = {};  // the best of plain copies of rows of this size
  std::vector<BenchResult> results;
};

// Also out of the rank that sends most, and into the one that gets most.
struct BenchBytes : ExchangeBytes {
  double most_out = 0;
  double most_in = 0;
  double returned = 0;  // what combine brings back across rank boundaries
};

// One rank's exchange, its plans and tensors, and the calls that are timed. A subclass per device
// times them.
class Bench {
 public:
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  virtual ~Bench() = default;

  // Collective. The report is the same on every rank.
  [[nodiscard]] BenchReport run();

  // Queues one call of the routing `version` on the stream.
  void run_once(BenchOp op, size_t version);
  // With a row budget, as a graph needs it.
  [[nodiscard]] Plan plan_in_budget(size_t version);
  // Plans and dispatches, in one launch where that can be; without a budget the host waits for the
  // number of rows.
  [[nodiscard]] Plan plan_and_dispatch(size_t version, bool has_budget);
  [[nodiscard]] size_t num_versions() const { return plans_.size(); }

 protected:
  // Collective. The arguments must stay. `stream`: of all calls, on a GPU.
  Bench(
      const Group& group,
      const BenchOptions& options,
      const BenchRouting& routing,
      const Device& device,
      void* stream
  );

  // Waits for the calls so far.
  virtual void finish() = 0;
  // Collective: what plain copies reach now, of the kind that bounds `op`.
  [[nodiscard]] virtual CopyRates measure_rates(BenchOp op) = 0;
  // Microseconds of each sample on this rank; `graph_calls`: of each graph, 0 for calls outside.
  [[nodiscard]] virtual std::vector<double> time(BenchOp op, int graph_calls, int iterations) = 0;

  [[nodiscard]] bool is_on_gpu() const { return device_.kind == Device::Kind::kCuda; }
  [[nodiscard]] bool is_fp8() const { return options_.is_fp8 && is_on_gpu(); }
  [[nodiscard]] int64_t row_bytes() const;
  // Multiprocessors of this rank's GPU.
  [[nodiscard]] int gpu_sms() const;
  // Without a number of rows: exactly as many as there are.
  [[nodiscard]] PlanOptions plan_options(std::optional<int64_t> row_budget = {}) const;

  const Group& group_;
  const BenchOptions& options_;
  const BenchRouting& routing_;
  size_t rank_;
  Device device_;
  Exchange exchange_;
  int num_sms_ = 0;          // of the calls that follow; 0: by themselves
  std::vector<Plan> plans_;  // by version
  BenchBytes bytes_;         // mean over the versions

 private:
  [[nodiscard]] ExchangeConfig config() const;
  [[nodiscard]] CallOptions call() const;
  [[nodiscard]] Routing routing_of(size_t version) const {
    return {.topk_idx = topk_idx_[version]};
  }
  // A tensor in memory that peers do not know.
  Tensor plain(int64_t rows, int64_t cols, DType dtype);
  [[nodiscard]] DispatchInput input(int64_t num_tokens) const;
  [[nodiscard]] DispatchOutput output(int64_t num_rows) const;
  void dispatch(const Plan& plan);
  // Collective: whether the calls of the first routing give what they should, on all ranks.
  [[nodiscard]] Verdict check();
  [[nodiscard]] bool is_right_after(
      const std::vector<Plan>& expected, const std::function<void()>& dispatch
  );
  [[nodiscard]] int64_t num_checked() const;
  [[nodiscard]] std::string mode_of(int graph_calls) const;
  [[nodiscard]] double limit_us(const ResultRow& row) const;
  [[nodiscard]] BenchBytes bytes_of_all_ranks() const;
  [[nodiscard]] BenchResult measure(BenchOp op, int graph_calls);

  void* stream_;
  CopyRates rates_;  // the best of all turns
  MadeUpRows tokens_;
  MadeUpRows expert_rows_;
  MadeUpRows scale_rows_;
  int64_t max_rows_ = 1;
  Tensor x_;        // tokens
  Tensor experts_;  // rows that combine takes
  Tensor rows_;     // output of dispatch
  Tensor out_;      // output of combine
  Tensor scales_;
  Tensor row_scales_;
  std::vector<ConstTensor> topk_idx_;  // by version
  std::vector<std::shared_ptr<std::byte>> memory_;
  Buffer buffer_;
};

// The first rows of a matrix.
template <class View>
[[nodiscard]] View head(View view, int64_t rows) {
  view.rows = rows;
  return view;
}

// Collective. The report is the same on every rank.
[[nodiscard]] BenchReport run_bench(const Group& group, const BenchOptions& options);

// Collective; rank r uses GPU r % (number of GPUs). `limit_gbps` is what leaves a GPU at most; 0:
// not known, no percentages. The report is the same on every rank.
[[nodiscard]] BenchReport run_gpu_bench(
    const Group& group, const BenchOptions& options, double limit_gbps
);
// Collective. Every sensible split of multiprocessors, timed for dispatch and combine of the
// options' shape: medians of the slowest rank, the same on every rank.
[[nodiscard]] std::vector<TunedSplit> run_gpu_tune(const Group& group, const BenchOptions& options);

// One line that says what was measured.
[[nodiscard]] std::string bench_case_text(const BenchReport& report);
[[nodiscard]] Table bench_table(const BenchReport& report, bool is_checked);
// Throws Error (kFile).
void save_bench_page(const BenchReport& report, const BenchOptions& options);

}  // namespace weft::program
