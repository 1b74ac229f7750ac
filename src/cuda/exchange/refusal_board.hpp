// SPDX-License-Identifier: Apache-2.0
// Why ranks refuse calls or break them off, in host memory that all ranks of a domain map. A
// refusal itself travels from GPU to GPU; its text is here before, so that whoever has seen the one
// finds the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "call/signature.hpp"
#include "group/shared_memory.hpp"
#include "weft/group.hpp"

namespace weft {

class RefusalBoard {
 public:
  // Collective. Throws the same Error on every rank if any cannot map the memory of another.
  explicit RefusalBoard(const Group& group);

  // `call`: its number on the GPUs. It replaces what was said eight calls before.
  void post(uint32_t call, const Refusal& reason) const;
  // Nothing if that rank has said none, as yet for what its GPU found, or if it is gone.
  [[nodiscard]] std::optional<Refusal> reason(int rank, uint32_t call) const;
  // This rank's caller has interrupted that call, and makes no other.
  void interrupt(uint32_t call) const;
  // The call that was interrupted on that rank, if one was.
  [[nodiscard]] std::optional<uint32_t> interrupted(int rank) const;

 private:
  struct Entry;
  // Behind the entries of a rank; 0: no call of it was interrupted.
  [[nodiscard]] std::atomic<uint64_t>& interrupt_of(int rank) const;
  [[nodiscard]] Entry& entry(int rank, uint32_t call) const;

  int rank_;
  std::vector<SharedMemory> memories_;  // [num_ranks]; each rank writes its own
};

}  // namespace weft
