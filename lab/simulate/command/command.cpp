// SPDX-License-Identifier: Apache-2.0
// `weft-lab simulate`: how an exchange of thousands of ranks would go.
#include "simulate/command/command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>

#include "cli/choices.hpp"
#include "cli/program.hpp"
#include "cli/progress.hpp"
#include "plan/file/routing_file.hpp"
#include "report/json_text.hpp"
#include "routing/source.hpp"
#include "weft/plan.hpp"

namespace weft::program {
namespace {

constexpr const char* kFooter =
    R"(Ranks lie in domains whose members reach each other's memory; across domains each rank has a network
card. A token crosses once to each remote domain, to the rank with the same index there, which passes it
on inside; combine sums in the remote domain and sends one row back. Routing is counted for every rank;
time is replayed chunk by chunk over links, cards, proxies and copies, each of which takes one chunk at a
time. Where there are too many chunks, links and copies are replayed for the domain of the busiest rank
alone (column "replayed").

Memory is what the executors of this build would reserve for so many ranks. Times follow from a model:
without --model a built-in one of GPUs with NVLink, measured, and 400 Gb/s cards, assumed; --calibrate
measures this machine's copies, plan and messages and writes a model to change and to pass to --model.
docs/scale.md explains the numbers and compares them with measured ones.

Examples:
  weft-lab simulate                                      16 ranks, domains of 8
  weft-lab simulate --sweep 16,64,256,2304               how it grows
  weft-lab simulate --ranks 2304 --domain 72             domains of 72
  weft-lab simulate --ranks 64 --set card_gbps=100       another card
  weft-lab simulate --ranks 64 --flat                    each row to every remote rank by itself
  weft-lab simulate steps.wrt --step 100 --domain 2      real routing
  weft-lab simulate --skew 0.6 --balance 2               replicas of popular experts
  weft-lab simulate --ends                               where each resource ends
  weft-lab simulate --calibrate here.json                a model of this machine)";

struct SimulateOptions {
  std::string file;  // of real routing; empty: made up
  RecordChoice choice;
  MadeUpRouting made_up = {};     // its num_ranks and num_experts are set for each size
  std::vector<int> sizes = {16};  // ranks
  sim::Scenario wanted = {};      // experts are rounded up to a multiple of the ranks
  int64_t hidden = 7168;
  DType dtype = DType::kBFloat16;

