// SPDX-License-Identifier: Apache-2.0
#include "transport/faulty/fault_plan.hpp"

#include <algorithm>
#include <cstdlib>

#include "core/check.hpp"

namespace weft {
namespace {

constexpr std::string_view kPrefix = "faulty:";
constexpr double kMostExact = 9007199254740992.0;  // 2^53: above, doubles skip integers

// The part before `separator`; `text` keeps what is behind it.
std::string_view take_until(std::string_view& text, char separator) {
  const std::string_view part = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(part.size() + 1, text.size()));
  return part;
}

void set_value(FaultPlan& plan, std::string_view key, std::string_view text) {
  const std::string digits(text);
  char* end = nullptr;
  const double value = std::strtod(digits.c_str(), &end);
  WEFT_CHECK_ARG(
      Context{},
      !digits.empty() && *end == '\0' && value >= 0,
      "open(faulty): {} = \"{}\" is not a number from 0 on",
      key,
      text
  );
  WEFT_CHECK_ARG(Context{}, value <= kMostExact, "open(faulty): {} = {} is too large", key, value);
  const auto set_probability = [&](double& place) {
    WEFT_CHECK_ARG(
        Context{}, value <= 1, "open(faulty): {} = {} is no probability (at most 1)", key, value
    );
    place = value;
  };
  if (key == "seed") {
    plan.seed = static_cast<uint64_t>(value);
  } else if (key == "drop") {
    set_probability(plan.drop);
  } else if (key == "delay") {
    set_probability(plan.delay);
  } else if (key == "fail") {
    set_probability(plan.fail);
  } else if (key == "reorder") {
    set_probability(plan.reorder);
  } else if (key == "hold_us") {
    plan.hold = std::chrono::microseconds(static_cast<int64_t>(value));
  } else if (key == "hide_mapped") {
    plan.hide_mapped = value != 0;
  } else {
    raise_error(
        ErrorCode::kInvalidArgument,
        Context{},
        fmt::format(
            "open(faulty): unknown key \"{}\" (seed, drop, delay, fail, reorder, hold_us, "
            "hide_mapped)",
            key
        )
    );
  }
}

}  // namespace

std::optional<FaultyName> parse_faulty_name(std::string_view name) {
  if (!name.starts_with(kPrefix)) {
    return std::nullopt;
  }
  name.remove_prefix(kPrefix.size());
  FaultyName parsed;
  parsed.inner = take_until(name, '?');
  while (!name.empty()) {
    std::string_view value = take_until(name, '&');
    const std::string_view key = take_until(value, '=');
    set_value(parsed.plan, key, value);
  }
  return parsed;
}

}  // namespace weft
