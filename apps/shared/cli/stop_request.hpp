// SPDX-License-Identifier: Apache-2.0
// Ctrl-C and kill as a request to finish: the first signal is remembered for all ranks of this
// program, another to the same process two seconds later ends it at once.
#pragma once

#include "group/shared_memory.hpp"

namespace weft::program {

class StopRequest {
 public:
  // Takes over SIGINT and SIGTERM until destroyed. Make it before ranks are forked, so that all
  // share it; one at a time.
  StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;
  ~StopRequest();

  // Ranks may see it at different times: agree before acting on it.
  [[nodiscard]] bool is_set() const;

 private:
  SharedMemory memory_;
};

}  // namespace weft::program
