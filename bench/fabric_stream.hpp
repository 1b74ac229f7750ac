// SPDX-License-Identifier: Apache-2.0
// A plain stream of libfabric writes between two ranks, as short as it can be written: one
// endpoint, a window of writes in flight, both sides polling. What transport ofi is measured
// against.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/ofi/fabric/fabric.hpp"
#include "weft/group.hpp"

namespace weft::bench {

class FabricStream {
 public:
  // Collective, two ranks: rank 0 will write, rank 1 has `bytes` of memory for it.
  FabricStream(const Group& group, ofi::Fabric& fabric, uint64_t bytes);

  // Collective: `count` writes of `bytes` each, one behind the other in the target, from the start
  // again at its end. Returns when all have left (rank 0) or come (rank 1).
  void run(uint64_t bytes, uint64_t count);

 private:
  static constexpr size_t kWindow = 64;

  void write(uint64_t bytes, uint64_t index);
  // Number of events.
  uint64_t poll();

  ofi::Fabric& fabric_;
  bool is_writer_;
  std::vector<std::byte> memory_;
  ofi::Owned<fid_mr> registration_;
  ofi::Owned<fid_av> addresses_;
  ofi::Owned<fid_cq> completions_;
  ofi::Owned<fid_ep> endpoint_;
  fi_addr_t target_ = FI_ADDR_NOTAVAIL;
  uint64_t base_ = 0;  // of the target's memory
  uint64_t key_ = 0;
  uint64_t num_left_ = 0;  // events that a write found while it tried again
  std::array<fi_context2, kWindow> notes_ = {};
  fi_context2 receive_notes_ = {};
  std::array<std::byte, 64> receive_room_ = {};
};

}  // namespace weft::bench
