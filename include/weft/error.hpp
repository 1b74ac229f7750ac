// SPDX-License-Identifier: Apache-2.0
// Exceptions of Weft. Message grammar: `<verb>: <problem> (<expected or why>) [rank r/N, transport]
// at file:line`.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace weft {

enum class ErrorCode {
  kInvalidArgument,  // the caller's input; thrown before anything is written
  kUnsupported,      // a legal request that this build or device cannot do
  kNotAvailable,     // a library, device or permission is missing
  kOutOfMemory,
  kTimeout,     // a deadline passed; the message names who waited for whom
  kPeerFailed,  // another rank died, left, or refused the call
  kTransport,
  kFile,  // a missing, truncated or foreign file; the message names it
  kCuda,
  kInternal,     // a defect in Weft
  kRanksLost,    // with PeerLoss::kShrink on GPUs: calls are void, and the exchange goes on
  kInterrupted,  // the calling program stops a call that waits (Ctrl-C)
};

[[nodiscard]] std::string_view error_code_name(ErrorCode code);

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, int rank, std::string where)
      : std::runtime_error(message), code_(code), rank_(rank), where_(std::move(where)) {}

  [[nodiscard]] ErrorCode code() const { return code_; }
  // The rank that throws, -1 where no group is involved.
  [[nodiscard]] int rank() const { return rank_; }
  // Source position, "file:line".
  [[nodiscard]] const std::string& where() const { return where_; }

 private:
  ErrorCode code_;
  int rank_;
  std::string where_;
};

class TimeoutError final : public Error {
  using Error::Error;
};

class PeerError final : public Error {  // kPeerFailed, kRanksLost
  using Error::Error;
};

}  // namespace weft
