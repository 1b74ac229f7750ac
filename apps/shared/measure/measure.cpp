// SPDX-License-Identifier: Apache-2.0
#include "measure/measure.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <sched.h>
#include <vector>

#include "core/check.hpp"

namespace weft::program {

double percentile(std::span<const double> samples, double percent) {
  if (samples.empty()) {
    return 0;
  }
  std::vector<double> sorted(samples.begin(), samples.end());
  std::sort(sorted.begin(), sorted.end());
  const double rank = std::ceil(percent / 100 * static_cast<double>(sorted.size()));
  const auto index = static_cast<size_t>(std::max(rank, 1.0)) - 1;
  return sorted[std::min(index, sorted.size() - 1)];
}

std::vector<double> slowest_of(const Group& group, std::span<const double> mine) {
  std::vector<double> slowest(mine.size(), 0);
  for (const Bytes& bytes : group.all_gather(std::as_bytes(mine))) {
    WEFT_CHECK_ARG(
        (Context{group.rank(), group.num_ranks()}),
        bytes.size() == mine.size_bytes(),
        "samples: {} here and {} on another rank (the same options on every rank)",
        mine.size(),
        bytes.size() / sizeof(double)
    );
    const auto* theirs = reinterpret_cast<const double*>(bytes.data());
    const auto later = [](double a, double b) { return std::max(a, b); };
    std::ranges::transform(slowest, std::span(theirs, mine.size()), slowest.begin(), later);
  }
  return slowest;
}

int num_usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) {
    return 1;
  }
  return std::max(CPU_COUNT(&cores), 1);
}

}  // namespace weft::program
