// SPDX-License-Identifier: Apache-2.0
#include "train_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "limits.hpp"
#include "plan_report.hpp"
#include "shades.hpp"

namespace weft::program {
namespace {

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
      " in {} micro-batches{}{}{}",
      config.num_micro_batches,
      config.overlap.is_on ? " that overlap" : "",
      config.overlap.delays_weight_gradients ? ", weight gradients delayed" : "",
      facts.is_copied ? ", rows by copy engines" : ""
  );
}

struct ExchangeLine {
  const char* op;
  const MovedBytes* moved;
  double limit_seconds;
};

void add_exchange_row(Table& table, const ExchangeLine& line) {
  const MovedBytes& moved = *line.moved;
  const auto gbps = [&](double bytes) {
    return moved.seconds > 0 ? fmt::format("{:.2f}", bytes / moved.seconds / 1e9) : "-";
  };
  const auto percent_text = [&](double seconds) {
    const bool has_limit = line.limit_seconds > 0 && seconds > 0;
    return has_limit ? fmt::format("{:.1f} %", percent(line.limit_seconds, seconds)) : "-";
  };
  table.add_row(
      {line.op,
       count_text(std::llround(moved.calls)),
       seconds_text(moved.calls > 0 ? moved.seconds / moved.calls : 0),
       bytes_text(moved.wire),
       bytes_text(moved.logical),
       gbps(moved.wire),
       gbps(moved.logical),
       percent_text(moved.seconds),
       percent_text(moved.fastest_seconds)}
  );
}

}  // namespace

std::string train_headline(const TrainFacts& facts) {
  const auto& config = facts.config;
  const auto& model = config.model;
  return fmt::format(
      "{} ({}): {} parameters, {} met by a token\n"
      "{} blocks of {} experts, top-{}, hidden {}, expert hidden {}, window {}\n"
      "{} ranks{} over {}, {} tokens a step{}, {}, seed {}\n",
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
      facts.num_gpus > 0 ? fmt::format(" on {} GPUs", facts.num_gpus) : "",
      facts.transport,
      count_text(config.global_batch),
      micro_batch_text(facts),
      dtype_name(config.dtype),
      config.seed
  );
}

// About ten lines from the first step to the last, each the mean of what lies before it.
Table loss_table(const TrainRecord& record) {
  Table table({"step", "loss", "bits per byte", "balance", "step time"});
  const auto& points = record.points();
  const size_t num_rows = std::min(kLossRows, points.size());
  for (size_t row = 0, begin = 0; row < num_rows; ++row) {
    const size_t end = (row + 1) * points.size() / num_rows;
    StepPoint mean = {};
    for (size_t i = begin; i < end; ++i) {
      const auto part = 1.0 / static_cast<double>(end - begin);
      mean.loss += points[i].loss * part;
      mean.balance_loss += points[i].balance_loss * part;
      mean.seconds += points[i].seconds * part;
    }
    table.add_row(
        {fmt::format("{:.0f}", points[end - 1].step),
         fmt::format("{:.4f}", mean.loss),
         fmt::format("{:.3f}", mean.loss / std::log(2.0)),
         fmt::format("{:.3f}", mean.balance_loss),
         seconds_text(mean.seconds)}
    );
    begin = end;
  }
  return table;
}

Table phase_table(const TrainRecord& record) {
  Table table({"phase", "time", "share", "per step"});
  const double sum = record.rank_seconds();
  const auto num_steps = static_cast<double>(std::max<int64_t>(record.num_steps(), 1));
  const auto add = [&](std::string_view name, double seconds) {
    table.add_row(
        {std::string(name),
         seconds_text(seconds),
         fmt::format("{:.1f} %", percent(seconds, sum)),
         seconds_text(seconds / num_steps)}
    );
  };
  for (size_t i = 0; i < moe::kNumPhases; ++i) {
    add(moe::kPhaseNames[i], record.phase_seconds()[i]);
  }
  add("all", sum);
  return table;
}

Table exchange_table(const TrainFacts& facts, const TrainRecord& record) {
  Table table(
      {"op",
       "calls",
       "time",
       "wire",
       "logical",
       "wire GB/s",
       "logical GB/s",
       "of limit",
       "of limit, last rank"}
  );
  const auto limit = [&](auto limit_us, const MovedBytes& moved) {
    const ExchangeBytes bytes = {moved.logical, moved.wire, moved.tokens};
    return facts.rates.scatter > 0 ? limit_us(bytes, facts.rates) / 1e6 : 0;
  };
  const MovedBytes& dispatch = record.dispatch();
  const MovedBytes& combine = record.combine();
  add_exchange_row(table, {"dispatch", &dispatch, limit(dispatch_limit_us, dispatch)});
  add_exchange_row(table, {"combine", &combine, limit(combine_limit_us, combine)});
  return table;
}

std::string phase_text(const TrainFacts& facts) {
  return facts.config.overlap.is_on ? "Where the time went, mean over the ranks; lanes work at the "
                                      "same time, so the parts are more than all"
                                    : "Where the time went, mean over the ranks";
}

Table lane_table(const TrainRecord& record) {
  Table table({"lane", "busy", "share of the steps", "per step"});
  const LaneSeconds& lanes = record.lanes();
  const auto num_steps = static_cast<double>(std::max<int64_t>(record.num_steps(), 1));
  const auto add = [&](const char* name, double seconds) {
    table.add_row(
        {name,
         seconds_text(seconds),
         fmt::format("{:.1f} %", percent(seconds, record.rank_seconds())),
         seconds_text(seconds / num_steps)}
    );
  };
  add("compute", lanes.compute);
  add("exchange", lanes.exchange);
  add("exchange alone", lanes.exposed);
  return table;
}

std::string lane_text(const TrainRecord& record) {
  const LaneSeconds& lanes = record.lanes();
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
    seconds += record.phase_seconds()[static_cast<size_t>(phase)];
  }
  return fmt::format(
      "Of {} in plan, dispatch and combine a rank waited at least {} for the others",
      seconds_text(seconds),
      seconds_text(record.wait_seconds())
  );
}

std::string load_picture(const TrainRecord& record) {
  std::string out = fmt::format(
      "Load per expert lately, one line per block (@ = {} times the mean or more):\n", 3
  );
  for (int block = 0; block < record.model().num_blocks; ++block) {
    const auto routes = record.recent_routes(block);
    double sum = 0;
    for (const int64_t count : routes) {
      sum += static_cast<double>(count);
    }
    const double mean = sum / static_cast<double>(routes.size());
    const std::vector<double> loads(routes.begin(), routes.end());
    out += fmt::format(
        "  block {:>2} |{}| max / mean {:.2f}\n",
        block,
        shaded(loads, 3 * mean),
        max_over_mean(routes)
    );
  }
  return out;
}

}  // namespace weft::program
