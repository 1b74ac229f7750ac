// SPDX-License-Identifier: Apache-2.0
// Memory of plans on a GPU, in peers' reach, kept for the next plan when one ends. All plans of an
// exchange have one size.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/memory/buffers.hpp"

namespace weft {

class PlanPool : public std::enable_shared_from_this<PlanPool> {
 public:
  PlanPool(std::shared_ptr<PeerMemory> memory, uint64_t plan_bytes);
  ~PlanPool();

  // Memory for so many more plans. Nothing, and false, unless all peers map it before so long.
  [[nodiscard]] bool grow(uint64_t num_plans, std::chrono::milliseconds at_most);
  // Asks for more memory while a quarter is still unused, and takes it up in a later call, once
  // peers map it. Never waits for them: one that is ahead may not map before its kernels end, and
  // those wait for this rank's next call.
  void look_ahead();
  // Goes back when the last copy of the pointer does, from any thread. Null if all are in use.
  [[nodiscard]] std::shared_ptr<const Block> take();

  [[nodiscard]] uint64_t bytes() const;

 private:
  void add(const PeerRegion& region);
  void give_back(const Block& block);

  std::shared_ptr<PeerMemory> memory_;
  uint64_t plan_bytes_;
  std::vector<PeerRegion> regions_;
  std::optional<PeerRegion> coming_;  // peers may not map it yet
  bool may_look_ahead_ = true;        // there was memory the last time

  mutable std::mutex mutex_;  // guards what follows
  std::vector<Block> unused_;
  uint64_t num_plans_ = 0;
};

}  // namespace weft
