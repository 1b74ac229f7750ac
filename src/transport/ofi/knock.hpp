// SPDX-License-Identifier: Apache-2.0
// Whether anybody still listens at an address.
#pragma once

#include "weft/group.hpp"

namespace weft::ofi {

// True if the host of this socket address answers that nobody listens there. False if somebody
// does, or if no answer comes in some milliseconds. Opens a connection and drops it at once.
[[nodiscard]] bool is_refused(const Bytes& address);

}  // namespace weft::ofi
