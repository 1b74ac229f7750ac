// SPDX-License-Identifier: Apache-2.0
// Each lane is a thread; callbacks do their work themselves.
#pragma once

#include "train/lanes/schedule.hpp"

namespace weft::overlap {

class ThreadExecutor final : public Executor {
 public:
  // The compute lane is the caller's thread, the exchange lane a new one. A callback that is
  // running when another throws is waited for; it may look at LaneContext::is_stopping().
  Trace run(const Schedule& schedule) override;
};

}  // namespace weft::overlap
