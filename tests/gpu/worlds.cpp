// SPDX-License-Identifier: Apache-2.0
// The hard cases on one GPU and on all, by every mover; every other time on a stream of the
// caller's.
#include "multirank/worlds.hpp"

#include "gpu/gpu_test.hpp"

namespace weft::test {

std::vector<std::string> worlds() {
  return {"one_gpu", "all_gpus"};
}

std::string obstacle(const std::string& world) {
  if (num_gpus() == 0) {
    return "no GPU: " + gpus_here().none_reason;
  }
  return world == "all_gpus" && num_gpus() == 1 ? "one GPU only" : "";
}

std::vector<ExchangeSetup> in_world(const std::string& world, const ExchangeSetup& setup) {
  std::vector<ExchangeSetup> all;
  for (const Mover mover : movers_here()) {
    ExchangeSetup here = setup;
    here.num_gpus = world == "one_gpu" ? 1 : num_gpus();
    here.mover = mover;
    here.has_own_stream = mover == Mover::kVector;
    here.timeout = kGpuTimeout;
    all.push_back(here);
  }
  return all;
}

}  // namespace weft::test
