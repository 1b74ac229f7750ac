// SPDX-License-Identifier: Apache-2.0
// The version of all that ranks say to each other: rendezvous, cards, call words, records, messages
// of transports. Raise it with every change to any of these, so that ranks of different builds part
// with an error that says so.
#pragma once

#include <cstdint>

namespace weft {

inline constexpr uint32_t kProtocolVersion = 2;

}  // namespace weft
