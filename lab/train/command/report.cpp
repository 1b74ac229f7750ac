// SPDX-License-Identifier: Apache-2.0
// A training run as a page and as JSON.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "build_info.hpp"
#include "limits.hpp"
#include "plan_report.hpp"
#include "svg.hpp"
#include "train_report.hpp"

namespace weft::program {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kFullLoad = 4;  // times the mean: full colour, so that early chaos hides nothing

LineChart loss_chart(const TrainRecord& record) {
  LineChart chart = {"Loss", "step", "nats per byte", {{"loss", {}, {}}}};
  for (const StepPoint& point : record.points()) {
    chart.series[0].x.push_back(point.step);
    chart.series[0].y.push_back(point.loss);
  }
  return chart;
}

LineChart imbalance_chart(const TrainRecord& record) {
  LineChart chart = {"Busiest expert of each block", "step", "routes, max / mean", {}};
  const auto num_experts = static_cast<size_t>(record.model().num_experts);
  for (int block = 0; block < record.model().num_blocks; ++block) {
    Series series = {fmt::format("block {}", block), {}, {}};
    for (const StepPoint& point : record.points()) {
      const auto first = point.routes.begin() + block * record.model().num_experts;
      std::vector<int64_t> routes;
      std::transform(
          first,
          first + static_cast<int64_t>(num_experts),
          std::back_inserter(routes),
          [](double r) { return std::llround(r); }
      );
      series.x.push_back(point.step);
      series.y.push_back(max_over_mean(routes));
    }
    chart.series.push_back(std::move(series));
  }
  return chart;
}

// Load relative to an even one, so that blocks and runs compare.
HeatMap load_map(const TrainRecord& record, int block) {
  HeatMap map = {
      fmt::format("Load per expert, block {}", block), "step", "expert", "x mean", {}, {}, {}};
  map.high = kFullLoad;
  const auto num_experts = static_cast<size_t>(record.model().num_experts);
  const size_t first = static_cast<size_t>(block) * num_experts;
  for (size_t e = 0; e < num_experts; ++e) {
    map.rows.push_back(fmt::format("{}", e));
  }
  std::vector<double> means;
  for (const StepPoint& point : record.points()) {
    map.columns.push_back(fmt::format("{:.0f}", point.step));
    double sum = 0;
    for (size_t e = 0; e < num_experts; ++e) {
      sum += point.routes[first + e];
    }
    means.push_back(sum / static_cast<double>(num_experts));
  }
  for (size_t e = 0; e < num_experts; ++e) {
    for (size_t p = 0; p < means.size(); ++p) {
      map.values.push_back(means[p] > 0 ? record.points()[p].routes[first + e] / means[p] : 0);
    }
  }
  return map;
}

BarChart phase_chart(const TrainRecord& record) {
  BarChart chart = {"Time per step", "phase", "ms", {}, {{"time", {}, {}}}};
  const auto num_steps = static_cast<double>(std::max<int64_t>(record.num_steps(), 1));
  for (size_t i = 0; i < moe::kNumPhases; ++i) {
    chart.labels.emplace_back(moe::kPhaseNames[i]);
    chart.series[0].y.push_back(record.phase_seconds()[i] * 1e3 / num_steps);
  }
  return chart;
}

// What rank 0 did in its last step.
LaneChart lane_chart(const TrainRecord& record) {
  LaneChart chart = {
      fmt::format("Step {} of rank 0", record.last_step()), "ms since forward began", {}, {}};
  for (const overlap::Lane lane : {overlap::Lane::kCompute, overlap::Lane::kExchange}) {
    LaneRow row = {std::string(overlap::lane_name(lane)), {}};
    for (const overlap::Span& span : record.trace().spans) {
      const auto group = static_cast<size_t>(std::max(span.micro_batch, 0));
      if (span.lane == lane && span.end_ns > span.begin_ns) {
        row.bars.push_back(
            {span.name,
             static_cast<double>(span.begin_ns) / 1e6,
             static_cast<double>(span.end_ns) / 1e6,
             group}
        );
      }
      while (chart.groups.size() <= group) {
        chart.groups.push_back(fmt::format("micro-batch {}", chart.groups.size()));
      }
    }
    chart.lanes.push_back(std::move(row));
  }
  return chart;
}

Json lanes_json(const LaneSeconds& lanes) {
  return {
      {"seconds", lanes.wall},
      {"compute_seconds", lanes.compute},
      {"exchange_seconds", lanes.exchange},
      {"exposed_seconds", lanes.exposed}};
}

Json moved_json(const MovedBytes& moved, double limit_us) {
  Json json = {
      {"calls", std::llround(moved.calls)},
      {"seconds", moved.seconds},
      {"fastest_seconds", moved.fastest_seconds},
      {"wire_bytes", std::llround(moved.wire)},
      {"logical_bytes", std::llround(moved.logical)}};
  if (limit_us > 0 && moved.seconds > 0) {
    json["limit_us"] = limit_us;
    json["percent_of_limit"] = limit_us / moved.seconds / 1e4;
  }
  return json;
}

double limit_us_of(
    double (*limit)(const ExchangeBytes&, const CopyRates&),
    const MovedBytes& moved,
    const CopyRates& rates
) {
  return rates.scatter > 0 ? limit({moved.logical, moved.wire, moved.tokens}, rates) : 0;
}

Json config_json(const TrainFacts& facts) {
  const auto& config = facts.config;
  const auto& model = config.model;
  return {
      {"ranks", facts.num_ranks},
      {"executor", facts.num_gpus > 0 ? "cuda" : "cpu"},
      {"gpus", facts.num_gpus},
      {"transport", facts.transport},
      {"dtype", dtype_name(config.dtype)},
      {"global_batch", config.global_batch},
      {"micro_batches", config.num_micro_batches},
      {"overlap", config.overlap.is_on},
      {"delay_wgrad", config.overlap.delays_weight_gradients},
      {"copy_engines", facts.is_copied},
      {"seed", config.seed},
      {"window", model.window},
      {"hidden", model.hidden},
      {"expert_hidden", model.expert_hidden},
      {"num_blocks", model.num_blocks},
      {"num_experts", model.num_experts},
      {"topk", model.topk},
      {"num_parameters", facts.num_parameters},
      {"num_active_parameters", facts.num_active_parameters}};
}

void add_lanes(Page& page, const TrainRecord& record) {
  page.add_heading("What the exchange hid under");
  page.add_figure(
      svg(lane_chart(record)),
      "Each bar is one piece of one micro-batch; where the exchange has a bar and the computation "
      "has none, nothing hides it."
  );
  page.add_table(lane_table(record));
  page.add_text(
      lane_text(record) + ". The gradients and values of the parameters that every rank holds " +
      "travel after that."
  );
}

}  // namespace

