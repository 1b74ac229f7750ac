// SPDX-License-Identifier: Apache-2.0
// `weft info`: what this build contains and what this machine can do. One JSON value holds it all;
// the text is the same value laid out for people.
#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include "cli/ranks.hpp"
#include "core/env.hpp"
#include "core/gpu/devices.hpp"
#include "cuda/transport/gpu_transport.hpp"
#include "measure/facts.hpp"
#include "report/json_text.hpp"
#include "report/table.hpp"
#include "transport/ofi/ofi.hpp"
#include "transport/transport.hpp"

namespace weft::program {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter = R"(Examples:
  weft info
  weft info --json | jq .transports
  weft info --fabric

A transport that cannot be used says why. All sizes in the JSON are bytes.)";

// Memory comes in powers of two.
std::string memory_text(int64_t bytes) {
  static constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) {
    value /= 1024;
  }
  return bytes == 0 ? "none" : fmt::format("{:.4g} {}", value, kUnits[unit]);
}

std::string value_text(const std::string& key, const Json& value) {
  if (value.is_boolean()) {
    return value.get<bool>() ? "yes" : "no";
  }
  if (value.is_number_integer()) {
    const auto number = value.get<int64_t>();
    return key.ends_with("_bytes") ? memory_text(number) : count_text(number);
  }
  if (value.is_array()) {
    std::vector<std::string> parts;
    for (const Json& part : value) {
      parts.push_back(part.get<std::string>());
    }
    return fmt::format("{}", fmt::join(parts, ", "));
  }
  return text_or(value.get<std::string>(), "unknown");
}

// "l1d_bytes" -> "l1d", "usable_cores" -> "usable cores"
std::string name_text(std::string key) {
  if (key.ends_with("_bytes")) {
    key.resize(key.size() - 6);
  }
  std::replace(key.begin(), key.end(), '_', ' ');
  return key;
}

void print_list(const Json& list) {
  if (list.empty()) {
    return;
  }
  std::vector<std::string> header;
  for (const auto& [key, value] : list.front().items()) {
    header.push_back(name_text(key));
  }
  Table table(header);
  for (const Json& entry : list) {
    std::vector<std::string> cells;
    for (const auto& [key, value] : entry.items()) {
      cells.push_back(value_text(key, value));
    }
    table.add_row(cells);
  }
  fmt::print("{}", table.text());
}

// Tables come after what is told by name.
void print_text(const Json& info) {
  for (const auto& [title, section] : info.items()) {
    fmt::print("{}{}\n", title == "weft" ? "" : "\n", title);
    if (section.is_array()) {
      print_list(section);
      continue;
    }
    if (section.empty()) {
      fmt::print("  nothing set\n");
    }
    std::vector<const Json*> tables;
    for (const auto& [key, value] : section.items()) {
      if (value.is_array() && !value.empty() && value.front().is_object()) {
        tables.push_back(&value);
      } else if (!value.is_array() || !value.empty()) {
        const bool is_variable = title == "environment";
        fmt::print("  {:<18} {}\n", is_variable ? key : name_text(key), value_text(key, value));
      }
    }
    for (const Json* table : tables) {
      print_list(*table);
    }
  }
}

// Asks two real ranks: what can be reached depends on how ranks are started and on the system.
std::string obstacle_between_threads(const std::string& name) {
  std::vector<std::string> answers(2);
  run_threads(2, [&](Group& group) {
    answers[static_cast<size_t>(group.rank())] = transport_obstacle(name, group);
  });
  return answers[0];
}

Json transports_json() {
  Json json = Json::array();
  for (const std::string& name : transport_names()) {
    const auto ask = [&](const Group& group) { return transport_obstacle(name, group); };
    json.push_back(
        {{"name", name},
         {"between_processes", text_or(ask_processes(2, ask), "available")},
         {"between_threads", text_or(obstacle_between_threads(name), "available")}}
    );
  }
  return json;
}

