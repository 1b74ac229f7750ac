// SPDX-License-Identifier: Apache-2.0
// What `weft-lab train` was asked to do, and one rank of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "cli/ranks.hpp"
#include "cli/stop_request.hpp"
#include "train/config.hpp"
#include "weft/group.hpp"

namespace weft::program {

struct TrainOptions {
  std::string text_path;
  moe::TrainConfig config;
  RankOptions ranks;
  DeviceChoice device;
  int64_t steps = 0;   // in all, those of the checkpoint included; 0: no such limit
  double seconds = 0;  // of this run; 0: no such limit
  std::string checkpoint_path;
  int64_t checkpoint_every = 100;  // steps
  bool is_resumed = false;
  std::string routing_path;
  int64_t routing_every = 1;  // steps
  std::string trace_path;
  std::string html_path;
  std::string json_path;
};

// Collective. Trains until a limit is reached or `stop` is set, then saves and, on rank 0, prints.
int train_on_rank(
    const Group& group,
    const TrainOptions& options,
    std::span<const std::byte> text,
    const StopRequest& stop
);

}  // namespace weft::program
