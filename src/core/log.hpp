// SPDX-License-Identifier: Apache-2.0
// Messages for people, on stderr: `12:00:01.123 weft warning [rank 2/8] text`. WEFT_LOG sets the
// level. An error is thrown, not logged.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>

namespace weft {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarn, kError, kOff };

// Sets the rank that this thread's messages name from now on.
void set_log_rank(int rank, int num_ranks);
void set_log_level(LogLevel level);

[[nodiscard]] bool is_logged(LogLevel level);
void write_log(LogLevel level, const std::string& text);

// Text is formatted only if it will be shown.
template <class... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (is_logged(level)) {
    write_log(level, fmt::format(format, std::forward<Args>(args)...));
  }
}

}  // namespace weft
