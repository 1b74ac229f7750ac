// SPDX-License-Identifier: Apache-2.0
#include "core/check.hpp"

#include <cstring>
#include <filesystem>

#include "core/printable.hpp"
#include "weft/tensor.hpp"

namespace weft {
namespace {

std::string speaker(const Context& context) {
  if (context.rank < 0) {
    return {};
  }
  if (context.transport.empty()) {
    return fmt::format(" [rank {}/{}]", context.rank, context.num_ranks);
  }
  return fmt::format(" [rank {}/{}, {}]", context.rank, context.num_ranks, context.transport);
}

}  // namespace

void raise_error(
    ErrorCode code, const Context& context, const std::string& problem, const char* file, int line
) {
  const std::string position =
      fmt::format("{}:{}", std::filesystem::path(file).filename().native(), line);
  const std::string message =
      fmt::format("{}{} at {}", printable(problem), speaker(context), position);
  switch (code) {
    case ErrorCode::kTimeout:
      throw TimeoutError(code, message, context.rank, position);
    case ErrorCode::kPeerFailed:
    case ErrorCode::kRanksLost:
      throw PeerError(code, message, context.rank, position);
    default:
      break;
  }
  const Error error(code, message, context.rank, position);
  if (context.lost_peer >= 0) {
    throw LostPeerError(error, context.lost_peer);
  }
  throw error;
}

std::string errno_text(std::string_view expression, int error_number) {
  return fmt::format("{}: {} (errno {})", expression, std::strerror(error_number), error_number);
}

std::string_view error_code_name(ErrorCode code) {
  static constexpr std::string_view kNames[] = {
      "invalid argument",
      "unsupported",
      "not available",
      "out of memory",
      "timeout",
      "peer failed",
      "transport",
      "file",
      "cuda",
      "internal",
      "ranks lost",
      "interrupted"};
  return name_of(code, kNames);
}

std::string_view dtype_name(DType dtype) {
  static constexpr std::string_view kNames[] = {
      "bfloat16", "float16", "float32", "byte", "bool", "int32", "int64"};
  return name_of(dtype, kNames);
}

}  // namespace weft
