// SPDX-License-Identifier: Apache-2.0
// `weft check`: the exchange against the slow reference, on this machine.
#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "check/case.hpp"
#include "cli/choices.hpp"
#include "cli/progress.hpp"
#include "cli/ranks.hpp"
#include "core/check.hpp"
#include "report/table.hpp"
#include "transport/transport.hpp"
#include "weft/error.hpp"

namespace weft::program {
namespace {

struct CheckOptions {
  RankOptions ranks = {};
  CheckSettings settings = {};
  bool is_quick = false;
  uint64_t seed = 1;
  std::string only = {};
};

constexpr const char* kFooter =
    R"(Every case runs plan, dispatch and combine and compares every byte with a slow single-threaded
reference; the first difference is printed with its rank, token, k and element.
Exit code 1 if anything differs.

Examples:
  weft check --quick                      a few seconds, four ranks
  weft check --ranks 8 --transport shm    1, 2, 3, 4 and 8 ranks over shared memory
  weft check --threads                    ranks as threads of one process
  weft check --only "byte, padded"        a failure once more
  weft check --device cpu                 not on the GPUs that are there)";

struct Failure {
  std::string name;
  std::string text;
  int num_more = 0;  // cases of which the text is the same
};

std::string name_of(const CheckCase& check_case) {
  return check_case.row + ", " + check_case.column;
}

// Picks the cases whose name holds the text.
std::vector<CheckCase> pick(std::vector<CheckCase> cases, const std::string& only) {
  std::erase_if(cases, [&](const CheckCase& check_case) {
    return name_of(check_case).find(only) == std::string::npos;
  });
  return cases;
}

void append(const std::vector<CheckCase>& more, std::vector<CheckCase>& cases) {
  cases.insert(cases.end(), more.begin(), more.end());
}

struct Cases {
  std::vector<CheckCase> matrix;
  std::vector<CheckCase> hard;
};

Cases cases_of(const CheckOptions& options, int num_ranks) {
  auto matrix = matrix_cases(num_ranks, options.is_quick, options.seed);
  auto hard = hard_cases(num_ranks, options.is_quick, options.seed);
  if (options.settings.device.is_on_gpu()) {
    const auto copied = by_copy_engines(matrix);
    append(with_vector_moves(matrix), matrix);
    append(copied, matrix);
    append(by_copy_engines(hard), hard);
  }
  return {pick(std::move(matrix), options.only), pick(std::move(hard), options.only)};
}

// Returns what the first rank that found a difference says, the same on every rank; empty if none
// did.
std::string first_failure(const Group& group, const std::string& mine) {
  for (const Bytes& text : group.all_gather(std::as_bytes(std::span(mine)))) {
    if (!text.empty()) {
      return {reinterpret_cast<const char*>(text.data()), text.size()};
    }
  }
  return {};
}

// A case per cell, "-" where a combination does not exist.
class ResultTable {
 public:
  explicit ResultTable(const std::string& title) : header_({title}) {}

  void add(const CheckCase& check_case, bool is_good) {
    if (std::ranges::find(header_, check_case.column) == header_.end()) {
      header_.push_back(check_case.column);
    }
    cells_[check_case.row][check_case.column] = is_good ? "ok" : "FAIL";
  }

  [[nodiscard]] bool is_empty() const { return cells_.empty(); }

  [[nodiscard]] std::string text() const {
    Table table(header_);
    for (const auto& [row, results] : cells_.items()) {
      std::vector<std::string> cells = {row};
      for (size_t i = 1; i < header_.size(); ++i) {
        cells.push_back(results.value(header_[i], "-"));
      }
      table.add_row(std::move(cells));
    }
    return table.text();
  }

 private:
  std::vector<std::string> header_;
  nlohmann::ordered_json cells_;  // by row and column
};

class CheckRun {
 public:
  CheckRun(const Group& group, const CheckOptions& options)
      : group_(group), options_(options), progress_("check", group.rank() == 0) {}

  int run() {
    const CheckSettings& settings = options_.settings;
    const std::string obstacle =
        settings.device.is_on_gpu() ? "" : transport_obstacle(settings.transport, group_);
    WEFT_CHECK(
        (Context{group_.rank(), group_.num_ranks()}),
        obstacle.empty(),
        ErrorCode::kNotAvailable,
        "check: transport {} cannot join these ranks: {}",
        settings.transport,
        obstacle
    );
    const auto [matrix, hard] = cases_of(options_, group_.num_ranks());
    num_cases_ = matrix.size() + hard.size();
    ResultTable matrix_table("layout and dtype");
    ResultTable hard_table("hard case");
    run_all(matrix, matrix_table);
    run_all(hard, hard_table);
    if (group_.rank() == 0) {
      print(matrix_table, hard_table);
    }
    return failures_.empty() ? 0 : 1;
  }

