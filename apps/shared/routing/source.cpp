// SPDX-License-Identifier: Apache-2.0
#include "routing/source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <thread>
#include <utility>

#include "cli/choices.hpp"
#include "core/available_memory.hpp"
#include "core/check.hpp"
#include "measure/measure.hpp"
#include "plan/file/routing_file.hpp"
#include "plan/random_routing.hpp"
#include "routing/report.hpp"

namespace weft::program {
namespace {

constexpr int64_t kMostSampled = 400;  // records read for the overview

struct LayerSums {
  int64_t num_records = 0;
  double routes = 0;
  Imbalance mean;
  Imbalance worst;
};

bool is_chosen(const RoutingRecord& record, const RecordChoice& choice, int64_t last_step) {
  return record.step == choice.step.value_or(last_step) &&
         (!choice.layer || record.layer == *choice.layer);
}

}  // namespace

void add_made_up_options(CLI::App& command, CLI::Option* file, MadeUpRouting& made_up) {
  const auto add = [&](const char* name, auto& value, const char* text) {
    return add_made_up(command, file, name, value, text);
  };
  add("--tokens", made_up.num_tokens, "Tokens of each rank")
      ->check(Within(int64_t{0}, kMostTokens));
  add("--topk", made_up.topk, "Experts of a token")->check(Within(1, kMaxTopk));
  add("--skew", made_up.skew, "Popularity of the n-th expert is 1 / n^skew")
      ->check(Within(0.0, kMostSkew));
}

CLI::Option* add_routing_options(
    CLI::App& command, std::string& file, MadeUpRouting& made_up, RecordChoice& choice
) {
  auto* option = command.add_option("file", file, "Routing file; without it routing is made up");
  add_made_up_options(command, option, made_up);
  add_made_up(command, option, "--seed", made_up.seed, "Seed")->check(any_seed());
  command.add_option("--step", choice.step, "Step of a routing file (default: its last)")
      ->group("Routing file")
      ->needs(option);
  command.add_option("--layer", choice.layer, "Layer of that step (default: its first)")
      ->group("Routing file")
      ->needs(option);
  return option;
}

void check_made_up(const MadeUpRouting& spec) {
  if (spec.num_experts % spec.num_ranks != 0) {
    throw CLI::ValidationError(
        fmt::format("--experts {} is not divisible by --ranks {}", spec.num_experts, spec.num_ranks)
    );
  }
  if (spec.topk > spec.num_experts) {
    throw CLI::ValidationError(
        fmt::format("--topk {} is more than --experts {}", spec.topk, spec.num_experts)
    );
  }
}

RoutingMoment make_up_routing(const MadeUpRouting& spec, const std::function<void(double)>& told) {
  const auto num_routes = static_cast<uint64_t>(spec.num_ranks * spec.num_tokens * spec.topk);
  check_available(num_routes * sizeof(int32_t), "made-up routing");
  RoutingMoment moment;
  moment.name = fmt::format(
      "Made-up routing: {} tokens a rank, skew {}, seed {}", spec.num_tokens, spec.skew, spec.seed
  );
  moment.num_experts = spec.num_experts;
  moment.routes.resize(static_cast<size_t>(spec.num_ranks));
  const RandomRouting random = {
      .num_tokens = spec.num_tokens,
      .num_experts = spec.num_experts,
      .topk = spec.topk,
      .popularity = spec.skew > 0 ? Popularity::kZipf : Popularity::kUniform,
      .zipf_exponent = spec.skew,
      .with_weights = false,
      .seed = spec.seed};
  // Faults of the routing as a whole are thrown here, not on a thread.
  moment.routes[0] = random_routing(random, 0);
  std::atomic<int> next_rank = 1;
  const auto work = [&](bool tells) {
    for (int rank = next_rank++; rank < spec.num_ranks; rank = next_rank++) {
      moment.routes[static_cast<size_t>(rank)] = random_routing(random, rank);
      if (tells) {
        told(static_cast<double>(rank) / spec.num_ranks);
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (int i = 1; i < std::min(num_usable_cores(), spec.num_ranks); ++i) {
      helpers.emplace_back(work, false);
    }
    work(true);
  }
  return moment;
}

// Steps ascend in a file, so the search begins at its end.
RoutingMoment read_moment(const std::string& path, const RecordChoice& choice) {
  RoutingFileReader reader(path);
  WEFT_CHECK(
      Context{}, reader.num_records() > 0, ErrorCode::kFile, "read: {} has no records", path
  );
  const int64_t last = reader.num_records() - 1;
  const int64_t last_step = reader.read(last).step;
  std::optional<RoutingRecord> found;
  for (int64_t i = last; i >= 0; --i) {
    RoutingRecord record = reader.read(i);
    if (is_chosen(record, choice, last_step)) {
      found = std::move(record);
    } else if (found) {
      break;
    }
  }
  WEFT_CHECK_ARG(
      Context{},
      found.has_value(),
      "read: {} has no record of step {}{} (steps {} to {})",
      path,
      choice.step.value_or(last_step),
      choice.layer ? fmt::format(", layer {}", *choice.layer) : "",
      reader.read(0).step,
      last_step
  );
  return {
      fmt::format("{}, step {}, layer {}", path, found->step, found->layer),
      reader.shape().num_experts,
      std::move(found->routes)};
}

Table routing_file_table(const std::string& path) {
  RoutingFileReader reader(path);
  std::map<int, LayerSums> layers;
  const int64_t stride = std::max<int64_t>(1, reader.num_records() / kMostSampled);
  // An odd stride meets every layer of the usual even or odd number of them.
  for (int64_t i = 0; i < reader.num_records(); i += stride) {
    const RoutingRecord record = reader.read(i);
    std::vector<int64_t> counts(static_cast<size_t>(reader.shape().num_experts), 0);
    for (const RouteTable& table : record.routes) {
      const auto more = routes_of(table, reader.shape().num_experts);
      std::ranges::transform(counts, more, counts.begin(), std::plus<>());
    }
    const Imbalance one = imbalance_of(counts, static_cast<int>(record.routes.size()));
    LayerSums& layer = layers[record.layer];
    ++layer.num_records;
    layer.routes += std::reduce(counts.begin(), counts.end(), 0.0);
    layer.mean.of_experts += one.of_experts;
    layer.mean.of_ranks += one.of_ranks;
    layer.worst.of_experts = std::max(layer.worst.of_experts, one.of_experts);
    layer.worst.of_ranks = std::max(layer.worst.of_ranks, one.of_ranks);
  }
  const auto records = stride > 1 ? "records (sample)" : "records";
  Table table(columns(
      fmt::format("layer|{}|routes each|experts mean|experts worst|ranks mean|ranks worst", records)
  ));
  for (const auto& [layer, sums] : layers) {
    const auto count = static_cast<double>(sums.num_records);
    table.add_row(
        {fmt::format("{}", layer),
         count_text(sums.num_records),
         count_text(static_cast<int64_t>(sums.routes / count)),
         fmt::format("{:.2f}", sums.mean.of_experts / count),
         fmt::format("{:.2f}", sums.worst.of_experts),
         fmt::format("{:.2f}", sums.mean.of_ranks / count),
         fmt::format("{:.2f}", sums.worst.of_ranks)}
    );
  }
  return table;
}

bool is_saved_plan(const std::string& path) {
  WEFT_CHECK(
      Context{},
      !std::filesystem::exists(path) || std::filesystem::is_regular_file(path),
      ErrorCode::kFile,
      "read: {} is not a file of a disk, and has to be read more than once",
      path
  );
  std::ifstream file(path, std::ios::binary);
  char first = 0;
  return file.get(first) && first == '{';
}

}  // namespace weft::program
