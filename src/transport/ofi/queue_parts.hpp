// SPDX-License-Identifier: Apache-2.0
// What a queue is made of; for its own source files alone.
#pragma once

#include <memory>
#include <sys/mman.h>

#include "group/map_pages.hpp"
#include "transport/ofi/queue.hpp"

namespace weft::ofi {

constexpr uint64_t kRingBytes = uint64_t{4} << 20;  // copies in flight
constexpr size_t kMessageBytes = 64;                // a receive buffer, on a cache line of its own

// libfabric may keep its notes in the first member while the operation flies.
struct Queue::Operation {
  fi_context2 notes = {};
  int rank = 0;
  const char* call = "";
  bool has_room = false;
  BounceRing::Block block;
  Pending pending;
};

struct Queue::Receive {
  fi_context2 notes = {};
  std::byte* data = nullptr;
};

struct Queue::Space {
  static constexpr uint64_t kBytes = kRingBytes + kNumReceives * kMessageBytes;

  explicit Space(Fabric& fabric)
      : data(map_pages(-1, kBytes, ErrorCode::kOutOfMemory), [](std::byte* at) {
          ::munmap(at, kBytes);
        }) {
    if (fabric.needs_local()) {
      const uint64_t access = FI_SEND | FI_RECV | FI_WRITE;
      memory = fabric.add_memory({.data = data.get(), .bytes = kBytes}, access, nullptr);
      descriptor = fi_mr_desc(memory.get());
    }
  }

  std::unique_ptr<std::byte, void (*)(std::byte*)> data;
  Owned<fid_mr> memory;
  void* descriptor = nullptr;
};

}  // namespace weft::ofi
