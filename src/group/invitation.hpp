// SPDX-License-Identifier: Apache-2.0
// What a process has to know to take the place of a rank that was lost: how it reaches the others,
// and which ranks share memory.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "weft/group.hpp"

namespace weft {

struct Invitation {
  int num_ranks = 0;
  Topology topology;
  std::string transport;  // as make_transport() has it, or "peer"
  // Where ranks share memory: of that by which they know of each other's life
  // (survive/shared_roll.hpp).
  std::array<uint64_t, 2> cookie = {};
  // Where they do not: of the rank that invites (survive/links.hpp).
  std::string address = {};
  int port = 0;
  std::array<uint64_t, 4> token = {};

  [[nodiscard]] std::string text() const;
  // Throws Error (kInvalidArgument) for what is no text of this version.
  [[nodiscard]] static Invitation from_text(std::string_view text);
};

// Of a group by Group::rejoin().
[[nodiscard]] std::optional<Invitation> invitation_of(const Group& group);

}  // namespace weft
