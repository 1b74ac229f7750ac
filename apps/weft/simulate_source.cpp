// SPDX-License-Identifier: Apache-2.0
#include "simulate_source.hpp"

#include <atomic>
#include <thread>

#include "measure.hpp"
#include "plan/random_routing.hpp"

namespace weft::program {

std::vector<RouteTable> make_up_tables(
    const MadeUpRouting& spec, const std::function<void(double)>& told
) {
  RandomRouting random;
  random.num_tokens = spec.num_tokens;
  random.num_experts = spec.num_experts;
  random.topk = spec.topk;
  random.popularity = spec.skew > 0 ? Popularity::kZipf : Popularity::kUniform;
  random.zipf_exponent = spec.skew;
  random.with_weights = false;
  random.seed = spec.seed;
  // What is wrong with the routing as a whole is thrown here, not on a thread.
  std::vector<RouteTable> tables(static_cast<size_t>(spec.num_ranks));
  tables[0] = random_routing(random, 0);
  std::atomic<int> next_rank = 1;
  const auto work = [&](bool tells) {
    for (int rank = next_rank++; rank < spec.num_ranks; rank = next_rank++) {
      tables[static_cast<size_t>(rank)] = random_routing(random, rank);
      if (tells) {
        told(static_cast<double>(rank) / spec.num_ranks);
      }
    }
  };
  std::vector<std::jthread> helpers;
  for (int i = 1; i < num_usable_cores(); ++i) {
    helpers.emplace_back(work, false);
  }
  work(true);
  return tables;
}

}  // namespace weft::program
