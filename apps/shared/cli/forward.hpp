// SPDX-License-Identifier: Apache-2.0
// The command line's types for headers that only pass them on: <CLI/CLI.hpp> takes the compiler
// five seconds.
#pragma once

namespace CLI {  // NOLINT(readability-identifier-naming)
class App;
class Option;
}  // namespace CLI
