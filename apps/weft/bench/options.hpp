// SPDX-License-Identifier: Apache-2.0
// What `weft bench` measures.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ranks.hpp"
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
};

}  // namespace weft::program