 private:
  void run_all(const std::vector<CheckCase>& cases, ResultTable& table) {
    std::optional<SharedExchange> shared;
    for (const CheckCase& check_case : cases) {
      progress_.update(static_cast<double>(num_done_++) / static_cast<double>(num_cases_));
      std::string mine;
      try {
        if (const auto difference = run_case(group_, check_case, options_.settings, shared)) {
          mine = fmt::format("{} [rank {}/{}]", *difference, group_.rank(), group_.num_ranks());
        }
      } catch (const TimeoutError&) {
        throw;  // the rest would wait as long again, each
      } catch (const Error& error) {
        mine = error.what();
      }
      const std::string failure = first_failure(group_, mine);
      table.add(check_case, failure.empty());
      if (!failure.empty()) {
        shared.reset();
        note(name_of(check_case), failure);
      }
    }
  }

  void note(const std::string& name, const std::string& text) {
    ++num_failed_;
    for (Failure& failure : failures_) {
      if (failure.text == text) {
        ++failure.num_more;
        return;
      }
    }
    failures_.push_back({name, text});
  }

  // "4 ranks", or "4 ranks on 1 GPU".
  [[nodiscard]] std::string who() const {
    const int n = group_.num_ranks();
    const int num_gpus = std::min(n, options_.settings.device.num_gpus);
    return num_gpus == 0
               ? fmt::format("{} ranks", n)
               : fmt::format("{} ranks on {} GPU{}", n, num_gpus, num_gpus == 1 ? "" : "s");
  }

  void print(const ResultTable& matrix, const ResultTable& hard) const {
    fmt::print("{}\n", who());
    for (const ResultTable* table : {&matrix, &hard}) {
      if (!table->is_empty()) {
        fmt::print("\n{}", table->text());
      }
    }
    fmt::print("\n");
    for (const Failure& failure : failures_) {
      const auto more =
          failure.num_more == 0 ? "" : fmt::format(" (and {} more cases)", failure.num_more);
      fmt::print("FAIL {}{}: {}\n", failure.name, more, failure.text);
    }
    fmt::print(
        "{} of {} cases equal the reference (seed {})\n\n",
        num_cases_ - num_failed_,
        num_cases_,
        options_.seed
    );
  }

  const Group& group_;
  const CheckOptions& options_;
  Progress progress_;
  std::vector<Failure> failures_;
  size_t num_cases_ = 0;
  size_t num_done_ = 0;
  size_t num_failed_ = 0;
};

void run_check(const CheckOptions& options) {
  std::set<int> group_sizes = {options.ranks.num_ranks};
  if (!options.is_quick && !Group::is_launched()) {
    for (int size = 1; size < std::min(options.ranks.num_ranks, 5); ++size) {
      group_sizes.insert(size);
    }
  }
  for (const int size : group_sizes) {
    const RankOptions ranks = with_ranks(options.ranks, options.settings.device, size);
    run_ranks(ranks, [&](Group& group) { return CheckRun(group, options).run(); });
  }
}

}  // namespace

void add_check(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("check", "Compare the exchange with the slow reference on this machine");
  auto options = std::make_shared<CheckOptions>();
  command->footer(kFooter);
  add_rank_options(*command, options->ranks);
  add_device_option(*command, options->settings.device);
  command->add_flag("--quick", options->is_quick, "Small inputs, one group size: a few seconds");
  add_transport_option(*command, options->settings.transport);
  command->add_option("--threads-per-rank", options->settings.num_threads, "Workers of each rank")
      ->check(Within(0, kMostThreads))
      ->default_str("the cores shared among the ranks");
  command->add_option(
      "--only", options->only, "Cases with this in their names, as tables and errors show"
  );
  add_value(*command, "--seed", options->seed, "Of routing and rows")->check(any_seed());
  command->callback([options, command] {
    choose_device(options->settings.device, options->settings.transport);
    choose_ranks(*command, options->settings.device, options->ranks);
    const auto [matrix, hard] = cases_of(*options, options->ranks.num_ranks);
    if (matrix.empty() && hard.empty()) {
      throw CLI::ValidationError("--only", fmt::format("no case is called \"{}\"", options->only));
    }
    run_check(*options);
  });
}

}  // namespace weft::program
