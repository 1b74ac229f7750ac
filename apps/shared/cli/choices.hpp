// SPDX-License-Identifier: Apache-2.0
// Words on the command line that stand for values of the library.
#pragma once

#include <CLI/CLI.hpp>

#include <cmath>
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

// CLI::Range lets NaN pass.
class Finite : public CLI::Validator {
 public:
  Finite() {
    func_ = [](const std::string& word) {
      double value = 0;
      const bool is_good = CLI::detail::lexical_cast(word, value) && std::isfinite(value);
      return is_good ? std::string() : word + " is not a finite number";
    };
  }
};

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
  return add_value(command, name, value, text)->check(CLI::Range(least, most));
}
// --device, of a command that can use GPUs.
inline void add_device_word(CLI::App& command, std::string& word) {
  add_value(command, "--device", word, "auto, cpu or cuda; auto: GPUs if there are any")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
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