// A row for each GPU: how it reaches the memory of each other one.
Json peer_access_json() {
  Json json = Json::array();
  const auto reach = gpu_reach();
  for (size_t from = 0; from < reach.size(); ++from) {
    Json row = {{"gpu", static_cast<int64_t>(from)}};
    for (size_t to = 0; to < reach[from].size(); ++to) {
      row[fmt::format("to_{}", to)] = reach[from][to];
    }
    json.push_back(row);
  }
  return json;
}

Json gpus_json() {
  const GpuList list = list_gpus();
  Json json = {
      {"cuda_runtime", text_or(list.runtime, "none")},
      {"cuda_driver", text_or(list.driver, "none")},
      {"list", Json::array()},
      {"transports", Json::array()}};
  for (const std::string& name : gpu_transport_names()) {
    const std::string obstacle =
        list.gpus.empty() ? list.none_reason : gpu_transport_obstacle(name, 0);
    json["transports"].push_back(
        {{"gpu_transport", name}, {"between_processes", text_or(obstacle, "available")}}
    );
  }
  for (const GpuInfo& gpu : list.gpus) {
    json["list"].push_back(
        {{"name", gpu.name},
         {"capability", fmt::format("{}.{}", gpu.major, gpu.minor)},
         {"multiprocessors", gpu.num_sms},
         {"memory_bytes", gpu.memory_bytes},
         {"l2_bytes", gpu.l2_bytes}}
    );
  }
  if (list.gpus.size() > 1) {
    json["peer_access"] = peer_access_json();
  }
  if (list.gpus.empty()) {
    json["none_because"] = list.none_reason;
  }
  return json;
}

// A row for each provider of libfabric that Weft knows.
Json fabric_json() {
  const FabricReport report = fabric_report();
  Json json = {
      {"library", report.library},
      {"chosen", text_or(report.chosen, "none")},
      {"why", report.chosen.empty() ? "none can be used" : report.why},
      {"bound_to", text_or(report.address, "nothing")},
      {"queues", report.num_queues},
      {"providers", Json::array()}};
  for (const FabricReport::Entry& entry : report.providers) {
    json["providers"].push_back(
        {{"name", entry.provider},
         {"state", entry.state},
         {"fabric", text_or(entry.fabric, "-")},
         {"domain", text_or(entry.domain, "-")},
         {"registration", text_or(entry.memory, "-")},
         {"remark", text_or(entry.remark, "-")}}
    );
  }
  return json;
}

// Variables that change what Weft does. A secret's value is not shown.
Json environment_json() {
  static constexpr std::array kPrefixes = {
      "WEFT_",
      "FI_",
      "OMPI_COMM_WORLD_",
      "SLURM_STEP_",
      "OMP_NUM_THREADS=",
      "OPENBLAS_NUM_THREADS="};
  const Env env = Env::read();
  Json json = Json::object();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('='));
    const auto begins = [&](const char* prefix) { return text.starts_with(prefix); };
    const bool is_ours = env.launcher.contains(name) || std::ranges::any_of(kPrefixes, begins);
    if (is_ours && name.size() < text.size()) {
      json[name] = name == "WEFT_SECRET" ? "(set)" : text.substr(name.size() + 1);
    }
  }
  return json;
}

// All that `weft info` knows. Keys that end in _bytes hold bytes. Forks two processes to try the
// transports: call before starting threads.
Json info_values() {
  return {
      {"weft", build_info()},
      {"transports", transports_json()},
      {"machine", machine_info()},
      {"gpus", gpus_json()},
      {"environment", environment_json()}};
}

}  // namespace

void add_info(CLI::App& app) {
  auto* command = app.add_subcommand("info", "What this build and this machine can do");
  command->footer(kFooter);
  auto as_json = std::make_shared<bool>(false);
  command->add_flag("--json", *as_json, "Print JSON instead of text");
  auto fabric_only = std::make_shared<bool>(false);
  command->add_flag(
      "--fabric", *fabric_only, "Only the network: providers of libfabric, which is chosen and why"
  );
  command->callback([as_json, fabric_only] {
    const Json info = *fabric_only ? Json({{"fabric", fabric_json()}}) : info_values();
    if (*as_json) {
      fmt::print("{}\n", json_text(info));
    } else {
      print_text(info);
    }
  });
}

}  // namespace weft::program