  std::string model_path;
  std::vector<std::string> settings;  // "card_gbps=100"
  bool shows_model = false;
  std::string calibrate_path;
  std::vector<std::string> tables;  // empty: all
  std::string json_path;
  std::optional<int> replicas;  // shows a layer's time with so many
  sim::StepShape step;
  bool with_ends = false;
  int64_t budget_bytes = 600'000'000;
};

// Returns the scenario of `num_ranks` ranks; a domain is not larger than the group. Throws
// CLI::ValidationError for what does not fit.
sim::Scenario make_scenario(const SimulateOptions& options, int num_ranks) {
  sim::Scenario scenario = options.wanted;
  scenario.num_ranks = num_ranks;
  scenario.ranks_per_domain = std::min(scenario.ranks_per_domain, num_ranks);
  scenario.num_experts = (scenario.num_experts + num_ranks - 1) / num_ranks * num_ranks;
  scenario.topk = options.made_up.topk;
  scenario.max_tokens = options.made_up.num_tokens;
  scenario.row_bytes = options.hidden * dtype_bytes(options.dtype);
  if (num_ranks % scenario.ranks_per_domain != 0) {
    throw CLI::ValidationError(fmt::format(
        "--ranks {} is not divisible by --domain {}", num_ranks, scenario.ranks_per_domain
    ));
  }
  if (scenario.row_bytes % 16 != 0) {
    throw CLI::ValidationError(fmt::format(
        "--hidden {} makes rows of {} B (a multiple of 16)", options.hidden, scenario.row_bytes
    ));
  }
  if (scenario.topk > scenario.num_experts) {
    throw CLI::ValidationError(
        fmt::format("--topk {} is more than --experts {}", scenario.topk, scenario.num_experts)
    );
  }
  return scenario;
}

sim::Model chosen_model(const SimulateOptions& options) {
  sim::Model model =
      options.model_path.empty() ? sim::h200_model() : sim::load_model(options.model_path);
  for (const std::string& setting : options.settings) {
    const size_t equals = setting.find('=');
    double value = 0;
    const char* const end = setting.data() + setting.size();
    const auto parsed = equals == std::string::npos
                            ? std::from_chars_result{end, std::errc::invalid_argument}
                            : std::from_chars(setting.data() + equals + 1, end, value);
    if (parsed.ec != std::errc() || parsed.ptr != end) {
      throw CLI::ValidationError(fmt::format("--set {} is not of the form name=number", setting));
    }
    try {
      sim::set_field(model, setting.substr(0, equals), value, "--set");
    } catch (const Error& error) {
      throw CLI::ValidationError(fmt::format("--set {}", error.what()));
    }
  }
  return model;
}

std::string headline(
    const SimulateOptions& options, const sim::Scenario& scenario, const char* model
) {
  const std::string routing = options.file.empty()
                                  ? fmt::format(
                                        "{} tokens a rank, top-{}, skew {}, seed {}",
                                        count_text(options.made_up.num_tokens),
                                        scenario.topk,
                                        options.made_up.skew,
                                        options.made_up.seed
                                    )
                                  : fmt::format("{}, top-{}", options.file, scenario.topk);
  return fmt::format(
      "Model {}; {}, rows of {} B; domains of {}, {}\n",
      model,
      routing,
      count_text(scenario.row_bytes),
      options.wanted.ranks_per_domain,
      options.wanted.is_flat ? "each row to every remote rank by itself"
                             : "a token crosses once per domain"
  );
}

struct Done {
  std::vector<sim::Simulation> sizes;
  std::vector<sim::BalancedStep> steps;  // of each size, with --balance
};

// Adds a layer's times, with --balance. Where all ranks are equally busy, the same number of tokens
// chooses experts at random.
void add_step(
    const SimulateOptions& options,
    const sim::Scenario& scenario,
    const sim::Model& model,
    std::span<const RouteTable> routes,
    Done& done
) {
  if (!options.replicas) {
    return;
  }
  MadeUpRouting even = options.made_up;
  even.num_ranks = scenario.num_ranks;
  even.num_experts = scenario.num_experts;
  even.skew = 0;
  sim::StepShape shape = options.step;
  shape.replicas = *options.replicas;
  shape.hidden = options.hidden;
  const RoutingMoment moment = make_up_routing(even);
  done.steps.push_back(sim::simulate_step(scenario, model, routes, moment.routes, shape));
}

// The only size of a routing file is its own.
Done run_on_file(SimulateOptions& options, const sim::Model& model) {
  const RoutingMoment moment = read_moment(options.file, options.choice);
  options.wanted.num_experts = moment.num_experts;
  options.made_up.topk = moment.routes.front().topk;
  options.made_up.num_tokens = 0;
  for (const RouteTable& table : moment.routes) {
    options.made_up.num_tokens = std::max(options.made_up.num_tokens, table.num_tokens);
  }
  options.sizes = {static_cast<int>(moment.routes.size())};
  const sim::Scenario scenario = make_scenario(options, options.sizes.front());
  Done done;
  done.sizes.push_back(sim::simulate(scenario, model, moment.routes));
  add_step(options, scenario, model, moment.routes, done);
  return done;
}

Done run_made_up(const SimulateOptions& options, const sim::Model& model) {
  Progress progress("simulate");
  double total = 0;
  for (const int size : options.sizes) {
    static_cast<void>(make_scenario(options, size));  // bad usage is told before the work
    total += size;
  }
  Done done;
  double before = 0;
  for (const int size : options.sizes) {
    const sim::Scenario scenario = make_scenario(options, size);
    MadeUpRouting spec = options.made_up;
    spec.num_ranks = size;
    spec.num_experts = scenario.num_experts;
    const auto part = [&](double first, double share) {
      return [&, first, share](double fraction) {
        progress.update(
            (before + size * (first + share * fraction)) / total, fmt::format("{} ranks", size)
        );
      };
    };
    const std::vector<RouteTable> routes = make_up_routing(spec, part(0, 0.5)).routes;
    done.sizes.push_back(sim::simulate(scenario, model, routes, part(0.5, 0.5)));
    // The counts that each rank tells all others take most of the memory and are not shown.
    done.sizes.back().traffic.counts = {};
    add_step(options, scenario, model, routes, done);
    before += size;
  }
  return done;
}

void run_simulate(SimulateOptions& options) {
  check_outputs(
      {{"--calibrate", options.calibrate_path}, {"--json", options.json_path}},
      {{"the routing", options.file}, {"--model", options.model_path}}
  );
  if (!options.calibrate_path.empty()) {
    fmt::print("{}", model_text(calibrate(options.calibrate_path)));
    return;
  }
  const sim::Model model = chosen_model(options);
  if (options.shows_model) {
    fmt::print("{}", model_text(model));
    return;
  }
  if (options.with_ends) {
    const sim::Scenario scenario = make_scenario(options, options.wanted.ranks_per_domain);
    fmt::print(
        "{}\n{}",
        headline(options, scenario, model.name.c_str()),
        ends_table(scenario, model, options.budget_bytes).text()
    );
    return;
  }
  const Done done =
      options.file.empty() ? run_made_up(options, model) : run_on_file(options, model);
  if (!options.json_path.empty()) {
    save_json(options.json_path, simulation_json(done.sizes, done.steps, model));
  }
  fmt::print(
      "{}{}{}",
      headline(options, done.sizes.front().scenario, model.name.c_str()),
      simulation_text(done.sizes, options.tables),
      done.steps.empty() ? "" : steps_text(done.steps)
  );
}

void add_size_options(CLI::App& command, SimulateOptions& options) {
  MadeUpRouting& made_up = options.made_up;
  auto* file = add_routing_options(command, options.file, made_up, options.choice);
  const auto add = [&](const char* name, auto& value, const char* text) {
    return add_made_up(command, file, name, value, text);
  };
  add("--ranks,--sweep", options.sizes, "Ranks; several: a line for each")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(Within(1, sim::kMostRanks));
  add("--experts", options.wanted.num_experts, "Experts; rounded up to a multiple of the ranks")
      ->check(Within(1, kMostExperts));
}

void add_shape_options(CLI::App& command, SimulateOptions& options) {
  add_number(
      command, "--domain", options.wanted.ranks_per_domain, 1, sim::kMostRanks, "Ranks of a domain"
  );
  add_row_options(command, options.hidden, options.dtype, options.wanted.pad_multiple);
  command.add_flag(
      "--flat", options.wanted.is_flat, "Send each row to every remote rank by itself"
  );
}

void add_model_options(CLI::App& command, SimulateOptions& options) {
  command.add_option("--model", options.model_path, "Model of links and costs, a JSON file");
  command.add_option("--set", options.settings, "Change a number of the model: name=number")
      ->delimiter(',')
      ->allow_extra_args(false);
  command.add_flag(
      "--show-model", options.shows_model, "Print the model, its origins and do no more"
  );
  command.add_option("--calibrate", options.calibrate_path)
      ->description("Measure this machine, write a model here and do nothing else");
  auto* ends =
      command.add_flag("--ends", options.with_ends, "Show where each resource ends instead");
  command.add_option("--budget", options.budget_bytes, "Bytes a rank may hold beside its tensors")
      ->check(Within(int64_t{1}, int64_t{1} << 50))
      ->needs(ends)
      ->capture_default_str();
  command.add_option("--tables", options.tables, "Print these only")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember(simulation_tables()))
      ->default_str("all");
  command.add_option("--json", options.json_path, "Write every number here");
}

