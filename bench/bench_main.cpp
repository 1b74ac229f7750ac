// SPDX-License-Identifier: Apache-2.0
// Google Benchmark's main, plus --smoke: every benchmark once, as a test.
#include <benchmark/benchmark.h>

#include <string_view>
#include <vector>

#include "cli/standard_streams.hpp"

int main(int argc, char** argv) {
  weft::program::open_standard_streams();
  char shortest[] = "--benchmark_min_time=0.0001";
  std::vector<char*> arguments;
  for (char* argument : std::vector<char*>(argv, argv + argc)) {
    arguments.push_back(std::string_view(argument) == "--smoke" ? shortest : argument);
  }
  auto count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) {
    return 2;
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
