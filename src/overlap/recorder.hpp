// SPDX-License-Identifier: Apache-2.0
// Runs no callback: says what would run when if every step took equally long.
#pragma once

#include "overlap/executor.hpp"

namespace weft::overlap {

class Recorder final : public Executor {
 public:
  // A step takes 1000 ns and begins as soon as its lane and what it waits for are done. Steps
  // without work take no time. Throws Error (kInvalidArgument) where check_schedule() does.
  Trace run(const Schedule& schedule) override;
};

}  // namespace weft::overlap
