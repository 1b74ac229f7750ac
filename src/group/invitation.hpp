// SPDX-License-Identifier: Apache-2.0
// What a process has to know to take the place of a rank that was lost: where the memory is by
// which the ranks of an exchange know of each other's life (survive/roll.hpp).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "weft/group.hpp"

namespace weft {

// Trivially copyable.
struct Invitation {
  uint32_t version = 0;  // kProtocolVersion
  int32_t num_ranks = 0;
  int32_t one_process = 0;
  std::array<char, 12> transport = {};  // its name, ended by a zero
  std::array<uint64_t, 2> cookie = {};  // of that memory

  [[nodiscard]] std::string text() const;
  // Throws Error (kInvalidArgument) for what is no text of this version.
  [[nodiscard]] static Invitation from_text(std::string_view text);
};

// Of a group by Group::rejoin().
[[nodiscard]] std::optional<Invitation> invitation_of(const Group& group);

}  // namespace weft
