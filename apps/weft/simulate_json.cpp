// SPDX-License-Identifier: Apache-2.0
// Every number of a simulation under the name that it has in the code.
#include <cmath>

#include "simulate_report.hpp"

namespace weft::program {
namespace {

using Json = nlohmann::ordered_json;
using sim::RankTraffic;

double rounded(double us) {
  return std::round(us * 1e3) / 1e3;
}

Json traffic_json(const RankTraffic& rank) {
  return {
      {"num_rows", rank.num_rows},
      {"routes", rank.routes},
      {"arrivals", rank.arrivals},
      {"link_out", rank.link_out},
      {"link_in", rank.link_in},
      {"forwarded", rank.forwarded},
      {"card_out", rank.card_out},
      {"card_in", rank.card_in},
      {"card_out_per_rank", rank.card_out_per_rank},
      {"card_out_per_route", rank.card_out_per_route},
      {"messages_out", rank.messages_out},
      {"dispatch_signals", rank.dispatch_signals},
      {"dispatch_raises", rank.dispatch_raises},
      {"combine_signals", rank.combine_signals},
      {"combine_raises", rank.combine_raises}};
}

Json memory_json(const sim::Memory& memory) {
  return {
      {"output", memory.output},
      {"carrier", memory.carrier},
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
      {"words_by_carrier_us", rounded(control.words_by_carrier_us)},
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

}  // namespace

Json simulation_json(std::span<const sim::Simulation> sizes, const sim::Model& model) {
  Json json = {{"model", Json::parse(sim::model_json(model))}, {"sizes", Json::array()}};
  for (const sim::Simulation& one : sizes) {
    json["sizes"].push_back(size_json(one));
  }
  return json;
}

}  // namespace weft::program
