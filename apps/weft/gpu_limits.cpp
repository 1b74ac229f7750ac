// SPDX-License-Identifier: Apache-2.0
#include "gpu_limits.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/check.hpp"
#include "core/devices.hpp"
#include "html.hpp"
#include "limits_cuda.hpp"
#include "results.hpp"
#include "svg.hpp"
#include "table.hpp"

namespace weft::program {
namespace {

constexpr const char* kMeaning =
    "GB/s (1e9) that leave each GPU while all send to all others at once; the slowest GPU counts. "
    "Loads: what arrives at each.";

// In the order in which they were measured, each once; without those that use no SMs.
std::vector<LinkWay> ways_by_sms(const GpuLinkLimits& limits) {
  std::vector<LinkWay> ways;
  for (const LinkRate& rate : limits.rates) {
    if (rate.sms > 0 && std::ranges::find(ways, rate.way) == ways.end()) {
      ways.push_back(rate.way);
    }
  }
  return ways;
}

const LinkRate* find_rate(const GpuLinkLimits& limits, LinkWay way, int sms) {
  const auto found = std::ranges::find_if(limits.rates, [&](const LinkRate& rate) {
    return rate.way == way && rate.sms == sms;
  });
  return found == limits.rates.end() ? nullptr : &*found;
}

std::string summary(const GpuLinkLimits& limits, const GpuInfo& gpu) {
  std::string text = fmt::format(
      "{} x {}; a copy inside one GPU reads and writes {:.0f} GB/s",
      limits.num_gpus,
      gpu.name,
      limits.local_copy_gbps
  );
  if (limits.num_gpus < 2) {
    return text + "; with one GPU there are no links to measure";
  }
  return text +
         fmt::format(
             "; copy engines move {:.1f} GB/s out of each GPU, the limit of all percentages; a "
             "signal to a peer and back takes {:.2f} us",
             limits.copy_engine_gbps,
             limits.signal_us
         );
}

Table table_of(const GpuLinkLimits& limits) {
  const std::vector<LinkWay> ways = ways_by_sms(limits);
  std::vector<std::string> header = {"SMs"};
  std::ranges::transform(ways, std::back_inserter(header), link_way_name);
  Table table(header);
  std::vector<int> counts;
  for (const LinkRate& rate : limits.rates) {
    if (rate.sms > 0 && std::ranges::find(counts, rate.sms) == counts.end()) {
      counts.push_back(rate.sms);
    }
  }
  for (const int sms : counts) {
    std::vector<std::string> cells = {std::to_string(sms)};
    for (const LinkWay way : ways) {
      const LinkRate* rate = find_rate(limits, way, sms);
      cells.push_back(rate == nullptr ? "-" : fmt::format("{:.1f}", rate->gbps()));
    }
    table.add_row(std::move(cells));
  }
  return table;
}

LineChart chart_of(const GpuLinkLimits& limits) {
  LineChart chart;
  chart.title = "Bytes per second between GPUs";
  chart.x_label = "SMs";
  chart.y_label = "GB/s out of each GPU";
  chart.is_log_x = true;
  chart.starts_at_zero = true;
  Series copy_engine = {link_way_name(LinkWay::kCopyEngine), {}, {}};
  for (const LinkWay way : ways_by_sms(limits)) {
    Series series = {link_way_name(way), {}, {}};
    for (const LinkRate& rate : limits.rates) {
      if (rate.way == way) {
        series.x.push_back(rate.sms);
        series.y.push_back(rate.gbps());
      }
    }
    copy_engine.x = series.x;
    chart.series.push_back(std::move(series));
  }
  copy_engine.y.assign(copy_engine.x.size(), limits.copy_engine_gbps);
  chart.series.push_back(std::move(copy_engine));
  return chart;
}

ResultRow row_of(const GpuLinkLimits& limits, const LinkRate& rate) {
  const bool is_local = rate.way == LinkWay::kLocalCopy;
  ResultRow row;
  row.op = "link";
  row.executor = "cuda";
  row.transport = is_local ? "loopback" : "peer";
  row.ranks = is_local ? 1 : limits.num_gpus;
  row.sms = rate.sms;
  row.mode = link_way_name(rate.way);
  row.us_p50 = rate.us_p50;
  row.us_p99 = rate.us_p99;
  row.wire_bytes = is_local ? 0 : rate.bytes * limits.num_gpus;
  row.logical_bytes = is_local ? rate.bytes : row.wire_bytes;
  row.limit_us = is_local ? 0 : rate.bytes / limits.copy_engine_gbps / 1e3;
  row.checked = true;  // measuring throws where bytes arrive wrong
  return row;
}

void save_json(const GpuLinkLimits& limits, const std::string& path) {
  std::vector<ResultRow> rows;
  for (const LinkRate& rate : limits.rates) {
    rows.push_back(row_of(limits, rate));
  }
  if (limits.signal_us > 0) {
    ResultRow& row = rows.emplace_back();
    row.op = "signal";
    row.executor = "cuda";
    row.transport = "peer";
    row.ranks = 2;
    row.sms = 1;
    row.mode = "there and back";
    row.us_p50 = limits.signal_us;
    row.us_p99 = limits.signal_us;
    row.checked = true;
  }
  save_results(path, rows, {.scatter = limits.copy_engine_gbps, .gather = limits.copy_engine_gbps});
}

void save_page(const GpuLinkLimits& limits, const GpuInfo& gpu, const std::string& path) {
  Page page("Weft: limits");
  page.add_text(summary(limits, gpu));
  if (limits.num_gpus > 1) {
    page.add_text(kMeaning);
    page.add_table(table_of(limits));
    page.add_figure(svg(chart_of(limits)), "Copy engines need no SMs: the level line.");
  }
  page.save(path);
}

}  // namespace

void run_gpu_limits(const GpuLimitsOptions& options) {
  const GpuList list = list_gpus();
  WEFT_CHECK(
      Context{},
      !list.gpus.empty(),
      ErrorCode::kNotAvailable,
      "limits: no GPU ({}). Choose --device cpu",
      list.none_reason
  );
  const auto num_found = static_cast<int>(list.gpus.size());
  WEFT_CHECK_ARG(
      Context{},
      options.num_gpus <= num_found,
      "limits: {} GPUs asked for (there are {})",
      options.num_gpus,
      num_found
  );
  const int num_gpus = options.num_gpus > 0 ? options.num_gpus : num_found;
  const GpuLinkLimits limits = measure_gpu_limits(num_gpus, options.is_quick);
  fmt::print("{}\n", summary(limits, list.gpus.front()));
  if (num_gpus > 1) {
    fmt::print("\n{}\n\n{}", kMeaning, table_of(limits).text());
  }
  if (!options.json_path.empty()) {
    save_json(limits, options.json_path);
  }
  if (!options.html_path.empty()) {
    save_page(limits, list.gpus.front(), options.html_path);
  }
}

}  // namespace weft::program
