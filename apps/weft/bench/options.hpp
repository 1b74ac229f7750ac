// SPDX-License-Identifier: Apache-2.0
// What `weft bench` measures.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/ranks.hpp"
#include "plan/build.hpp"
#include "weft/exchange.hpp"
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
  int64_t num_tokens = 2048;  // per rank
  int64_t hidden = 2048;
  int num_experts = 64;
  int topk = 8;
  DType dtype = DType::kBFloat16;
  Layout layout = Layout::kExpertMajor;
  int64_t pad_multiple = 128;
  double skew = 0;
  std::string routing_file;  // instead of made-up routing; gives ranks, experts, topk and tokens
  int threads_per_rank = 0;
  std::string transport = "auto";
  bool is_staged = false;       // output in ordinary memory instead of the exchange's
  std::string device = "auto";  // cpu, cuda, or a GPU if there is one
  std::vector<int> sms = {};    // of a GPU call, each measured; empty: the default
  bool is_graph = false;        // on a GPU also as a replayed graph
  bool is_fp8 = false;          // on a GPU: rows of one byte an element, a scale for 128 of them
  bool is_copied = false;       // on GPUs: rows travel by copy engines
  Mover mover = Mover::kAuto;
  int iterations = 50;
  int warmup = 5;
  uint64_t seed = 1;
  bool is_checked = true;
  std::string json_path;
  std::string html_path;

  [[nodiscard]] bool wants(std::string_view op) const {
    return ops.empty() || std::find(ops.begin(), ops.end(), op) != ops.end();
  }
  [[nodiscard]] PlanOptions plan_options() const {
    return {.layout = layout, .pad_multiple = layout == Layout::kRankMajor ? 1 : pad_multiple};
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
      options.num_tokens = one.num_tokens;
      options.hidden = one.hidden;
      options.topk = one.topk;
      options.num_experts = one.num_experts;
      options.pad_multiple = name == "D" ? 1 : options.pad_multiple;  // decoding pads nothing
    }
  }
}

// The routing that `weft bench` cycles through.
struct BenchRouting {
  int num_experts = 0;
  int topk = 0;
  std::vector<std::vector<RouteTable>> versions;  // [versions][num_ranks]

  // Of any rank.
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

// Made up or read from the file. Throws Error (kFile) for a file of another number of ranks.
[[nodiscard]] BenchRouting bench_routing(const BenchOptions& options, int num_ranks);

}  // namespace weft::program
