// SPDX-License-Identifier: Apache-2.0
// A training run for people and for other programs.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>

#include "html.hpp"
#include "limits.hpp"
#include "moe/config.hpp"
#include "table.hpp"
#include "train_record.hpp"

namespace weft::program {

// What does not change from step to step.
struct TrainFacts {
  std::string text_path;
  int64_t text_bytes = 0;
  moe::TrainConfig config;
  std::string transport;   // the one in use
  int num_gpus = 0;        // in use; 0: the cores
  bool is_copied = false;  // exchanges beside computation go by copy engines
  int num_ranks = 0;
  int64_t num_parameters = 0;
  int64_t num_active_parameters = 0;
  int64_t first_step = 0;  // that this run began with
  CopyRates rates = {};    // of plain copies; zero: not measured (yet)
};

[[nodiscard]] std::string train_headline(const TrainFacts& facts);
[[nodiscard]] Table loss_table(const TrainRecord& record);
[[nodiscard]] Table phase_table(const TrainRecord& record);
// Of overlapped steps: how long each lane worked, and how much of the exchange nothing hid.
[[nodiscard]] Table lane_table(const TrainRecord& record);
// What the two tables say, before them and between them.
[[nodiscard]] std::string phase_text(const TrainFacts& facts);
[[nodiscard]] std::string lane_text(const TrainRecord& record);
[[nodiscard]] Table exchange_table(const TrainFacts& facts, const TrainRecord& record);
// How long ranks waited for each other, in a sentence.
[[nodiscard]] std::string wait_text(const TrainRecord& record);
// One line per block: how busy its experts were lately.
[[nodiscard]] std::string load_picture(const TrainRecord& record);

[[nodiscard]] nlohmann::ordered_json train_json(const TrainFacts& facts, const TrainRecord& record);
[[nodiscard]] Page train_page(const TrainFacts& facts, const TrainRecord& record);

}  // namespace weft::program
