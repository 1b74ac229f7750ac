// SPDX-License-Identifier: Apache-2.0
// Any text is refused as a file's error, or is a plan that returns from its own text.
#include <sstream>
#include <string_view>

#include "fuzz/fuzz_input.hpp"
#include "plan/plan_data.hpp"
#include "weft/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using weft::fuzz::require;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const weft::Plan plan = weft::Plan::from_json(text, "fuzz");
    require(weft::Plan::from_json(plan.to_json()) == plan, "a plan returns from its text");
    std::ostringstream out;
    out << plan;
    require(!out.str().empty(), "a plan can be printed");
  } catch (const weft::Error& error) {
    require(error.code() == weft::ErrorCode::kFile, "bad text is the file's error");
  }
  return 0;
}
