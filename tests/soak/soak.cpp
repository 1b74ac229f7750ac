// SPDX-License-Identifier: Apache-2.0
// A million small random exchanges, bit-checked: minutes to hours. Ends with 1 at the first
// difference, naming the seed that shows it again.
#include "support/soak.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <cstdio>
#include <vector>

int main(int argc, char** argv) {
  int64_t num_calls = 1'000'000;
  uint64_t seed = 1;
  CLI::App app("Soak: random plans, dispatches and combines, every bit compared with the reference"
  );
  app.add_option("--calls", num_calls, "how many calls in all")->capture_default_str();
  app.add_option("--seed", seed, "of the first exchange")->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  const std::vector<std::string> transports = {
      "loopback",
      "shm",
      "faulty:loopback?seed=1&delay=0.05&reorder=0.5&hold_us=100",
      "faulty:shm?seed=2&delay=0.02&reorder=0.5&hide_mapped=1&hold_us=100"};
  const int64_t share = (num_calls + 3) / 4;
  int64_t num_done = 0;
  for (size_t i = 0; i < transports.size(); ++i) {
    int64_t num_shown = 0;
    const auto progress = [&](int64_t calls) {
      if (calls - num_shown >= 10'000 || calls >= share) {
        num_shown = calls;
        fmt::print("{}: {} of {} calls\n", transports[i], calls, share);
        std::fflush(stdout);
      }
    };
    const auto result = weft::test::soak(transports[i], seed + i * 1'000'000'000, share, progress);
    if (!result.failure.empty()) {
      fmt::print(stderr, "soak: {}\n", result.failure);
      return 1;
    }
    num_done += result.num_calls;
  }
  fmt::print("soak: {} calls, all bits right\n", num_done);
  return 0;
}
