// SPDX-License-Identifier: Apache-2.0
// `weft plan`: what a routing means before a byte of payload moves.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/choices.hpp"
#include "cli/program.hpp"
#include "report/json_text.hpp"
#include "routing/balance_report.hpp"
#include "routing/report.hpp"
#include "routing/source.hpp"
#include "weft/plan.hpp"

namespace weft::program {
namespace {

constexpr const char* kFooter =
    R"(FILE is what `weft-lab train --save-routing` wrote, or a plan saved by --save. Without FILE the routing is
made up from --tokens, --experts, --topk, --ranks, --skew and --seed.

An arrival is a (token, rank) pair: it crosses the wire once, however many of the token's experts
live there; its other rows are duplicates, copied on arrival. Wire bytes cross a rank boundary;
logical bytes are all rows a rank receives, its own included.

--balance shows what replicas of experts on other ranks would do, as `balance` of a plan call has them.

Examples:
  weft plan                                      4 ranks, 256 experts, top-8, uniform
  weft plan --skew 1 --pad 128 --html plan.html  popular experts, padded blocks, a page to look at
  weft plan steps.wrt --step 100 --layer 2       one moment of a training run
  weft plan steps.wrt --rank 1 --save one.json   rank 1's plan, to keep or to send
  weft plan steps.wrt --balance 2                how even replicas would make the ranks
  weft plan one.json                             what a saved plan holds
  weft plan one.json --compare two.json          exit code 1 and the differences, if any)";

struct PlanCommand {
  std::string file;
  MadeUpRouting made_up;
  RecordChoice choice;
  RowFormat format;
  PlanOptions options;
  std::optional<int> replicas;  // absent: nothing is said about balancing
  int64_t min_rows = 1;
  int64_t expert_bytes = 3LL * 7168 * 2048 * 2;  // DeepSeek-V3's in bf16
  int rank = 0;
  std::string save_path;
  std::string compare_path;
  std::string html_path;
  bool as_json = false;
  bool with_slots = false;
};

using Json = nlohmann::ordered_json;

// One line per field that differs, of an array with the first place, and both values.
void add_differences(
    const std::string& name, const Json& a, const Json& b, std::vector<std::string>& lines
) {
  const auto text = [](const Json& value) {
    return value.is_string() ? value.get<std::string>() : value.dump();
  };
  if (a == b) {
    return;
  }
  if (a.is_object() && b.is_object()) {
    for (const auto& [field, value] : a.items()) {
      const auto inner = name.empty() ? field : fmt::format("{}.{}", name, field);
      add_differences(inner, value, b.at(field), lines);
    }
  } else if (a.is_array() && b.is_array()) {
    const auto [in_a, in_b] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    const Json none = "nothing";
    const auto place = fmt::format("{}[{}]", name, in_a - a.begin());
    add_differences(place, in_a == a.end() ? none : *in_a, in_b == b.end() ? none : *in_b, lines);
  } else {
    lines.push_back(fmt::format("{}: {} and {}", name, text(a), text(b)));
  }
}

// Differences have the names of the library; empty if the plans are equal.
std::vector<std::string> plan_differences(const Plan& a, const Plan& b) {
  const auto fields = [](const Plan& plan) {
    const Json json = Json::parse(plan.to_json());
    Json all = json["shape"];
    all.update(json["output"]);
    all["global_routes"] = json["global_routes"];
    all["topk_idx"] = json["route_expert"];
    all["route_slots"] = json["route_slot"];
    all["sent"] = json["sent"];
    all["received"] = json["received"];
    return all;
  };
  std::vector<std::string> lines;
  if (a == b) {
    return lines;
  }
  add_differences("", fields(a), fields(b), lines);
  if (lines.empty()) {
    lines.emplace_back("the plans differ in what follows from their routes");
  }
  return lines;
}

Plan plan_of_rank(const PlanReport& report, int rank) {
  if (rank >= report.num_ranks()) {
    throw CLI::ValidationError(fmt::format(
        "--rank {} is out of range (the routing has {} ranks)", rank, report.num_ranks()
    ));
  }
  return report.plans[static_cast<size_t>(rank)];
}

// Prints how the plans differ; false if they do.
bool compare(const Plan& plan, const std::string& path) {
  const auto differences = plan_differences(plan, Plan::load(path));
  for (const std::string& line : differences) {
    fmt::print("{}\n", line);
  }
  if (differences.empty()) {
    fmt::print("The plans are equal\n");
  }
  return differences.empty();
}

std::optional<BalanceReport> balance_of(const PlanCommand& command, const PlanReport& report) {
  if (!command.replicas) {
    return std::nullopt;
  }
  const BalanceOptions options = {.replicas = *command.replicas, .min_rows = command.min_rows};
  return make_balance_report(report, options, command.expert_bytes);
}

void save_page(
    const PlanCommand& command,
    const PlanReport& report,
    const std::optional<BalanceReport>& balance
) {
  Page page("Weft plan");
  page.add_preformatted(plan_summary(report));
  page.add_table(plan_rank_table(report));
  add_plan_figures(report, page);
  if (balance) {
    page.add_preformatted(balance_text(*balance));
  }
  page.save(command.html_path);
}

void show_report(
    const PlanCommand& command,
    const PlanReport& report,
    const std::optional<BalanceReport>& balance
) {
  if (command.as_json) {
    Json json = plan_json(report, command.with_slots);
    if (balance) {
      json["balance"] = balance_json(*balance);
    }
    fmt::print("{}\n", json_text(json, kOneLine));
    return;
  }
  if (!command.file.empty()) {
    fmt::print(
        "Imbalance per layer of {}\n{}\n", command.file, routing_file_table(command.file).text()
    );
  }
  fmt::print(
      "{}\n{}\n{}", plan_summary(report), plan_rank_table(report).text(), plan_picture(report)
  );
  if (balance) {
    fmt::print("\n{}", balance_text(*balance));
  }
}

// Keeps or compares one rank's plan, as asked for.
void use_plan(const PlanCommand& command, const Plan& plan) {
  if (!command.save_path.empty()) {
    plan.save(command.save_path);
  }
  if (!command.compare_path.empty() && !compare(plan, command.compare_path)) {
    throw CLI::RuntimeError(1);
  }
}

// A saved plan is what it is: nothing is made of it.
void check_saved_plan_options(const CLI::App& app, const std::string& file) {
  constexpr std::array<std::string_view, 4> kFitting = {"file", "--save", "--compare", "--json"};
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() > 0 && std::ranges::count(kFitting, option->get_name()) == 0) {
      throw CLI::ValidationError(
          fmt::format("{} is for a routing, and {} is a saved plan", option->get_name(), file)
      );
    }
  }
}

