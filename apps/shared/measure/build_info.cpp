// SPDX-License-Identifier: Apache-2.0
#include "measure/build_info.hpp"

#include <fmt/format.h>

#include "commit.hpp"
#include "weft/version.hpp"

namespace weft::program {
namespace {

std::string compiler() {
#ifdef __clang__
  return fmt::format("Clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#else
  return fmt::format("GCC {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#endif
}

}  // namespace

BuildInfo build_info() {
  BuildInfo info;
  info.version = version();
  info.commit = WEFT_COMMIT;
  info.is_dirty = WEFT_DIRTY;
  info.compiler = compiler();
  info.build_type = WEFT_BUILD_TYPE;
  info.sanitizers = WEFT_SANITIZERS;
#ifdef WEFT_ENABLE_ASSERT
  info.has_asserts = true;
#endif
  info.executors = {"cpu"};
  return info;
}

}  // namespace weft::program
