// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <string_view>

#include "core/gpu/peer_address.hpp"
#include "report/json_text.hpp"
#include "simulate/command/command.hpp"
#include "transport/transport.hpp"

namespace weft::program {
namespace {

using sim::Simulation;

std::string us_text(double us) {
  return us < 1000 ? fmt::format("{:.1f}", us) : count_text(std::llround(us));
}

std::string size_text(uint64_t bytes) {
  return bytes_text(static_cast<double>(bytes));
}

// The number at the end of a chain of members, as text.
template <auto... kPath>
std::string count_of(const Simulation& one) {
  return count_text((one.*....*kPath));
}
template <auto... kPath>
std::string us_of(const Simulation& one) {
  return us_text((one.*....*kPath));
}
template <auto... kPath>
std::string size_of(const Simulation& one) {
  return size_text(static_cast<uint64_t>((one.*....*kPath)));
}
// The bytes of a number of rows, as text.
template <auto... kPath>
std::string rows_of(const Simulation& one) {
  return size_text(static_cast<uint64_t>((one.*....*kPath) * one.scenario.row_bytes));
}

std::string ranks_text(const Simulation& one) {
  return count_text(one.scenario.num_ranks);
}

Table busy_table(std::span<const Simulation> sizes) {
  Table table({"ranks", "call", "rows us", "links", "cards", "proxies", "copies", "domains/token"});
  for (const Simulation& one : sizes) {
    const auto add = [&](const char* call, const sim::ReplayTimes& rows) {
      table.add_row(
          {ranks_text(one),
           call,
           us_text(rows.us),
           us_text(rows.busy.link_us),
           us_text(rows.busy.card_us),
           us_text(rows.busy.proxy_us),
           us_text(rows.busy.copy_us),
           fmt::format("{:.2f}", one.traffic.domains_per_token)}
      );
    };
    add("dispatch", one.dispatch_rows);
    add("combine", one.combine_rows);
  }
  return table;
}

struct Column {
  const char* header;
  std::string (*cell)(const Simulation&);
};

struct NamedTable {
  std::string_view name;
  std::string_view title;
  std::vector<Column> columns;  // behind the ranks, a line for each size; none: busy_table()