Json train_json(const TrainFacts& facts, const TrainRecord& record) {
  const BuildInfo build = build_info();
  Json json = {
      {"commit", build.commit},
      {"dirty", build.is_dirty},
      {"text", facts.text_path},
      {"text_bytes", facts.text_bytes},
      {"config", config_json(facts)},
      {"first_step", facts.first_step},
      {"last_step", record.last_step()},
      {"num_tokens", record.num_tokens()},
      {"seconds", record.seconds()},
      {"limit_gbps", facts.rates.scatter},
      {"gather_gbps", facts.rates.gather},
      {"wait_seconds", record.wait_seconds()},
      {"phase_seconds", Json::object()},
      {"dispatch",
       moved_json(
           record.dispatch(), limit_us_of(dispatch_limit_us, record.dispatch(), facts.rates)
       )},
      {"combine",
       moved_json(record.combine(), limit_us_of(combine_limit_us, record.combine(), facts.rates))},
      {"steps", Json::array()}};
  for (size_t i = 0; i < moe::kNumPhases; ++i) {
    json["phase_seconds"][std::string(moe::kPhaseNames[i])] = record.phase_seconds()[i];
  }
  if (facts.config.overlap.is_on) {
    json["lanes"] = lanes_json(record.lanes());
  }
  for (const StepPoint& point : record.points()) {
    json["steps"].push_back(
        {{"step", point.step},
         {"loss", point.loss},
         {"balance_loss", point.balance_loss},
         {"seconds", point.seconds}}
    );
  }
  return json;
}

Page train_page(const TrainFacts& facts, const TrainRecord& record) {
  Page page("Weft: training a small mixture-of-experts model");
  page.add_preformatted(train_headline(facts));
  page.add_text(fmt::format(
      "{} steps, {} bytes predicted in {}; loss {:.4f} at the end.",
      count_text(record.num_steps()),
      count_text(record.num_tokens()),
      seconds_text(record.seconds()),
      record.recent_loss()
  ));
  page.add_figure(svg(loss_chart(record)));
  page.add_heading("Where the time went");
  page.add_text(phase_text(facts) + ".");
  page.add_figure(svg(phase_chart(record)), "Mean over the ranks.");
  page.add_table(phase_table(record));
  if (facts.config.overlap.is_on) {
    add_lanes(page, record);
  }
  page.add_heading("What the exchange moved");
  page.add_table(exchange_table(facts, record));
  page.add_text(
      "Bytes of all ranks together. Wire bytes crossed a rank boundary, logical bytes are all rows "
      "that ranks received. The time of a call is the slowest rank's, which waits for the others "
      "to "
      "come; the rank that comes last waits least. The limit is what plain copies of the same "
      "bytes "
      "reach on this machine."
  );
  page.add_text(wait_text(record) + ".");
  if (facts.rates.scatter > 0) {
    page.add_text(fmt::format(
        "Plain copies reach {:.1f} GB/s scattering, {:.1f} GB/s gathering.",
        facts.rates.scatter,
        facts.rates.gather
    ));
  }
  page.add_heading("Load per expert");
  page.add_figure(svg(imbalance_chart(record)));
  for (int block = 0; block < record.model().num_blocks; ++block) {
    page.add_figure(svg(load_map(record, block)));
  }
  page.add_heading("Loss by step");
  page.add_table(loss_table(record));
  return page;
}

}  // namespace weft::program
