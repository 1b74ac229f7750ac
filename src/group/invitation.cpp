// SPDX-License-Identifier: Apache-2.0
#include "group/invitation.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cstring>
#include <type_traits>

#include "group/control_plane.hpp"

namespace weft {
namespace {

constexpr std::string_view kBegin = "weft-";

static_assert(std::is_trivially_copyable_v<Invitation>);

}  // namespace

std::string Invitation::text() const {
  std::array<uint8_t, sizeof(Invitation)> bytes = {};
  std::memcpy(bytes.data(), this, sizeof(Invitation));
  return fmt::format("{}{:02x}", kBegin, fmt::join(bytes, ""));
}

Invitation Invitation::from_text(std::string_view text) {
  std::array<uint8_t, sizeof(Invitation)> bytes = {};
  bool is_right = text.size() == kBegin.size() + 2 * bytes.size() && text.starts_with(kBegin);
  for (size_t i = 0; is_right && i < bytes.size(); ++i) {
    const char* const digits = text.data() + kBegin.size() + 2 * i;
    is_right = std::from_chars(digits, digits + 2, bytes[i], 16).ptr == digits + 2;
  }
  Invitation invitation;
  std::memcpy(&invitation, bytes.data(), sizeof invitation);
  WEFT_CHECK_ARG(
      Context{},
      is_right && invitation.version == kProtocolVersion && invitation.num_ranks > 0 &&
          invitation.num_ranks <= kMaxRanks && invitation.transport.back() == 0,
      "rejoin: \"{}\" is no invitation of this version of Weft (Exchange::invitation() makes one)",
      text.substr(0, 80)
  );
  return invitation;
}

}  // namespace weft