  [[nodiscard]] Table make(std::span<const Simulation> sizes) const {
    if (columns.empty()) {
      return busy_table(sizes);
    }
    std::vector<std::string> header = {"ranks"};
    std::ranges::transform(columns, std::back_inserter(header), &Column::header);
    Table table(header);
    for (const Simulation& one : sizes) {
      std::vector<std::string> cells = {ranks_text(one)};
      for (const Column& column : columns) {
        cells.push_back(column.cell(one));
      }
      table.add_row(std::move(cells));
    }
    return table;
  }
};

const std::vector<NamedTable>& all_tables() {
  using S = Simulation;
  using sim::ControlCost;
  using sim::Memory;
  using sim::RankTraffic;
  static const std::vector<NamedTable> tables = {
      {"times",
       "Time of the slowest rank; words are part of dispatch and of combine",
       {{"domains", [](const S& s) { return count_text(s.scenario.num_domains()); }},
        {"experts", count_of<&S::scenario, &sim::Scenario::num_experts>},
        {"replayed", count_of<&S::num_replayed>},
        {"plan us", [](const S& s) { return us_text(s.control.plan_us()); }},
        {"words us", us_of<&S::control, &ControlCost::words_us>},
        {"dispatch us", us_of<&S::dispatch_us>},
        {"bound by", [](const S& s) { return std::string(s.dispatch_rows.bound()); }},
        {"combine us", us_of<&S::combine_us>},
        {"bound by", [](const S& s) { return std::string(s.combine_rows.bound()); }}}},
      {"busy", "Where the time of the rows goes: us of the rank that is busiest with each", {}},
      {"bytes",
       "Bytes of a dispatch per rank, mean unless said; combine moves as many back",
       {{"links out", rows_of<&S::mean, &RankTraffic::link_out>},
        {"of it forwarded", rows_of<&S::mean, &RankTraffic::forwarded>},
        {"card out", rows_of<&S::mean, &RankTraffic::card_out>},
        {"card out, most", rows_of<&S::most, &RankTraffic::card_out>},
        {"card in, most", rows_of<&S::most, &RankTraffic::card_in>},
        {"once per rank", rows_of<&S::mean, &RankTraffic::card_out_per_rank>},
        {"once per route", rows_of<&S::mean, &RankTraffic::card_out_per_route>}}},
      {"cpu",
       "Memory of a rank, executor of the CPU",
       {{"output", size_of<&S::memory, &Memory::output>},
        {"signals", size_of<&S::memory, &Memory::cpu, &Memory::Cpu::signals>},
        {"words", size_of<&S::memory, &Memory::cpu, &Memory::Cpu::words>},
        {"records", size_of<&S::memory, &Memory::cpu, &Memory::Cpu::records>},
        {"records used", size_of<&S::memory, &Memory::cpu, &Memory::Cpu::records_used>},
        {"staging", size_of<&S::memory, &Memory::cpu, &Memory::Cpu::staging>},
        {"forwarder", size_of<&S::memory, &Memory::forwarder>}}},
      {"gpu",
       "Memory of a rank, executor of GPUs",
       {{"output", size_of<&S::memory, &Memory::output>},
        {"signals", size_of<&S::memory, &Memory::gpu, &Memory::Gpu::signals>},
        {"words", size_of<&S::memory, &Memory::gpu, &Memory::Gpu::words>},
        {"weights", size_of<&S::memory, &Memory::gpu, &Memory::Gpu::weights>},
        {"each plan", size_of<&S::memory, &Memory::gpu, &Memory::Gpu::plan>},
        {"staging", size_of<&S::memory, &Memory::gpu, &Memory::Gpu::staging>},
        {"forwarder", size_of<&S::memory, &Memory::forwarder>}}},
      {"messages",
       "Signals and messages per rank and dispatch, of the rank with most",
       {{"signals", count_of<&S::most, &RankTraffic::dispatch_signals>},
        {"raised by", count_of<&S::most, &RankTraffic::dispatch_raises>},
        {"card messages", count_of<&S::most, &RankTraffic::messages_out>},
        {"words", count_of<&S::control, &ControlCost::word_messages>},
        {"words us", us_of<&S::control, &ControlCost::words_us>},
        {"by forwarder us", us_of<&S::control, &ControlCost::words_by_forwarder_us>},
        {"plan bytes", size_of<&S::control, &ControlCost::plan_bytes_out>}}}};
  return tables;
}

using Json = nlohmann::ordered_json;

Json traffic_json(const sim::RankTraffic& rank) {
  Json json;
  for (const auto& [name, value] : sim::traffic_fields()) {
    json[std::string(name)] = rank.*value;
  }
  return json;
}

Json memory_json(const sim::Memory& memory) {
  return {
      {"output", memory.output},
      {"forwarder", memory.forwarder},
      {"cpu",
       {{"signals", memory.cpu.signals},
        {"words", memory.cpu.words},
        {"records", memory.cpu.records},
        {"records_used", memory.cpu.records_used},
        {"staging", memory.cpu.staging}}},
      {"gpu",
       {{"signals", memory.gpu.signals},
        {"words", memory.gpu.words},
        {"weights", memory.gpu.weights},
        {"plan", memory.gpu.plan},
        {"staging", memory.gpu.staging}}}};
}

Json rows_json(const sim::ReplayTimes& rows) {
  return {
      {"us", rounded(rows.us)},
      {"bound", rows.bound()},
      {"link_us", rounded(rows.busy.link_us)},
      {"card_us", rounded(rows.busy.card_us)},
      {"proxy_us", rounded(rows.busy.proxy_us)},
      {"copy_us", rounded(rows.busy.copy_us)}};
}

Json control_json(const sim::ControlCost& control) {
  return {
      {"word_messages", control.word_messages},
      {"words_us", rounded(control.words_us)},
      {"words_by_forwarder_us", rounded(control.words_by_forwarder_us)},
      {"plan_words_us", rounded(control.plan_words_us)},
      {"plan_local_us", rounded(control.plan_local_us)},
      {"plan_records_us", rounded(control.plan_records_us)},
      {"plan_bytes_out", control.plan_bytes_out}};
}

Json size_json(const sim::Simulation& one) {
  return {
      {"ranks", one.scenario.num_ranks},
      {"ranks_per_domain", one.scenario.ranks_per_domain},
      {"experts", one.scenario.num_experts},
      {"topk", one.scenario.topk},
      {"tokens", one.scenario.max_tokens},
      {"row_bytes", one.scenario.row_bytes},
      {"flat", one.scenario.is_flat},
      {"replayed_domains", one.num_replayed},
      {"domains_per_token", one.traffic.domains_per_token},
      {"plan_us", rounded(one.control.plan_us())},
      {"dispatch_us", rounded(one.dispatch_us)},
      {"combine_us", rounded(one.combine_us)},
      {"dispatch_rows", rows_json(one.dispatch_rows)},
      {"combine_rows", rows_json(one.combine_rows)},
      {"control", control_json(one.control)},
      {"mean", traffic_json(one.mean)},
      {"most", traffic_json(one.most)},
      {"busiest_rank", one.busiest_rank},
      {"memory", memory_json(one.memory)}};
}

struct NamedTimes {
  const char* name;
  const sim::StepTimes& times;
};

std::array<NamedTimes, 3> ways_of(const sim::BalancedStep& step) {
  return {{{"as routed", step.routed}, {"balanced", step.balanced}, {"even", step.even}}};
}

Json step_json(const sim::BalancedStep& step) {
  Json json = {{"ranks", step.num_ranks}};
  for (const auto& [name, times] : ways_of(step)) {
    json[name] = {
        {"busiest_of_mean", rounded(times.busiest_of_mean, 4)},
        {"copies", times.copies},
        {"exchange_us", rounded(times.exchange_us)},
        {"products_us", rounded(times.products_us)},
        {"rest_us", rounded(times.rest_us)},
        {"weights_us", rounded(times.weights_us)},
        {"exposed_us", rounded(times.exposed_us)},
        {"us", rounded(times.us())},
        {"of_even", rounded(times.us() / step.even.us(), 4)},
        {"of_even_if_not_hidden", rounded(times.us_if_not_hidden() / step.even.us(), 4)}};
  }
  return json;
}

constexpr double kPatienceUs = 100;  // for what precedes the rows of a call

sim::Scenario resized(const sim::Scenario& wanted, int num_ranks) {
  sim::Scenario scenario = wanted;
  scenario.num_ranks = num_ranks;
  scenario.ranks_per_domain = std::min(wanted.ranks_per_domain, num_ranks);
  scenario.num_experts = std::max(wanted.num_experts, num_ranks);
  return scenario;
}

// The most ranks for which it holds; it holds for 1 and for all below some number.
std::string most_ranks(const std::function<bool(int)>& fits) {
  if (fits(sim::kMostRanks)) {
    return fmt::format("over {}", count_text(sim::kMostRanks));
  }
  int good = 1;
  int bad = sim::kMostRanks;
  while (bad - good > 1) {
    const int middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return count_text(good);
}

}  // namespace

std::vector<std::string> simulation_tables() {
  std::vector<std::string> names;
  for (const NamedTable& table : all_tables()) {
    names.emplace_back(table.name);
  }
  return names;
}

std::string simulation_text(
    std::span<const Simulation> sizes, std::span<const std::string> wanted
) {
  std::string text;
  for (const NamedTable& table : all_tables()) {
    if (wanted.empty() || std::ranges::find(wanted, table.name) != wanted.end()) {
      text += fmt::format("\n{}\n\n{}", table.title, table.make(sizes).text());
    }
  }
  return text;
}

std::string model_text(const sim::Model& model) {
  Table fields({"field", "value", "meaning", "origin"});
  for (const sim::ModelField& field : sim::model_fields()) {
    const auto origin = model.origin.find(field.name);
    fields.add_row(
        {std::string(field.name),
         fmt::format("{}", model.*field.value),
         std::string(field.meaning),
         origin == model.origin.end() ? "unknown" : origin->second}
    );
  }
  std::string text = fmt::format("Model {}\n\n{}", model.name, fields.text());
  if (model.plan_samples.empty()) {
    return text;
  }
  Table plans({"ranks", "experts", "tokens", "measured us", "model us"});
  for (const sim::PlanSample& sample : model.plan_samples) {
    const double us =
        sim::plan_work_us(model, sample.num_ranks, sample.num_experts, sample.num_tokens);
    plans.add_row(
        {count_text(sample.num_ranks),
         count_text(sample.num_experts),
         count_text(sample.num_tokens),
         us_text(sample.us),
         us_text(us)}
    );
  }
  return text + fmt::format("\nA rank's own work in a plan\n\n{}", plans.text());
}

std::string steps_text(std::span<const sim::BalancedStep> steps) {
  Table table(
      columns("ranks|routing|busiest, of mean|copies|exchange us|products us|rest us|weights us|"
              "exposed|layer us|of even|if not hidden")
  );
  for (const sim::BalancedStep& step : steps) {
    for (const auto& [name, times] : ways_of(step)) {
      table.add_row(
          {count_text(step.num_ranks),
           name,
           fmt::format("{:.3f}", times.busiest_of_mean),
           count_text(times.copies),
           us_text(times.exchange_us),
           us_text(times.products_us),
           us_text(times.rest_us),
           us_text(times.weights_us),
           us_text(times.exposed_us),
           us_text(times.us()),
           fmt::format("{:.3f}", times.us() / step.even.us()),
           fmt::format("{:.3f}", times.us_if_not_hidden() / step.even.us())}
      );
    }
  }
  return fmt::format("\nA layer, forward and backward\n\n{}", table.text());
}

Json simulation_json(
    std::span<const sim::Simulation> sizes,
    std::span<const sim::BalancedStep> steps,
    const sim::Model& model
) {
  Json json = {{"model", Json::parse(sim::model_json(model))}, {"sizes", Json::array()}};
  for (const sim::Simulation& one : sizes) {
    json["sizes"].push_back(size_json(one));
  }
  for (const sim::BalancedStep& step : steps) {
    json["steps"].push_back(step_json(step));
  }
  return json;
}

Table ends_table(const sim::Scenario& scenario, const sim::Model& model, int64_t budget_bytes) {
  const auto budget = static_cast<uint64_t>(budget_bytes);
  const auto memory = [&](int ranks) { return sim::reserved_memory(resized(scenario, ranks)); };
  const auto control = [&](int ranks) {
    return sim::control_cost(resized(scenario, ranks), model, memory(ranks));
  };
  const std::string room = bytes_text(static_cast<double>(budget_bytes));
  const std::string patience = fmt::format("{:.0f} us", kPatienceUs);
  Table table({"resource", "bound", "ranks"});
  const auto add = [&](const char* resource, const std::string& bound, const auto& fits) {
    table.add_row({resource, bound, most_ranks(fits)});
  };
  // These add a resource that the budget bounds, or the patience.
  const auto add_bytes = [&](const char* resource, const auto& bytes_of) {
    add(resource, room, [&](int ranks) { return bytes_of(memory(ranks), ranks) <= budget; });
  };
  const auto add_time = [&](const char* resource, double sim::ControlCost::*us) {
    add(resource, patience, [&](int ranks) { return control(ranks).*us <= kPatienceUs; });
  };
  using sim::Memory;
  table.add_row({"GPUs that map each other", "a table in the code", count_text(kMaxDomainRanks)});
  add_bytes("GPU: control region and one plan", [](const Memory& m, int) {
    return m.gpu.control() + m.gpu.plan;
  });
  add_bytes("GPU: control region alone", [](const Memory& m, int) { return m.gpu.control(); });
  add_bytes("CPU: control region", [](const Memory& m, int) { return m.cpu.control(); });
  add_bytes("CPU: control region without records", [](const Memory& m, int) {
    return m.cpu.words;
  });
  add_time("words of a call, one for each rank", &sim::ControlCost::words_us);
  add_time("words of a call, one for each domain", &sim::ControlCost::words_by_forwarder_us);
  add_time("counts of a plan, to each rank", &sim::ControlCost::plan_words_us);
  add_bytes("one region's address, from rank 0 to all", [](const Memory&, int ranks) {
    return sizeof(RegionRef) * static_cast<uint64_t>(ranks) * static_cast<uint64_t>(ranks - 1);
  });
  add("slots, should all routes meet on a rank", "2^31", [&](int ranks) {
    return scenario.max_tokens * scenario.topk * ranks <= std::numeric_limits<int32_t>::max();
  });
  return table;
}

}  // namespace weft::program
