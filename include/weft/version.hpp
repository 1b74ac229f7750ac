// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace weft {

// The release of this library, "0.1.0". Ranks of different releases may still work together: what
// must be equal between them is the version of the protocol, which they compare when they connect.
[[nodiscard]] std::string_view version();

}  // namespace weft
