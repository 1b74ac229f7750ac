// SPDX-License-Identifier: Apache-2.0
// The regions that this rank allocated, by slot. Their generations stand in the signal block, where
// peers see what is alive. One thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "core/check.hpp"
#include "transport/mapped/memory.hpp"
#include "transport/mapped/signal_block.hpp"
#include "transport/transport.hpp"

namespace weft {

class OwnRegions {
 public:
  OwnRegions() = default;
  OwnRegions(const OwnRegions&) = delete;
  OwnRegions& operator=(const OwnRegions&) = delete;
  ~OwnRegions();  // peers drop what they have mapped at their next import() or progress()

  void publish_in(const SignalBlock& signals) { signals_ = signals; }
  [[nodiscard]] Region add(Memory memory, uint64_t bytes, const Context& context);
  void remove(const RegionRef& region, const Context& context);
  [[nodiscard]] const Memory& at(uint32_t slot) const { return memories_.at(slot); }

 private:
  [[nodiscard]] uint32_t take_slot(const Context& context);
  SignalBlock signals_;
  std::map<uint32_t, Memory> memories_;    // by slot
  std::vector<uint32_t> last_generation_;  // [slots ever used]
  std::vector<uint32_t> free_slots_;
};

}  // namespace weft
