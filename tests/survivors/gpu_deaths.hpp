// SPDX-License-Identifier: Apache-2.0
// Processes that share GPUs and die one after the other (PeerLoss::kShrink), down to the last, or
// so that a new process takes each place: the others make plan, dispatch and combine again and
// again, and compare what they get with the reference, which has holes where routes went to lost
// ranks. Seeds after each other have no replicas, planned and given ones.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "support/exchange_case.hpp"
#include "weft/group.hpp"

namespace weft::test {

inline constexpr int kMostDyingRanks = 8;
inline constexpr int kMostDeaths = 32;  // of a group

// CUDA is ready for this process as the rank then, which takes seconds on a busy machine.
void reach_gpu(const ExchangeSetup& setup, int rank);

struct GpuDeaths {
  int num_ranks = 4;  // at most kMostDyingRanks
  int num_gpus = 1;
  uint64_t seed = 1;
  bool is_replayed = false;  // the calls are those of a captured graph
  int num_returns = 0;       // so many deaths, and a new process after each; 0: nobody comes back
  const char* transport = "ipc";  // by which they map each other's memory
  bool copy_engines = false;      // they carry the rows of calls that are not replayed
  // The domain of each rank; empty: one. Several have no replicas, and no graphs.
  std::vector<int> domain_of = {};
};

// Outcome of all processes of one group.
struct GroupOfDeaths {
  std::vector<double> ms;  // by death: from it until the last of the others has heard of it
  // Time from a new process's rejoin until all ranks have made calls with it, by death.
  std::vector<double> return_ms;
  int num_wrong = 0;
  int num_hung = 0;
};
[[nodiscard]] GroupOfDeaths run_deaths(const GpuDeaths& deaths);

}  // namespace weft::test
