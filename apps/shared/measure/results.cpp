// SPDX-License-Identifier: Apache-2.0
#include "measure/results.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>

#include "core/gpu/devices.hpp"
#include "measure/facts.hpp"
#include "report/json_text.hpp"
#include "report/table.hpp"

namespace weft::program {
namespace {

using Json = nlohmann::ordered_json;

Json row_json(const ResultRow& row) {
  Json json = {
      {"op", row.op},
      {"executor", row.executor},
      {"transport", row.transport},
      {"layout", row.layout},
      {"dtype", row.dtype},
      {"ranks", row.ranks},
      {"tokens", row.tokens},
      {"hidden", row.hidden},
      {"experts", row.experts},
      {"topk", row.topk},
      {"pad", row.pad},
      {"sms", row.sms},
      {"mode", row.mode},
      {"us_p50", rounded(row.us_p50)},
      {"us_p99", rounded(row.us_p99)},
      {"wire_bytes", std::llround(row.wire_bytes)},
      {"logical_bytes", std::llround(row.logical_bytes)},
      {"limit_us", row.limit_us > 0 ? Json(rounded(row.limit_us)) : Json(nullptr)},
      {"percent_of_limit",
       row.limit_us > 0 ? Json(rounded(row.percent_of_limit())) : Json(nullptr)},
      {"checked", row.checked},
  };
  if (row.rival) {
    json["rival"] = {{"name", row.rival->name}, {"us_p50", rounded(row.rival->us_p50)}};
  }
  return json;
}

}  // namespace

void save_results(
    const std::string& path, const std::vector<ResultRow>& rows, const CopyRates& rates
) {
  Json json_rows = Json::array();
  for (const ResultRow& row : rows) {
    json_rows.push_back(row_json(row));
  }
  save_results(path, json_rows, rates);
}

void save_results(const std::string& path, const Json& rows, const CopyRates& rates) {
  const Json build = build_info();
  const Json machine = machine_info();
  const GpuList gpus = list_gpus();
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  Json json = {
      {"commit", build["commit"]},
      {"dirty", build["dirty"]},
      {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(now))},
      {"machine",
       fmt::format(
           "{}, {} cores, {}",
           machine["cpu"].get<std::string>(),
           machine["online_cores"].get<int>(),
           bytes_text(machine["memory_bytes"].get<double>())
       )},
      {"gpus", Json::array()},
      {"driver", text_or(gpus.driver, "none")},
      {"cuda", text_or(gpus.runtime, "none")},
      {"limit_gbps", rounded(rates.scatter)},
      {"gather_gbps", rounded(rates.gather)},
      {"rows", rows},
  };
  for (const GpuInfo& gpu : gpus.gpus) {
    json["gpus"].push_back(gpu.name);
  }
  save_json(path, json);
}

}  // namespace weft::program
