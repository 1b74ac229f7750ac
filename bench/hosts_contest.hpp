// SPDX-License-Identifier: Apache-2.0
// Plan, dispatch and combine between hosts, and a plain stream of as many bytes, in turns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "measure/results.hpp"
#include "weft/group.hpp"

namespace weft::bench {

struct ContestShape {
  int64_t num_tokens = 512;  // per rank
  int64_t hidden = 4096;
  int num_experts = 64;
  int topk = 8;
  int num_threads = 0;
  int num_gpus = 0;  // of each host, shared by its ranks in turn; 0: on CPUs
  int iterations = 20;
  int warmup = 3;
  uint64_t seed = 1;
};

struct HostsContest {
  std::string provider;       // of the stream
  double crossing_bytes = 0;  // a row for each token and each other host that it goes to, all ranks
  double stream_us = 0;       // median, for so many bytes
  bool is_good = false;       // what Weft made equals the reference; streams carry nothing to check
  // dispatch and combine, whose wire_bytes are the crossing bytes and whose rival is the stream;
  // then all streams that the ranks make room for, at once, and plan.
  std::vector<program::ResultRow> rows;
};

// Collective, in a group of at least two domains. Complete on every rank.
[[nodiscard]] HostsContest run_hosts_contest(const Group& group, const ContestShape& shape);

}  // namespace weft::bench