void add_step_options(CLI::App& command, SimulateOptions& options) {
  auto* balance = command.add_option(
      "--balance", options.replicas, "Show a layer's time with so many replicas of experts a rank"
  );
  balance->check(Within(0, kMostReplicas));
  command.add_option("--width", options.step.width, "Inner width of an expert")
      ->check(Within(int64_t{1}, int64_t{1} << 20))
      ->needs(balance)
      ->capture_default_str();
  const auto add = [&](const char* name, double& value, double least, const char* text) {
    command.add_option(name, value, text)
        ->check(CLI::Range(least, 1e9))
        ->needs(balance)
        ->capture_default_str();
  };
  sim::StepShape& step = options.step;
  add("--token-mflop", step.token_mflop, 0, "Mflop of a token forward in a layer but for experts");
  add("--tflops", step.tflops, 1e-3, "Tflop/s of a rank's products");
  add("--balance-us", step.plan_us, 0, "Of a plan with replicas, beyond the plan");
}

}  // namespace

void add_simulate(CLI::App& app) {
  auto* command = app.add_subcommand("simulate", "How an exchange of thousands of ranks would go");
  command->footer(kFooter);
  auto options = std::make_shared<SimulateOptions>();
  add_size_options(*command, *options);
  add_shape_options(*command, *options);
  add_model_options(*command, *options);
  add_step_options(*command, *options);
  command->callback([options] { run_simulate(*options); });
}

}  // namespace weft::program
