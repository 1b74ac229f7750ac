// SPDX-License-Identifier: Apache-2.0
// `weft info`: what this build contains and what this machine can do. One JSON value holds it all;
// the text is the same value laid out for people.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "commands.hpp"
#include "info_values.hpp"
#include "json_text.hpp"
#include "table.hpp"

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
  return value.get<std::string>().empty() ? "unknown" : value.get<std::string>();
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
    for (const auto& [key, value] : section.items()) {
      if (value.is_array() && !value.empty() && value.front().is_object()) {
        print_list(value);
      } else if (!value.is_array() || !value.empty()) {
        const bool is_variable = title == "environment";
        fmt::print("  {:<18} {}\n", is_variable ? key : name_text(key), value_text(key, value));
      }
    }
  }
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
    const Json info = *fabric_only ? fabric_values() : info_values();
    if (*as_json) {
      fmt::print("{}\n", json_text(info));
    } else {
      print_text(info);
    }
  });
}

}  // namespace weft::program
