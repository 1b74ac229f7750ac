// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <numeric>
#include <span>
#include <vector>

#include "bench/run.hpp"
#include "report/html.hpp"
#include "report/svg.hpp"

namespace weft::program {
namespace {

std::string gbps_text(double gbps) {
  return gbps > 0 ? fmt::format("{:.2f}", gbps) : "-";
}

struct Bars {
  const char* name;
  double (ResultRow::*value)() const;
};

// Chart of the results in which the first of these values is above zero.
BarChart bar_chart(
    const BenchReport& report, const char* title, const char* y_label, std::span<const Bars> values
) {
  BarChart chart = {title, "operation", y_label, {}, {}};
  for (const Bars& bars : values) {
    chart.series.push_back({bars.name, {}, {}});
  }
  for (const BenchResult& result : report.results) {
    if ((result.row.*values.front().value)() > 0) {
      chart.labels.push_back(result.row.op);
      for (size_t i = 0; i < values.size(); ++i) {
        chart.series[i].y.push_back((result.row.*values[i].value)());
      }
    }
  }
  return chart;
}

LineChart sample_chart(const BenchReport& report) {
  LineChart chart = {"Time of each sample", "sample", "microseconds, slowest rank", {}};
  chart.starts_at_zero = true;
  for (const BenchResult& result : report.results) {
    std::vector<double> numbers(result.samples_us.size());
    std::iota(numbers.begin(), numbers.end(), 0.0);
    chart.series.push_back({result.row.op, numbers, result.samples_us});
  }
  return chart;
}

}  // namespace

std::string bench_case_text(const BenchReport& report) {
  if (report.results.empty()) {
    return "nothing measured";
  }
  const ResultRow& row = report.results.front().row;
  const bool is_gpu = row.executor == "cuda";
  const CopyRates& rates = report.rates;
  const std::string reach =
      is_gpu ? fmt::format("copy engines move {:.1f} GB/s out of each GPU", rates.scatter)
             : fmt::format(
                   "plain copies reach {:.1f} GB/s scattering, {:.1f} GB/s gathering",
                   rates.scatter,
                   rates.gather
               );
  return fmt::format(
      "{} ranks {}, {} tokens each, hidden {}, {} experts, top-{}, {}, {} padded to {}{}; rows of "
      "{} B; {}",
      row.ranks,
      is_gpu ? "on GPUs" : "over " + row.transport,
      count_text(row.tokens),
      row.hidden,
      row.experts,
      row.topk,
      row.dtype,
      row.layout,
      row.pad,
      is_gpu ? "" : ", " + row.mode,
      report.row_bytes,
      reach
  );
}

Table bench_table(const BenchReport& report, bool is_checked) {
  Table table(
      columns("operation|mode|sms|checked|p50 us|p99 us|wire GB/s|logical GB/s|limit us|% of limit")
  );
  for (const BenchResult& result : report.results) {
    const ResultRow& row = result.row;
    const bool has_limit = row.limit_us > 0;
    table.add_row({
        row.op,
        row.mode,
        row.sms > 0 ? fmt::format("{}", row.sms) : "-",
        row.checked ? "yes" : (is_checked ? "WRONG" : "no"),
        fmt::format("{:.1f}", row.us_p50),
        fmt::format("{:.1f}", row.us_p99),
        gbps_text(row.wire_gbps()),
        gbps_text(row.logical_gbps()),
        has_limit ? fmt::format("{:.1f}", row.limit_us) : "-",
        has_limit ? fmt::format("{:.1f}", row.percent_of_limit()) : "-",
    });
  }
  return table;
}

void save_bench_page(const BenchReport& report, const BenchOptions& options) {
  Page page("Weft: bench");
  page.add_text(bench_case_text(report));
  page.add_table(bench_table(report, options.is_checked));
  constexpr Bars kPercent[] = {{"% of the limit", &ResultRow::percent_of_limit}};
  constexpr Bars kRates[] = {
      {"logical", &ResultRow::logical_gbps}, {"wire", &ResultRow::wire_gbps}};
  page.add_figure(
      svg(bar_chart(report, "Share of what plain copies reach", "% of the limit", kPercent)),
      "Higher is better; 100 is the measured limit."
  );
  page.add_figure(
      svg(bar_chart(report, "Bytes per second", "GB/s, all ranks together", kRates)),
      "Logical: all rows that receivers hold. Wire: rows that crossed a rank boundary."
  );
  page.add_figure(svg(sample_chart(report)));
  page.save(options.html_path);
}

}  // namespace weft::program
