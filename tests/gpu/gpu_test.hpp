// SPDX-License-Identifier: Apache-2.0
// Helpers that tests of the exchange on GPUs share.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/exchange_case.hpp"
#include "support/gpus.hpp"

namespace weft::test {

// Deadline of every wait; a first call of many ranks on one GPU takes some milliseconds.
inline constexpr std::chrono::milliseconds kGpuTimeout = std::chrono::seconds(10);

[[nodiscard]] inline int num_gpus() {
  return static_cast<int>(gpus_here().gpus.size());
}

// How many GPUs the ranks of a test share: one, and all where there are several.
[[nodiscard]] inline std::vector<int> gpu_counts() {
  return num_gpus() > 1 ? std::vector{1, num_gpus()} : std::vector{1};
}

// Skips without a GPU.
template <class Base>
class GpuTestOf : public Base {
 protected:
  void SetUp() override {
    if (num_gpus() == 0) {
      GTEST_SKIP() << "no GPU: " << gpus_here().none_reason;
    }
  }
};
using GpuTest = GpuTestOf<testing::Test>;
template <class Parameter>
using GpuParamTest = GpuTestOf<testing::TestWithParam<Parameter>>;

// kVector, and kBulk where every GPU has it.
[[nodiscard]] inline std::vector<Mover> movers_here() {
  std::vector<Mover> movers = {Mover::kVector, Mover::kBulk};
  for (const GpuInfo& gpu : gpus_here().gpus) {
    movers.resize(gpu.major < 9 ? 1 : movers.size());
  }
  return movers;
}

// One after the other, and what an exchange picks by itself.
[[nodiscard]] inline Mover mover_in_turn(uint64_t turn) {
  std::vector<Mover> movers = movers_here();
  movers.push_back(Mover::kAuto);
  return movers[turn % movers.size()];
}

[[nodiscard]] inline ExchangeSetup gpu_setup(int num_ranks, int num_gpus) {
  ExchangeSetup setup;
  setup.num_ranks = num_ranks;
  setup.num_gpus = num_gpus;
  setup.num_experts = 4 * num_ranks;
  setup.timeout = kGpuTimeout;
  return setup;
}

[[nodiscard]] inline uint64_t number_from_env(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Sets the layout and resets what it cannot have.
inline void set_layout(Case& spec, Layout layout) {
  spec.layout = layout;
  if (layout == Layout::kRankMajor) {
    spec.pad_multiple = 1;
    spec.scale = CombineScale::kNone;
  }
}

// A plan and dispatch in one call, some of bytes.
inline void make_routed(Case& spec, Layout layout, uint64_t seed, bool is_of_bytes, int64_t cols) {
  set_layout(spec, layout);
  spec.room = seed % 3 == 0 ? Room::kOneRowShort : Room::kSpare;
  spec.dtype = is_of_bytes ? DType::kByte : DType::kBFloat16;
  spec.byte_cols = cols;
  spec.calls = is_of_bytes || seed % 2 == 0 ? "d" : "dc";
  spec.is_routed = true;
  spec.is_late = seed % 5 == 0;
}

// Reports failures, and when to stop: each may have cost a timeout.
class FailureCount {
 public:
  void add(const std::string& failure) {
    EXPECT_EQ(failure, "");
    count_ += failure.empty() ? 0 : 1;
    is_timeout_ = is_timeout_ || failure.find(" waited ") != std::string::npos;
  }
  [[nodiscard]] bool are_too_many() const { return is_timeout_ || count_ >= 4; }

 private:
  int count_ = 0;
  bool is_timeout_ = false;
};

}  // namespace weft::test
