// SPDX-License-Identifier: Apache-2.0
// The two lanes of a schedule and what a callback is told about the one it runs on.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

namespace weft::overlap {

// Work on one lane runs one after another, in the order it was issued.
enum class Lane : uint8_t { kCompute, kExchange };

inline constexpr size_t kNumLanes = 2;

[[nodiscard]] constexpr size_t lane_idx(Lane lane) {
  return static_cast<size_t>(lane);
}

// "compute", "exchange"
[[nodiscard]] constexpr std::string_view lane_name(Lane lane) {
  return lane == Lane::kCompute ? "compute" : "exchange";
}

struct LaneContext {
  Lane lane = Lane::kCompute;
  // What the work is to be enqueued on; null where the callback does the work itself.
  void* stream = nullptr;
  const std::atomic<bool>* stopping = nullptr;

  // Another callback has thrown: long work may end early, its result will not be used.
  [[nodiscard]] bool is_stopping() const {
    return stopping != nullptr && stopping->load(std::memory_order_relaxed);
  }
};

// A callback. What it throws stops the schedule on both lanes and reaches the caller of the run.
using Work = std::function<void(const LaneContext&)>;

}  // namespace weft::overlap
