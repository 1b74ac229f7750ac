// SPDX-License-Identifier: Apache-2.0
#include "simulate_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

namespace weft::program {
namespace {

using sim::Simulation;

std::string us_text(double us) {
  return us < 1000 ? fmt::format("{:.1f}", us) : count_text(std::llround(us));
}

std::string size_text(uint64_t bytes) {
  return bytes_text(static_cast<double>(bytes));
}

std::string rows_text(const Simulation& one, int64_t rows) {
  return size_text(static_cast<uint64_t>(rows * one.scenario.row_bytes));
}

std::string ranks_text(const Simulation& one) {
  return count_text(one.scenario.num_ranks);
}

Table times_table(std::span<const Simulation> sizes) {
  Table table(
      {"ranks",
       "domains",
       "experts",
       "replayed",
       "plan us",
       "words us",
       "dispatch us",
       "bound by",
       "combine us",
       "bound by"}
  );
  for (const Simulation& one : sizes) {
    table.add_row(
        {ranks_text(one),
         count_text(one.scenario.num_domains()),
         count_text(one.scenario.num_experts),
         count_text(one.num_replayed),
         us_text(one.control.plan_us()),
         us_text(one.control.words_us),
         us_text(one.dispatch_us),
         std::string(one.dispatch_rows.bound()),
         us_text(one.combine_us),
         std::string(one.combine_rows.bound())}
    );
  }
  return table;
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

Table bytes_table(std::span<const Simulation> sizes) {
  Table table(
      {"ranks",
       "links out",
       "of it forwarded",
       "card out",
       "card out, most",
       "card in, most",
       "once per rank",
       "once per route"}
  );
  for (const Simulation& one : sizes) {
    table.add_row(
        {ranks_text(one),
         rows_text(one, one.mean.link_out),
         rows_text(one, one.mean.forwarded),
         rows_text(one, one.mean.card_out),
         rows_text(one, one.most.card_out),
         rows_text(one, one.most.card_in),
         rows_text(one, one.mean.card_out_per_rank),
         rows_text(one, one.mean.card_out_per_route)}
    );
  }
  return table;
}

Table cpu_memory_table(std::span<const Simulation> sizes) {
  Table table(
      {"ranks", "output", "signals", "words", "records", "records used", "staging", "carrier"}
  );
  for (const Simulation& one : sizes) {
    const auto& cpu = one.memory.cpu;
    table.add_row(
        {ranks_text(one),
         size_text(one.memory.output),
         size_text(cpu.signals),
         size_text(cpu.words),
         size_text(cpu.records),
         size_text(cpu.records_used),
         size_text(cpu.staging),
         size_text(one.memory.carrier)}
    );
  }
  return table;
}

Table gpu_memory_table(std::span<const Simulation> sizes) {
  Table table({"ranks", "output", "signals", "words", "weights", "each plan", "staging", "carrier"}
  );
  for (const Simulation& one : sizes) {
    const auto& gpu = one.memory.gpu;
    table.add_row(
        {ranks_text(one),
         size_text(one.memory.output),
         size_text(gpu.signals),
         size_text(gpu.words),
         size_text(gpu.weights),
         size_text(gpu.plan),
         size_text(gpu.staging),
         size_text(one.memory.carrier)}
    );
  }
  return table;
}

Table messages_table(std::span<const Simulation> sizes) {
  Table table(
      {"ranks",
       "signals",
       "raised by",
       "card messages",
       "words",
       "words us",
       "by carrier us",
       "plan bytes"}
  );
  for (const Simulation& one : sizes) {
    table.add_row(
        {ranks_text(one),
         count_text(one.most.dispatch_signals),
         count_text(one.most.dispatch_raises),
         count_text(one.most.messages_out),
         count_text(one.control.word_messages),
         us_text(one.control.words_us),
         us_text(one.control.words_by_carrier_us),
         size_text(static_cast<uint64_t>(one.control.plan_bytes_out))}
    );
  }
  return table;
}

struct NamedTable {
  std::string_view name;
  std::string_view title;
  Table (*make)(std::span<const Simulation> sizes);
};

constexpr std::array<NamedTable, 6> kTables = {{
    {"times", "Time of the slowest rank; words are part of dispatch and of combine", times_table},
    {"busy",
     "Where the time of the rows goes: us of the rank that is busiest with each",
     busy_table},
    {"bytes",
     "Bytes of a dispatch per rank, mean unless said; combine moves as many back",
     bytes_table},
    {"cpu", "Memory of a rank, executor of the CPU", cpu_memory_table},
    {"gpu", "Memory of a rank, executor of GPUs", gpu_memory_table},
    {"messages",
     "Signals and messages per rank and dispatch, of the rank with most",
     messages_table},
}};

}  // namespace

std::vector<std::string> simulation_tables() {
  std::vector<std::string> names;
  for (const NamedTable& table : kTables) {
    names.emplace_back(table.name);
  }
  return names;
}

std::string simulation_text(
    std::span<const Simulation> sizes, std::span<const std::string> wanted
) {
  std::string text;
  for (const NamedTable& table : kTables) {
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

}  // namespace weft::program
