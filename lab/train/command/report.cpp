// SPDX-License-Identifier: Apache-2.0
#include "routing/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "call/call.hpp"
#include "measure/facts.hpp"
#include "measure/limits.hpp"
#include "report/svg.hpp"
#include "report/table.hpp"
#include "train/command/command.hpp"

namespace weft::program {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kLossRows = 10;

double percent(double part, double whole) {
  return whole > 0 ? 100 * part / whole : 0;
}

// Nothing to say of one.
std::string micro_batch_text(const TrainFacts& facts) {
  const moe::TrainConfig& config = facts.config;
  if (config.num_micro_batches == 1) {
    return {};
  }
  return fmt::format(
      " in {} micro-batches{}{}",
      config.num_micro_batches,
      config.overlap.is_on ? " that overlap" : "",
      config.overlap.delays_weight_gradients ? ", weight gradients delayed" : ""
  );
}

// One of the two operations, and what plain copies of the same bytes take; 0 where the rates are
// not known.
struct Operation {
  std::string_view name;
  const MovedBytes& moved;
  double limit_seconds;
};
std::array<Operation, 2> operations(const TrainFacts& facts, const TrainRecord& record) {
  const auto operation = [&](Op op, const MovedBytes& moved) -> Operation {
    const CopyRates& rates = facts.rates;
    return {op_name(op), moved, rates.scatter > 0 ? rates.limit_us(op, moved.logical) / 1e6 : 0};
  };
  return {operation(Op::kDispatch, record.dispatch), operation(Op::kCombine, record.combine)};
}

void add_time_row(Table& table, const TrainRecord& record, std::string_view name, double seconds) {
  table.add_row(
      {std::string(name),
       seconds_text(seconds),
       fmt::format("{:.1f} %", percent(seconds, record.rank_seconds)),
       seconds_text(record.per_step(seconds))}
  );
}

constexpr double kFullLoad = 4;  // times the mean: full colour, so that early chaos hides nothing

LineChart loss_chart(const TrainRecord& record) {
  LineChart chart = {"Loss", "step", "nats per byte", {{"loss", {}, {}}}};
  for (const StepPoint& point : record.points) {
    chart.series[0].x.push_back(point.step);
    chart.series[0].y.push_back(point.loss);
  }
  return chart;
}

// Returns the routes of one block's experts.
std::span<const double> routes_of(const TrainRecord& record, const StepPoint& point, int block) {
  const auto num_experts = static_cast<size_t>(record.model.num_experts);
  return std::span(point.routes).subspan(static_cast<size_t>(block) * num_experts, num_experts);
}

LineChart imbalance_chart(const TrainRecord& record) {
  LineChart chart = {"Busiest expert of each block", "step", "routes, max / mean", {}};
  for (int block = 0; block < record.model.num_blocks; ++block) {
    Series& series = chart.series.emplace_back();
    series.name = fmt::format("block {}", block);
    for (const StepPoint& point : record.points) {
      std::vector<int64_t> routes;
      for (const double count : routes_of(record, point, block)) {
        routes.push_back(std::llround(count));
      }
      series.x.push_back(point.step);
      series.y.push_back(max_over_mean(routes));
    }
  }
  return chart;
}

// Load relative to an even one, so that blocks and runs compare.
HeatMap load_map(const TrainRecord& record, int block) {
  HeatMap map = {
      fmt::format("Load per expert, block {}", block), "step", "expert", "x mean", {}, {}, {}};
  map.high = kFullLoad;
  for (int e = 0; e < record.model.num_experts; ++e) {
    map.rows.push_back(fmt::format("{}", e));
    for (const StepPoint& point : record.points) {
      const auto routes = routes_of(record, point, block);
      const double mean =
          std::reduce(routes.begin(), routes.end()) / static_cast<double>(routes.size());
      map.values.push_back(mean > 0 ? routes[static_cast<size_t>(e)] / mean : 0);
    }
  }
  for (const StepPoint& point : record.points) {
    map.columns.push_back(fmt::format("{:.0f}", point.step));
  }
  return map;
}

BarChart phase_chart(const TrainRecord& record) {
  BarChart chart = {"Time per step", "phase", "ms", {}, {{"time", {}, {}}}};
  for (size_t i = 0; i < moe::kNumPhases; ++i) {
    chart.labels.emplace_back(moe::kPhaseNames[i]);
    chart.series[0].y.push_back(record.per_step(record.phase_seconds[i]) * 1e3);
  }
  return chart;
}

// Chart of what rank 0 did in its last step.
LaneChart lane_chart(const TrainRecord& record) {
  LaneChart chart = {
      fmt::format("Step {} of rank 0", record.last_step), "ms since forward began", {}, {}};
  for (const overlap::Lane lane : {overlap::Lane::kCompute, overlap::Lane::kExchange}) {
    LaneRow row = {std::string(overlap::lane_name(lane)), {}};
    for (const overlap::Span& span : record.trace.spans) {
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

Json moved_json(const Operation& operation) {
  const MovedBytes& moved = operation.moved;
  Json json = {
      {"calls", std::llround(moved.calls)},
      {"seconds", moved.seconds},
      {"fastest_seconds", moved.fastest_seconds},
      {"wire_bytes", std::llround(moved.wire)},
      {"logical_bytes", std::llround(moved.logical)}};
  if (operation.limit_seconds > 0 && moved.seconds > 0) {
    json["limit_us"] = operation.limit_seconds * 1e6;
    json["percent_of_limit"] = percent(operation.limit_seconds, moved.seconds);
  }
  return json;
}

Json config_json(const TrainFacts& facts) {
  const auto& config = facts.config;
  Json json = {
      {"ranks", facts.num_ranks},
      {"transport", facts.transport},
      {"dtype", dtype_name(config.dtype)},
      {"global_batch", config.global_batch},
      {"micro_batches", config.num_micro_batches},
      {"overlap", config.overlap.is_on},
      {"replicas", config.replicas},
      {"delay_wgrad", config.overlap.delays_weight_gradients},
      {"seed", config.seed}};
  moe::visit_fields(config.model, [&](const char* name, auto value) { json[name] = value; });
  json["num_parameters"] = facts.num_parameters;
  json["num_active_parameters"] = facts.num_active_parameters;
  return json;
}

// About ten lines from the first step to the last, each the mean of what lies before it.
Table loss_table(const TrainRecord& record) {
  Table table({"step", "loss", "bits per byte", "balance", "step time"});
  const auto& points = record.points;
  const size_t num_rows = std::min(kLossRows, points.size());
  for (size_t row = 0; row < num_rows; ++row) {
    const size_t begin = row * points.size() / num_rows;
    const size_t end = (row + 1) * points.size() / num_rows;
    StepPoint mean = points[begin];
    for (size_t i = begin + 1; i < end; ++i) {
      mean.merge(points[i]);
    }
    table.add_row(
        {fmt::format("{:.0f}", mean.step),
         fmt::format("{:.4f}", mean.loss),
         fmt::format("{:.3f}", mean.loss / std::log(2.0)),
         fmt::format("{:.3f}", mean.balance_loss),
         seconds_text(mean.seconds)}
    );
  }
  return table;
}

Table phase_table(const TrainRecord& record) {
  Table table({"phase", "time", "share", "per step"});
  for (size_t i = 0; i < moe::kNumPhases; ++i) {
    add_time_row(table, record, moe::kPhaseNames[i], record.phase_seconds[i]);
  }
  add_time_row(table, record, "all", record.rank_seconds);
  return table;
}

Table exchange_table(const TrainFacts& facts, const TrainRecord& record) {
  Table table(
      columns("op|calls|time|wire|logical|wire GB/s|logical GB/s|of limit|of limit, last rank")
  );
  for (const auto& [name, moved, limit_seconds] : operations(facts, record)) {
    const auto gbps = [&, seconds = moved.seconds](double bytes) {
      return seconds > 0 ? fmt::format("{:.2f}", bytes / seconds / 1e9) : "-";
    };
    const auto of_limit = [limit = limit_seconds](double seconds) {
      const bool has_limit = limit > 0 && seconds > 0;
      return has_limit ? fmt::format("{:.1f} %", percent(limit, seconds)) : "-";
    };
    table.add_row(
        {std::string(name),
         count_text(std::llround(moved.calls)),
         seconds_text(moved.calls > 0 ? moved.seconds / moved.calls : 0),
         bytes_text(moved.wire),
         bytes_text(moved.logical),
         gbps(moved.wire),
         gbps(moved.logical),
         of_limit(moved.seconds),
         of_limit(moved.fastest_seconds)}
    );
  }
  return table;
}

std::string phase_text(const TrainFacts& facts) {
  return facts.config.overlap.is_on ? "Where the time went, mean over the ranks; lanes work at the "
                                      "same time, so the parts are more than all"
                                    : "Where the time went, mean over the ranks";
}

Table lane_table(const TrainRecord& record) {
  Table table({"lane", "busy", "share of the steps", "per step"});
  add_time_row(table, record, "compute", record.lanes.compute);
  add_time_row(table, record, "exchange", record.lanes.exchange);
  add_time_row(table, record, "exchange alone", record.lanes.exposed);
  return table;
}

std::string lane_text(const TrainRecord& record) {
  const LaneSeconds& lanes = record.lanes;
  return fmt::format(
      "Forward and backward took {} on two lanes; {:.1f} % of the exchange had no computation "
      "beside it",
      seconds_text(lanes.wall),
      percent(lanes.exposed, lanes.exchange)
  );
}

std::string wait_text(const TrainRecord& record) {
  double seconds = 0;
  for (const auto phase : {moe::Phase::kPlan, moe::Phase::kDispatch, moe::Phase::kCombine}) {
    seconds += record.phase_seconds[static_cast<size_t>(phase)];
  }
  return fmt::format(
      "Of {} in plan, dispatch and combine a rank waited at least {} for the others",
      seconds_text(seconds),
      seconds_text(record.wait_seconds)
  );
}

// Empty without balance.
std::string balanced_text(const TrainRecord& record) {
  if (record.mean_load <= 0) {
    return "";
  }
  return fmt::format(
      "The busiest rank had {:.3f} of the mean rank's routes with replicas, {:.3f} without",
      record.busiest / record.mean_load,
      record.unbalanced / record.mean_load
  );
}

std::string load_picture(const TrainRecord& record) {
  std::string out = "Load per expert lately, one line per block (@ = 3 times the mean or more):\n";
  for (int block = 0; block < record.model.num_blocks; ++block) {
    const auto routes = record.recent_routes(block);
    const std::vector<double> loads(routes.begin(), routes.end());
    const double mean = std::reduce(loads.begin(), loads.end()) / static_cast<double>(loads.size());
    out += fmt::format(
        "  block {:>2} |{}| max / mean {:.2f}\n",
        block,
        shaded(loads, 3 * mean),
        max_over_mean(routes)
    );
  }
  return out;
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

std::string train_headline(const TrainFacts& facts) {
  const auto& config = facts.config;
  const auto& model = config.model;
  return fmt::format(
      "{} ({}): {} parameters, {} met by a token\n"
      "{} blocks of {} experts, top-{}, hidden {}, expert hidden {}, window {}\n"
      "{} ranks over {}, {} tokens a step{}, {}, seed {}\n",
      facts.text_path,
      bytes_text(static_cast<double>(facts.text_bytes)),
      count_text(facts.num_parameters),
      count_text(facts.num_active_parameters),
      model.num_blocks,
      model.num_experts,
      model.topk,
      model.hidden,
      model.expert_hidden,
      model.window,
      facts.num_ranks,
      facts.transport,
      count_text(config.global_batch),
      micro_batch_text(facts),
      dtype_name(config.dtype),
      config.seed
  );
}

std::string train_text(const TrainFacts& facts, const TrainRecord& record) {
  return fmt::format(
      "\n{}\n{}\n{}\n{}"
      "What the exchange moved, all ranks together (copying alone: {:.1f} GB/s)\n{}{}\n\n{}\n",
      loss_table(record).text(),
      phase_text(facts),
      phase_table(record).text(),
      facts.config.overlap.is_on
          ? fmt::format("{}\n{}\n", lane_text(record), lane_table(record).text())
          : "",
      facts.rates.scatter,
      exchange_table(facts, record).text(),
      record.mean_load > 0 ? wait_text(record) + "\n" + balanced_text(record) : wait_text(record),
      load_picture(record)
  );
}

Json train_json(const TrainFacts& facts, const TrainRecord& record) {
  const Json build = build_info();
  Json json = {
      {"commit", build["commit"]},
      {"dirty", build["dirty"]},
      {"text", facts.text_path},
      {"text_bytes", facts.text_bytes},
      {"config", config_json(facts)},
      {"first_step", facts.first_step},
      {"last_step", record.last_step},
      {"num_tokens", record.num_tokens},
      {"seconds", record.seconds},
      {"limit_gbps", facts.rates.scatter},
      {"gather_gbps", facts.rates.gather},
      {"wait_seconds", record.wait_seconds},
      {"phase_seconds", Json::object()}};
  for (size_t i = 0; i < moe::kNumPhases; ++i) {
    json["phase_seconds"][std::string(moe::kPhaseNames[i])] = record.phase_seconds[i];
  }
  for (const Operation& operation : operations(facts, record)) {
    json[std::string(operation.name)] = moved_json(operation);
  }
  if (facts.config.overlap.is_on) {
    json["lanes"] = {
        {"seconds", record.lanes.wall},
        {"compute_seconds", record.lanes.compute},
        {"exchange_seconds", record.lanes.exchange},
        {"exposed_seconds", record.lanes.exposed}};
  }
  if (record.mean_load > 0) {
    json["balance"] = {
        {"max_over_mean", record.busiest / record.mean_load},
        {"unbalanced_max_over_mean", record.unbalanced / record.mean_load}};
  }
  json["steps"] = Json::array();
  for (const StepPoint& point : record.points) {
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
      count_text(record.num_steps),
      count_text(record.num_tokens),
      seconds_text(record.seconds),
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
      "to come; the rank that comes last waits least. The limit is what plain copies of the same "
      "bytes reach on this machine."
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
  if (record.mean_load > 0) {
    page.add_text(balanced_text(record) + ".");
  }
  page.add_figure(svg(imbalance_chart(record)));
  for (int block = 0; block < record.model.num_blocks; ++block) {
    page.add_figure(svg(load_map(record, block)));
  }
  page.add_heading("Loss by step");
  page.add_table(loss_table(record));
  return page;
}

}  // namespace weft::program
