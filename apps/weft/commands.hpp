// SPDX-License-Identifier: Apache-2.0
// The program `weft` shows, checks and measures the library from a shell. The Python package has it
// in its compiled module.
#pragma once

namespace weft::program {

// Does what the command line asks, argv[0] aside, and returns the exit code. It takes signals and
// the standard streams for its own: nothing else should run in the process.
[[nodiscard]] int run_weft(int argc, char** argv);

}  // namespace weft::program