void run_on_saved_plan(const PlanCommand& command) {
  const Plan plan = Plan::load(command.file);
  if (command.compare_path.empty()) {
    if (command.as_json) {
      fmt::print("{}", plan.to_json());
    } else {
      std::cout << plan << std::flush;
    }
  }
  use_plan(command, plan);
}

void run_on_routing(const PlanCommand& command) {
  check_made_up(command.made_up);
  const RoutingMoment moment = command.file.empty() ? make_up_routing(command.made_up)
                                                    : read_moment(command.file, command.choice);
  const PlanReport report = make_plan_report(
      moment.name, moment.routes, moment.num_experts, command.options, command.format
  );
  const std::optional<BalanceReport> balance = balance_of(command, report);
  if (!command.html_path.empty()) {
    save_page(command, report, balance);
  }
  if (command.compare_path.empty()) {
    show_report(command, report, balance);
  }
  use_plan(command, plan_of_rank(report, command.rank));
}

void add_plan_options(CLI::App& app, PlanCommand& command) {
  auto& options = command.options;
  add_layout_option(app, options.layout);
  add_row_options(app, command.format.hidden, command.format.dtype, options.pad_multiple);
  app.add_option("--budget", options.row_budget, "Rows each rank has room for; more are dropped");
  add_value(app, "--stride", options.expert_stride, "Rows of an expert's block (expert_strided)");
}

void add_balance_options(CLI::App& app, PlanCommand& command) {
  auto* balance = app.add_option("--balance", command.replicas);
  balance->description("Show what replicas of experts would do, so many on each rank")
      ->check(Within(0, kMostReplicas));
  add_number(app, "--min-rows", command.min_rows, 1, kMostTokens, "Fewest rows of a replica")
      ->needs(balance);
  add_number(app, "--expert-bytes", command.expert_bytes, 1, 1LL << 40, "Weights of an expert")
      ->needs(balance);
}

void add_output_options(CLI::App& app, PlanCommand& command) {
  add_value(app, "--rank", command.rank, "The rank whose plan is saved or compared")
      ->check(Within(0, 1023));
  app.add_option("--save", command.save_path, "Save one rank's plan as JSON");
  app.add_option("--compare", command.compare_path, "Compare with a saved plan");
  app.add_option("--html", command.html_path, "Write a page with pictures");
  auto* json = app.add_flag("--json", command.as_json, "Print JSON instead of text");
  app.add_flag("--slots", command.with_slots)
      ->description("With --json: every route's expert and slot too")
      ->needs(json);
}

}  // namespace

void add_plan(CLI::App& app) {
  auto* sub = app.add_subcommand("plan", "What a routing means: rows, bytes, imbalance");
  sub->footer(kFooter);
  auto command = std::make_shared<PlanCommand>();
  MadeUpRouting& made_up = command->made_up;
  auto* file = add_routing_options(*sub, command->file, made_up, command->choice);
  file->description("Routing file or saved plan");
  add_made_up(*sub, file, "--ranks", made_up.num_ranks, "Ranks")->check(Within(1, 1024));
  add_made_up(*sub, file, "--experts", made_up.num_experts, "Experts, divisible by ranks")
      ->check(Within(1, kMostExperts));
  add_plan_options(*sub, *command);
  add_balance_options(*sub, *command);
  add_output_options(*sub, *command);
  sub->callback([command, sub] {
    check_outputs(
        {{"--save", command->save_path}, {"--html", command->html_path}},
        {{"FILE", command->file}, {"--compare", command->compare_path}}
    );
    if (!command->file.empty() && is_saved_plan(command->file)) {
      check_saved_plan_options(*sub, command->file);
      run_on_saved_plan(*command);
    } else {
      run_on_routing(*command);
    }
  });
}

}  // namespace weft::program
