// SPDX-License-Identifier: Apache-2.0
// Why ranks refuse calls, in host memory that all ranks of a domain map. A refusal itself travels
// from GPU to GPU; its text is here before, so that whoever has seen the one finds the other.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "group/shared_memory.hpp"
#include "weft/group.hpp"

namespace weft {

class RefusalBoard {
 public:
  // Collective. Throws the same Error on every rank if any cannot map the memory of another.
  explicit RefusalBoard(const Group& group);

  // `call`: its number on the GPUs. A text replaces the one of eight calls before.
  void post(uint32_t call, std::string_view reason) const;
  // Empty if that rank has told no reason, as for what its GPU found, or if it is gone.
  [[nodiscard]] std::string reason(int rank, uint32_t call) const;

 private:
  struct Entry;
  [[nodiscard]] Entry& entry(int rank, uint32_t call) const;

  int rank_;
  std::vector<SharedMemory> memories_;  // [num_ranks]; each rank writes its own
};

}  // namespace weft
