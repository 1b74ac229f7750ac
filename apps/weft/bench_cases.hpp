// SPDX-License-Identifier: Apache-2.0
// The shapes that published figures are about.
#pragma once

#include <array>
#include <string_view>

#include "bench_options.hpp"

namespace weft::program {

// "A" to "D"; everything else of the options stays as it is. Another name changes nothing.
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

}  // namespace weft::program
