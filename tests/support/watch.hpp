// SPDX-License-Identifier: Apache-2.0
// Says what ranks that are threads of this process do when none has gone on for a while. A deadline
// names who waited for whom, but not what the other did meanwhile.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace weft::test {

class Watch {
 public:
  // After `patience` without a step, each rank's last step and the stack of every thread go to
  // stderr, once. `addr2line -Cfpe PROGRAM ADDRESS` has the names that a stack lacks.
  explicit Watch(int num_ranks, std::chrono::seconds patience = std::chrono::seconds(5));

  void enter(size_t rank, const char* step) {
    doing_[rank] = step;
    ++num_steps_;
  }

 private:
  void look(const std::stop_token& is_over, std::chrono::seconds patience) const;

  std::vector<std::atomic<const char*>> doing_;
  std::atomic<uint64_t> num_steps_ = 0;
  std::jthread looker_;
};

}  // namespace weft::test
