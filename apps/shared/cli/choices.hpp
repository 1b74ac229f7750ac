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
#include "weft/exchange.hpp"
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

// A number above zero.
class Positive : public CLI::Validator {
 public:
  Positive() {
    func_ = [](const std::string& word) {
      double value = 0;
      const bool is_good = CLI::detail::lexical_cast(word, value) && value > 0;
      return is_good ? std::string() : word + " is not a number above zero";
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
    const auto bounds = fmt::format("number from {} to {}", least, most);
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

[[nodiscard]] inline Choice<DType> dtype_choice() {
  return {
      {{"bf16", DType::kBFloat16},
       {"bfloat16", DType::kBFloat16},
       {"fp16", DType::kFloat16},
       {"float16", DType::kFloat16},
       {"fp32", DType::kFloat32},
       {"float32", DType::kFloat32}},
      "bf16|fp16|fp32"};
}

[[nodiscard]] inline Choice<Layout> layout_choice() {
  return {
      {{"rank_major", Layout::kRankMajor},
       {"expert_major", Layout::kExpertMajor},
       {"expert_strided", Layout::kExpertStrided}},
      "rank_major|expert_major|expert_strided"};
}

[[nodiscard]] inline Choice<Mover> mover_choice() {
  return {
      {{"auto", Mover::kAuto}, {"vector", Mover::kVector}, {"bulk", Mover::kBulk}},
      "auto|vector|bulk"};
}

[[nodiscard]] inline Choice<CopyEngines> copies_choice() {
  return {
      {{"auto", CopyEngines::kAuto},
       {"never", CopyEngines::kNever},
       {"always", CopyEngines::kAlways}},
      "auto|never|always"};
}

}  // namespace weft::program
