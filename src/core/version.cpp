// SPDX-License-Identifier: Apache-2.0
#include "weft/version.hpp"

namespace weft {

std::string_view version() {
  return WEFT_VERSION;
}

}  // namespace weft
