// SPDX-License-Identifier: Apache-2.0
// One measurement file: where it was made and its rows. docs/benchmarks.md says what each field
// means.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "measure/limits.hpp"

namespace weft::program {

// Another way of doing the same work, measured in turn with it in the same run.
struct Rival {
  std::string name;
  double us_p50 = 0;
};

struct ResultRow {
  std::string op = {};  // dispatch, combine, plan, plan+dispatch, ...
  std::string executor = "cpu";
  std::string transport = {};
  std::string layout = {};
  std::string dtype = {};
  int ranks = 0;
  int64_t tokens = 0;  // per rank, the largest
  int64_t hidden = 0;
  int experts = 0;
  int topk = 0;
  int64_t pad = 1;
  int sms = 0;            // 0: not a GPU
  std::string mode = {};  // "exact direct", "exact staged"
  double us_p50 = 0;      // of the slowest rank of each sample
  double us_p99 = 0;
  double wire_bytes = 0;     // of all ranks, mean over the samples' routings
  double logical_bytes = 0;  // likewise
  double limit_us = 0;       // 0: nothing to copy, no limit
  bool checked = false;
  std::optional<Rival> rival = {};

  // At most 100: what was faster than the copies that were measured is itself what copying reaches.
  [[nodiscard]] double percent_of_limit() const {
    return us_p50 > 0 ? std::min(100.0, 100 * limit_us / us_p50) : 0;
  }
  [[nodiscard]] double wire_gbps() const { return us_p50 > 0 ? wire_bytes / us_p50 / 1e3 : 0; }
  [[nodiscard]] double logical_gbps() const {
    return us_p50 > 0 ? logical_bytes / us_p50 / 1e3 : 0;
  }
};

// The file says of which build and machine the rows are, and when. Throws Error (kFile).
void save_results(
    const std::string& path, const std::vector<ResultRow>& rows, const CopyRates& rates
);
// Saves rows of other fields in the same way.
void save_results(
    const std::string& path, const nlohmann::ordered_json& rows, const CopyRates& rates
);

}  // namespace weft::program
