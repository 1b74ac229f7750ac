// SPDX-License-Identifier: Apache-2.0
// `weft simulate`: how an exchange of thousands of ranks would go.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <memory>

#include "choices.hpp"
#include "commands.hpp"
#include "core/atomic_file.hpp"
#include "json_text.hpp"
#include "plan/routing_file.hpp"
#include "progress.hpp"
#include "simulate_calibrate.hpp"
#include "simulate_options.hpp"
#include "simulate_report.hpp"
#include "simulate_source.hpp"

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
  weft simulate                                      16 ranks, domains of 8
  weft simulate --sweep 16,64,256,2304               how it grows
  weft simulate --ranks 2304 --domain 72             domains of 72
  weft simulate --ranks 64 --set card_gbps=100       another card
  weft simulate --ranks 64 --flat                    each row to every remote rank by itself
  weft simulate steps.wrt --step 100 --domain 2      real routing
  weft simulate --ends                               where each resource ends
  weft simulate --calibrate here.json                a model of this machine)";

void set_number(sim::Model& model, const std::string& name, double value) {
  std::string names;
  for (const sim::ModelField& field : sim::model_fields()) {
    if (field.name == name) {
      if (value < field.least) {
        throw CLI::ValidationError(fmt::format("--set {}={} is below {}", name, value, field.least)
        );
      }
      sim::set_field(model, name, value, "--set");
      return;
    }
    names += fmt::format("{}{}", names.empty() ? "" : ", ", field.name);
  }
  throw CLI::ValidationError(fmt::format("--set {} is not one of {}", name, names));
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
    set_number(model, setting.substr(0, equals), value);
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
      options.ranks_per_domain,
      options.is_flat ? "each row to every remote rank by itself"
                      : "a token crosses once per domain"
  );
}

// The only size of a routing file is its own.
std::vector<sim::Simulation> run_on_file(SimulateOptions& options, const sim::Model& model) {
  const RoutingMoment moment = read_moment(options.file, options.choice);
  options.num_experts = moment.num_experts;
  options.made_up.topk = moment.routes.front().topk;
  options.made_up.num_tokens = 0;
  for (const RouteTable& table : moment.routes) {
    options.made_up.num_tokens = std::max(options.made_up.num_tokens, table.num_tokens);
  }
  options.sizes = {static_cast<int>(moment.routes.size())};
  const sim::Scenario scenario = make_scenario(options, options.sizes.front());
  std::vector<sim::Simulation> done;
  done.push_back(sim::simulate(scenario, model, moment.routes));
  return done;
}

std::vector<sim::Simulation> run_made_up(const SimulateOptions& options, const sim::Model& model) {
  Progress progress("simulate");
  double total = 0;
  for (const int size : options.sizes) {
    static_cast<void>(make_scenario(options, size));  // bad usage is told before the work
    total += size;
  }
  std::vector<sim::Simulation> done;
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
    const std::vector<RouteTable> tables = make_up_tables(spec, part(0, 0.5));
    done.push_back(sim::simulate(scenario, model, tables, part(0.5, 0.5)));
    // What each rank tells all others takes most of the memory and is not shown.
    done.back().traffic.counts = {};
    before += size;
  }
  return done;
}

void run_simulate(SimulateOptions& options) {
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
    const sim::Scenario scenario = make_scenario(options, options.ranks_per_domain);
    fmt::print(
        "{}\n{}",
        headline(options, scenario, model.name.c_str()),
        ends_table(scenario, model, options.budget_bytes).text()
    );
    return;
  }
  const std::vector<sim::Simulation> done =
      options.file.empty() ? run_made_up(options, model) : run_on_file(options, model);
  if (!options.json_path.empty()) {
    write_file_atomically(options.json_path, json_text(simulation_json(done, model)) + "\n");
  }
  fmt::print(
      "{}{}",
      headline(options, done.front().scenario, model.name.c_str()),
      simulation_text(done, options.tables)
  );
}

void add_routing_options(CLI::App& command, SimulateOptions& options) {
  auto* file =
      command.add_option("file", options.file, "Routing file; without it routing is made up");
  const auto only_made_up = [&](CLI::Option* option) {
    option->group("Made-up routing")->capture_default_str()->excludes(file);
  };
  only_made_up(command
                   .add_option("--ranks,--sweep", options.sizes, "Ranks; several: a line for each")
                   ->delimiter(',')
                   ->allow_extra_args(false)
                   ->check(CLI::Range(1, sim::kMostRanks)));
  auto& made_up = options.made_up;
  only_made_up(command.add_option("--tokens", made_up.num_tokens, "Tokens of each rank")
                   ->check(CLI::Range(int64_t{0}, int64_t{1} << 20)));
  only_made_up(
      command
          .add_option(
              "--experts", options.num_experts, "Experts; rounded up to a multiple of the ranks"
          )
          ->check(CLI::Range(1, 65536))
  );
  only_made_up(command.add_option("--topk", made_up.topk, "Experts of a token")
                   ->check(CLI::Range(1, kMaxTopk)));
  only_made_up(
      command.add_option("--skew", made_up.skew, "Popularity of the n-th expert is 1 / n^skew")
          ->check(CLI::Range(0.0, 8.0))
          ->check(Finite())
  );
  only_made_up(command.add_option("--seed", made_up.seed, "Seed"));
  command.add_option("--step", options.choice.step, "Step of a routing file (default: its last)")
      ->group("Routing file")
      ->needs(file);
  command.add_option("--layer", options.choice.layer, "Layer of that step (default: its first)")
      ->group("Routing file")
      ->needs(file);
}

void add_shape_options(CLI::App& command, SimulateOptions& options) {
  command.add_option("--domain", options.ranks_per_domain, "Ranks of a domain")
      ->check(CLI::Range(1, sim::kMostRanks))
      ->capture_default_str();
  command.add_option("--hidden", options.hidden, "Elements of a row")
      ->check(CLI::Range(int64_t{8}, int64_t{1} << 20))
      ->capture_default_str();
  command.add_option("--dtype", options.dtype, "Type of the elements")
      ->transform(dtype_choice())
      ->default_str("bf16");
  command.add_option("--pad", options.pad_multiple, "Round each expert's rows up to a multiple")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command.add_flag("--flat", options.is_flat, "Send each row to every remote rank by itself");
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
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 50))
      ->needs(ends)
      ->capture_default_str();
  command.add_option("--tables", options.tables, "Print these only")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember(simulation_tables()))
      ->default_str("all");
  command.add_option("--json", options.json_path, "Write every number here");
}

}  // namespace

sim::Scenario make_scenario(const SimulateOptions& options, int num_ranks) {
  const sim::Scenario scenario = {
      .num_ranks = num_ranks,
      .ranks_per_domain = std::min(options.ranks_per_domain, num_ranks),
      .num_experts = (options.num_experts + num_ranks - 1) / num_ranks * num_ranks,
      .topk = options.made_up.topk,
      .max_tokens = options.made_up.num_tokens,
      .row_bytes = options.hidden * dtype_bytes(options.dtype),
      .pad_multiple = options.pad_multiple,
      .is_flat = options.is_flat};
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

void add_simulate(CLI::App& app) {
  auto* command = app.add_subcommand("simulate", "How an exchange of thousands of ranks would go");
  command->footer(kFooter);
  auto options = std::make_shared<SimulateOptions>();
  add_routing_options(*command, *options);
  add_shape_options(*command, *options);
  add_model_options(*command, *options);
  command->callback([options] { run_simulate(*options); });
}

}  // namespace weft::program
