// SPDX-License-Identifier: Apache-2.0
// Where each resource ends: the largest group that fits its bound, by the formulas of the executors
// as they are.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "core/peer_address.hpp"
#include "simulate_report.hpp"
#include "transport/transport.hpp"

namespace weft::program {
namespace {

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

Table ends_table(const sim::Scenario& scenario, const sim::Model& model, int64_t budget_bytes) {
  const auto budget = static_cast<uint64_t>(budget_bytes);
  const auto memory = [&](int ranks) { return sim::reserved_memory(resized(scenario, ranks)); };
  const auto control = [&](int ranks) {
    return sim::control_cost(resized(scenario, ranks), model, memory(ranks));
  };
  const std::string room = bytes_text(static_cast<double>(budget_bytes));
  const std::string patience = fmt::format("{:.0f} us", kPatienceUs);
  const int64_t most_rows = std::numeric_limits<int32_t>::max();
  Table table({"resource", "bound", "ranks"});
  table.add_row({"GPUs that map each other", "a table in the code", count_text(kMaxDomainRanks)});
  table.add_row({"GPU: control region and one plan", room, most_ranks([&](int ranks) {
                   return memory(ranks).gpu.control() + memory(ranks).gpu.plan <= budget;
                 })});
  table.add_row({"GPU: control region alone", room, most_ranks([&](int ranks) {
                   return memory(ranks).gpu.control() <= budget;
                 })});
  table.add_row({"CPU: control region", room, most_ranks([&](int ranks) {
                   return memory(ranks).cpu.control() <= budget;
                 })});
  table.add_row({"CPU: control region without records", room, most_ranks([&](int ranks) {
                   return memory(ranks).cpu.words <= budget;
                 })});
  table.add_row({"words of a call, one for each rank", patience, most_ranks([&](int ranks) {
                   return control(ranks).words_us <= kPatienceUs;
                 })});
  table.add_row({"words of a call, one for each domain", patience, most_ranks([&](int ranks) {
                   return control(ranks).words_by_carrier_us <= kPatienceUs;
                 })});
  table.add_row({"counts of a plan, to each rank", patience, most_ranks([&](int ranks) {
                   return control(ranks).plan_words_us <= kPatienceUs;
                 })});
  table.add_row({"one region's address, from rank 0 to all", room, most_ranks([&](int ranks) {
                   return uint64_t{sizeof(RegionRef)} * static_cast<uint64_t>(ranks) *
                              static_cast<uint64_t>(ranks - 1) <=
                          budget;
                 })});
  table.add_row({"slots, should all routes meet on a rank", "2^31", most_ranks([&](int ranks) {
                   return scenario.max_tokens * scenario.topk * ranks <= most_rows;
                 })});
  return table;
}

}  // namespace weft::program
