// SPDX-License-Identifier: Apache-2.0
// What is simulated: so many ranks in domains of equal size. Purpose of this folder: replays an
// exchange that this machine cannot hold. May include: plan, exchange, kernels (byte geometry
// alone), core. May not include: moe, transport, group.
#pragma once

#include <cstdint>

namespace weft::sim {

inline constexpr int kMostRanks = 1 << 14;

struct Scenario {
  int num_ranks = 16;
  int ranks_per_domain = 8;  // divides num_ranks
  int num_experts = 256;     // divisible by num_ranks
  int topk = 8;
  int64_t max_tokens = 4096;
  int64_t row_bytes = 14336;
  int64_t pad_multiple = 1;  // of an expert's rows
  // Each row goes to every remote rank by itself, instead of once to a domain.
  bool is_flat = false;

  [[nodiscard]] int num_domains() const { return num_ranks / ranks_per_domain; }
  [[nodiscard]] int domain_of(int rank) const { return rank / ranks_per_domain; }
  [[nodiscard]] int owner_of(int expert) const { return expert / (num_experts / num_ranks); }
  // The rank of `domain` that takes in what `source` sends there.
  [[nodiscard]] int carrier(int source, int domain) const {
    return domain * ranks_per_domain + source % ranks_per_domain;
  }
};

// Throws Error (kInvalidArgument) naming the number that does not fit.
void check_scenario(const Scenario& scenario);

}  // namespace weft::sim
