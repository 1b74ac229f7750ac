// SPDX-License-Identifier: Apache-2.0
// A routing file in a folder of its own, gone after the test.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <unistd.h>
#include <vector>

#include "core/atomic_file.hpp"
#include "plan/file/routing_file.hpp"
#include "plan/random_routing.hpp"
#include "unit/plan/plan_cases.hpp"

namespace weft::testing {

inline constexpr RoutingFileShape kShape = {.num_ranks = 2, .num_experts = 8, .topk = 2};

class RoutingFileFixture : public ::testing::Test {
 protected:
  RoutingFileFixture() { std::filesystem::create_directories(folder_); }
  ~RoutingFileFixture() override { std::filesystem::remove_all(folder_); }

  // Three tokens on rank 0, one on rank 1: records of 32 + 16 + 16 B.
  static std::vector<RouteTable> routes(uint64_t seed, int num_experts = 8) {
    RandomRouting spec;
    spec.num_experts = num_experts;
    spec.topk = 2;
    spec.hole_fraction = 0.2;
    spec.seed = seed;
    spec.num_tokens = 3;
    const RouteTable first = random_routing(spec, 0);
    spec.num_tokens = 1;
    return {first, random_routing(spec, 1)};
  }
  void write(int num_records, RoutingFileWriter::Mode mode = RoutingFileWriter::Mode::kNew) const {
    RoutingFileWriter writer(path_, kShape, mode);
    for (int i = 0; i < num_records; ++i) {
      writer.append(10 * i, i % 3, routes(static_cast<uint64_t>(i)));
    }
  }
  void rewrite(const std::string& bytes) const { write_file_atomically(path_, bytes); }
  [[nodiscard]] std::string bytes() const { return read_whole_file(path_); }
  [[nodiscard]] std::string refusal() const {
    const std::string text = message_of([&] {
      RoutingFileReader reader(path_);
      for (int64_t i = 0; i < reader.num_records(); ++i) {
        static_cast<void>(reader.read(i));
      }
    });
    const std::string begin = fmt::format("read routing: {}: ", path_);
    return text.starts_with(begin) ? text.substr(begin.size()) : text;
  }

  std::string folder_ =
      (std::filesystem::temp_directory_path() / fmt::format("weft_routing_test_{}", ::getpid()))
          .string();
  std::string path_ = folder_ + "/routing.weft";
};

}  // namespace weft::testing
