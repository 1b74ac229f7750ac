// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "calls.hpp"

namespace weft::py {

// Bytes that peers can write, which may outlive the exchange.
struct PeerMemory {
  nb::object array;
  Tensor tensor;
};
[[nodiscard]] PeerMemory allocate(Calls& calls, int64_t rows, int64_t row_bytes);

// Sets the exchange that gives this thread's next segments, and outlives them; null: none.
void give_segments(Calls* calls);

// Scope in which torch's allocations of this thread come from `pool`, the id of a
// torch.cuda.MemPool whose segments `calls` gives.
class PoolScope {
 public:
  PoolScope(Calls& calls, int gpu, nb::handle pool);
  ~PoolScope();
  PoolScope(const PoolScope&) = delete;
  PoolScope& operator=(const PoolScope&) = delete;

 private:
  int gpu_;
  nb::handle pool_;
};

}  // namespace weft::py
