// SPDX-License-Identifier: Apache-2.0
// Ranks of one process whose provider shares memory between endpoints: an endpoint that closes
// takes its memory away under one that still looks at it. So they close together, when the last
// transport of a session in this process ends.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/ofi/queue.hpp"

namespace weft::ofi {

class Closing {
 public:
  // The same object for all ranks of `session` in this process. Any thread.
  [[nodiscard]] static std::shared_ptr<Closing> join(uint64_t session);

  // Keeps queues that nobody polls any more until the last holder of this object is gone.
  void keep(std::vector<std::unique_ptr<Queue>> queues);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Queue>> queues_;
};

}  // namespace weft::ofi
