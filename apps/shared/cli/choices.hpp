// SPDX-License-Identifier: Apache-2.0
// Words on the command line that stand for values of the library.
#pragma once

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <limits>
#include <map>
#include <string>
#include <type_traits>

#include "core/env.hpp"
#include "weft/plan.hpp"
#include "weft/tensor.hpp"

namespace weft::program {

// A wrong word is bad usage; the message lists the right ones.
template <class T>
class Choice : public CLI::Validator {
 public:
  Choice(std::map<std::string, T> values, const std::string& listed) {
    desc_function_ = [listed] { return listed; };
    func_ = [values = std::move(values), listed](std::string& word) {
      const auto found = values.find(word);
      if (found == values.end()) {
        return "\"" + word + "\" is not one of " + listed;
      }
      word = std::to_string(static_cast<int>(found->second));
      return std::string();
    };
  }
};

// The largest numbers that commands take, so that a slip is an error and no hour of work, nor all
// of the memory.
inline constexpr int kMostRanks = 64;            // of one machine
inline constexpr int kMostThreads = 256;         // of a rank
inline constexpr int64_t kMostTokens = 1 << 22;  // of a rank
inline constexpr int kMostExperts = 1 << 16;
inline constexpr int64_t kMostHidden = 1 << 20;
inline constexpr int64_t kMostPad = 1 << 20;
inline constexpr double kMostSkew = 8;
inline constexpr int kMostSamples = 1'000'000;

// A number from `least` to `most`. CLI::Range lets NaN pass, and -1 for a number without a sign.
template <class T>
class Within : public CLI::Validator {
 public:
  Within(T least, T most) {
    std::string bounds = fmt::format("number from {} to {}", least, most);
    desc_function_ = [bounds] { return bounds; };
    func_ = [least, most, bounds](const std::string& word) {
      const auto value = parse_number<T>(word);
      const bool is_good = value && *value >= least && *value <= most;
      return is_good ? std::string() : fmt::format("{} is not a {}", word, bounds);
    };
  }
};

inline Within<uint64_t> any_seed() {
  return {0, std::numeric_limits<uint64_t>::max()};
}
inline Within<int64_t> at_least_one() {
  return {1, std::numeric_limits<int64_t>::max()};
}

// An option whose default is shown; a number has to be from `least` to `most`.
template <class T>
CLI::Option* add_value(CLI::App& command, const char* name, T& value, const char* text) {
  return command.add_option(name, value, text)->capture_default_str();
}
template <class T>
CLI::Option* add_number(
    CLI::App& command,
    const char* name,
    T& value,
    std::type_identity_t<T> least,
    std::type_identity_t<T> most,
    const char* text
) {
  return add_value(command, name, value, text)->check(Within(least, most));
}

// An option of made-up routing, which a file of routing excludes.
template <class T>
CLI::Option* add_made_up(
    CLI::App& command, CLI::Option* file, const char* name, T& value, const char* text
) {
  auto* option = command.add_option(name, value, text);
  return option->group("Made-up routing")->capture_default_str()->excludes(file);
}

// Adds options for what rows are, and for what the number of an expert's rows is rounded up to.
inline void add_row_options(CLI::App& command, int64_t& hidden, DType& dtype, int64_t& pad) {
  add_number(command, "--hidden", hidden, 1, kMostHidden, "Elements of a row");
  command.add_option("--dtype", dtype, "Type of the elements")
      ->transform(Choice<DType>(
          {{"bf16", DType::kBFloat16},
           {"bfloat16", DType::kBFloat16},
           {"fp16", DType::kFloat16},
           {"float16", DType::kFloat16},
           {"fp32", DType::kFloat32},
           {"float32", DType::kFloat32}},
          "bf16|fp16|fp32"
      ))
      ->default_str("bf16");
  add_number(command, "--pad", pad, 1, kMostPad, "Rows of an expert are a multiple of this");
}

inline void add_layout_option(CLI::App& command, Layout& layout) {
  command.add_option("--layout", layout, "Rule that gives each route its slot")
      ->transform(Choice<Layout>(
          {{"rank_major", Layout::kRankMajor},
           {"expert_major", Layout::kExpertMajor},
           {"expert_strided", Layout::kExpertStrided}},
          "rank_major|expert_major|expert_strided"
      ))
      ->default_str("expert_major");
}

inline void add_order_option(CLI::App& command, SumOrder& order) {
  command.add_option("--order", order, "In which combine adds a token's rows")
      ->transform(
          Choice<SumOrder>({{"rank", SumOrder::kRank}, {"topk", SumOrder::kTopk}}, "rank|topk")
      )
      ->default_str("rank");
}

}  // namespace weft::program
