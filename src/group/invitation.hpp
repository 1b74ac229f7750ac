// SPDX-License-Identifier: Apache-2.0
// Facts that a process needs to take the place of a rank that was lost: how it reaches the others,
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
  // Cookie of the memory by which ranks that share memory know of each other's life
  // (survive/shared_roll.hpp).
  std::array<uint64_t, 2> cookie = {};
  // Address of the rank that invites, where ranks share none (survive/links.hpp).
  std::string address = {};
  int port = 0;
  std::array<uint64_t, 4> token = {};

  [[nodiscard]] std::string text() const;
  // Reads text(). Throws Error (kInvalidArgument) for what is no text of this version.
  [[nodiscard]] static Invitation from_text(std::string_view text);
};

// Returns the invitation that Group::rejoin() made the group of; nothing for any other group.
[[nodiscard]] std::optional<Invitation> invitation_of(const Group& group);

}  // namespace weft
