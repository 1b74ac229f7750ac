// SPDX-License-Identifier: Apache-2.0
// Checks and the one function that throws. Text is formatted only on failure.
#pragma once

#include <fmt/format.h>

#include <cerrno>
#include <cstddef>
#include <string>
#include <string_view>

#include "core/context.hpp"
#include "weft/error.hpp"

namespace weft {

// Returns "<expression>: <strerror> (errno 13)".
[[nodiscard]] std::string errno_text(std::string_view expression, int error_number);

// Returns the word for an enumerator, counted from 0; "unknown" for a value that is none.
template <class Enum, size_t kCount>
[[nodiscard]] constexpr std::string_view name_of(
    Enum value, const std::string_view (&names)[kCount]
) {
  const auto index = static_cast<size_t>(value);
  return index < kCount ? names[index] : "unknown";
}

}  // namespace weft

// Throws. Arguments after the code: a fmt string and its values.
#define WEFT_RAISE(context, code, ...) \
  ::weft::raise_error((code), (context), ::fmt::format(__VA_ARGS__))

// Throws `code` unless a run-time condition holds.
#define WEFT_CHECK(context, cond, code, ...)  \
  do {                                        \
    if (!(cond)) [[unlikely]] {               \
      WEFT_RAISE(context, code, __VA_ARGS__); \
    }                                         \
  } while (false)

// Throws Error (kInvalidArgument) unless the caller's input is valid.
#define WEFT_CHECK_ARG(context, cond, ...) \
  WEFT_CHECK(context, cond, ::weft::ErrorCode::kInvalidArgument, __VA_ARGS__)

// Makes a system call that returns -1 on failure, and yields its value. Throws `code` on failure.
#define WEFT_SYS(context, code, expr)                                           \
  [&] {                                                                         \
    const auto weft_sys_result = (expr);                                        \
    if (weft_sys_result == -1) [[unlikely]] {                                   \
      ::weft::raise_error((code), (context), ::weft::errno_text(#expr, errno)); \
    }                                                                           \
    return weft_sys_result;                                                     \
  }()

// Finds Weft's own defects, which no input of callers reaches. On in all builds but Release.
#ifdef WEFT_ENABLE_ASSERT
#define WEFT_ASSERT(cond) \
  WEFT_CHECK(::weft::Context{}, cond, ::weft::ErrorCode::kInternal, "assert: {} is false", #cond)
#else
#define WEFT_ASSERT(cond) static_cast<void>(0)
#endif
