// SPDX-License-Identifier: Apache-2.0
// Text for people, of what files, variables and networks hold.
#pragma once

#include <string>
#include <string_view>

namespace weft {

// Returns the text with what is no character of UTF-8, or a control one, spelled out ("\xff").
[[nodiscard]] std::string printable(std::string_view text);

}  // namespace weft
