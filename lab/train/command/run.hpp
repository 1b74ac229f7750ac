// SPDX-License-Identifier: Apache-2.0
// What `weft train` was asked to do.
#pragma once

#include <cstdint>
#include <string>

#include "device_choice.hpp"
#include "moe/config.hpp"
#include "ranks.hpp"

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

}  // namespace weft::program
