// SPDX-License-Identifier: Apache-2.0
#include "core/log.hpp"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <array>

#include "core/env.hpp"
#include "core/printable.hpp"
#include "weft/error.hpp"

namespace weft {
namespace {

thread_local std::string t_speaker;

// The levels of spdlog, by LogLevel.
constexpr std::array<spdlog::level::level_enum, 5> kSpdLevels = {
    spdlog::level::debug,
    spdlog::level::info,
    spdlog::level::warn,
    spdlog::level::err,
    spdlog::level::off,
};

spdlog::level::level_enum spd_level(LogLevel level) {
  return kSpdLevels[static_cast<size_t>(level)];
}

// A wrong WEFT_LOG is reported by the first group; logging must not throw.
LogLevel level_from_env() {
  try {
    return Env::read().log_level;
  } catch (const Error&) {
    return LogLevel::kWarn;
  }
}

spdlog::logger& logger() {
  static const auto logger = [] {
    auto made =
        std::make_shared<spdlog::logger>("weft", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%H:%M:%S.%e weft %l %v");
    made->set_level(spd_level(level_from_env()));
    return made;
  }();
  return *logger;
}

}  // namespace

void set_log_rank(int rank, int num_ranks) {
  t_speaker = fmt::format("[rank {}/{}] ", rank, num_ranks);
}

void set_log_level(LogLevel level) {
  logger().set_level(spd_level(level));
}

bool is_logged(LogLevel level) {
  return logger().should_log(spd_level(level));
}

void write_log(LogLevel level, const std::string& text) {
  logger().log(spd_level(level), "{}{}", t_speaker, printable(text));
}

}  // namespace weft
