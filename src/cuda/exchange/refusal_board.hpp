// SPDX-License-Identifier: Apache-2.0
// Says why ranks refuse calls or break them off, in host memory that all ranks of a domain map. A
// refusal itself travels from GPU to GPU; its text is here before, so that a rank that has seen the
// refusal finds it.
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

  // Posts why this rank refuses `call`, a number on the GPUs; replaces the post of eight calls
  // before.
  void post(uint32_t call, const Refusal& reason) const;
  // Returns nothing if `rank` has posted none (yet), or if a later post has replaced it.
  [[nodiscard]] std::optional<Refusal> reason(int rank, uint32_t call) const;
  // Posts that this rank's caller has interrupted `call` and makes no other.
  void interrupt(uint32_t call) const;
  // Returns the call that was interrupted on `rank`, if any.
  [[nodiscard]] std::optional<uint32_t> interrupted(int rank) const;

 private:
  struct Entry;
  // Returns the word behind a rank's entries; 0: none of its calls was interrupted.
  [[nodiscard]] std::atomic<uint64_t>& interrupt_of(int rank) const;
  [[nodiscard]] Entry& entry(int rank, uint32_t call) const;

  int rank_;
  std::vector<SharedMemory> memories_;  // [num_ranks]; each rank writes its own
};

}  // namespace weft
