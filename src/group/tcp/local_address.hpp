// SPDX-License-Identifier: Apache-2.0
// Address of this host by which other hosts reach it.
#pragma once

#include <string>

namespace weft {

// Returns the numeric address that `wanted` means here: 127.0.0.1 if empty; else of an interface
// ("eth0"), an address of this host ("10.1.2.3"), or the first in a network ("10.1.0.0/16"), so
// that one setting, WEFT_FABRIC_ADDRESS, serves all hosts. Throws Error (kNotAvailable) with the
// addresses that there are.
[[nodiscard]] std::string local_address(const std::string& wanted);

}  // namespace weft
