// SPDX-License-Identifier: Apache-2.0
// A call as its ranks compare it: some numbers that travel with the handshake of both executors,
// and what a difference between two ranks, or the refusal of one, says to the user.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "call/call.hpp"

namespace weft {

inline constexpr int kSignatureWords = 6;
// A plan that pads to so many rows only announces a call on another exchange.
inline constexpr int64_t kAnnouncement = 1'000'003;
inline constexpr int kPlanNumberWord = 0;  // of dispatch and combine only

// Trivially copyable, for host and device. Small fields share a word.
struct Signature {
  int64_t words[kSignatureWords] = {};
};

[[nodiscard]] Signature signature_of(const Call& call);
// Returns whether a plan goes in one launch with its dispatch; nothing if the signature is empty.
[[nodiscard]] std::optional<bool> has_dispatch(const Signature& plan);

// Names the first field that differs in a word of two signatures: "dtype of x = bfloat16 here and
// float16 on rank 2 (must be equal on all ranks)". A peer's word may be anything.
[[nodiscard]] std::string difference_text(
    Op op, size_t word, int64_t mine, int64_t theirs, size_t rank
);

// Why a rank refuses a call, on its way to the other ranks. Trivially copyable; lies in shared
// memory. A text that is longer is cut.
struct Refusal {
  Refusal() = default;
  template <std::convertible_to<std::string_view> Text>
  Refusal(const Text& reason) {  // NOLINT(google-explicit-constructor)
    std::string_view(reason).copy(chars.data(), chars.size() - 1);
  }
  Refusal(const std::exception& reason);  // NOLINT(google-explicit-constructor)
  [[nodiscard]] std::string_view text() const {
    return {chars.data(), ::strnlen(chars.data(), chars.size())};
  }

  uint64_t is_for_room = 0;  // NoRoom: after growth the call can be made
  std::array<char, 512> chars = {};
};

}  // namespace weft
