// SPDX-License-Identifier: Apache-2.0
#include "transport/peer/peer_memory.hpp"

#include <exception>
#include <span>
#include <thread>

#include "core/log.hpp"
#include "transport/peer/cuda_regions.hpp"
#include "transport/peer/peer_regions.hpp"

namespace weft {
namespace {

// How long a rank that ends waits for other processes to unmap its memory: CUDA does not say what
// becomes of memory that is freed before.
constexpr auto kFarewell = std::chrono::seconds(1);

}  // namespace

struct PeerMemory::State {
  State(const Group& group, int device, uint64_t control_bytes)
      : memory(group, device), regions(group, memory, control_bytes) {}

  CudaRegions memory;
  PeerRegions regions;
};

std::string PeerMemory::obstacle(const Group& group, int device) {
  std::string own = transport_obstacle("auto", group);
  const auto gpus = gather_identities(group, device);
  for (int rank = 0; rank < group.num_ranks() && own.empty(); ++rank) {
    own = reach_obstacle(
        gpus[static_cast<size_t>(group.rank())], gpus[static_cast<size_t>(rank)], rank
    );
  }
  if (own.empty() && group.num_ranks() > kMaxDomainRanks) {
    own = "too many ranks share GPU memory";
  }
  for (const Bytes& problem : group.all_gather(std::as_bytes(std::span(own)))) {
    if (!problem.empty()) {
      return {reinterpret_cast<const char*>(problem.data()), problem.size()};
    }
  }
  return {};
}

PeerMemory::PeerMemory(const Group& group, int device, uint64_t control_bytes)
    : state_(std::make_unique<State>(group, device, control_bytes)) {}

PeerMemory::~PeerMemory() {
  try {
    close();
    const auto deadline = std::chrono::steady_clock::now() + kFarewell;
    while (state_->memory.is_exported() && !state_->regions.is_unmapped_by_peers() &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (const std::exception& error) {
    log(LogLevel::kWarn, "peer memory: close: {}", error.what());
  }
}

PeerRegion PeerMemory::allocate(uint64_t bytes) {
  return state_->regions.allocate(bytes);
}

std::optional<PeerRegion> PeerMemory::allocate_reachable(
    uint64_t bytes, std::chrono::milliseconds at_most
) {
  return state_->regions.allocate_reachable(bytes, at_most);
}

void PeerMemory::release(const PeerRegion& region) {
  state_->regions.release(region);
}

bool PeerMemory::is_reachable(const PeerRegion& region) const {
  return state_->regions.is_reachable(region);
}

bool PeerMemory::wait_freed(std::chrono::milliseconds at_most) const {
  return state_->regions.wait_freed(at_most);
}

bool PeerMemory::wait_reachable(const PeerRegion& region, std::chrono::milliseconds at_most) const {
  return state_->regions.wait_reachable(region, at_most);
}

std::optional<PeerRegion> PeerMemory::find(const void* data, uint64_t bytes) const {
  return state_->regions.find(data, bytes);
}

const PeerRegion& PeerMemory::control() const {
  return state_->regions.control();
}

std::byte* PeerMemory::control_of(int rank) const {
  return state_->regions.control_of(rank);
}

std::byte* const* PeerMemory::table() const {
  return state_->memory.table();
}

std::string_view PeerMemory::how(int rank) const {
  return state_->memory.how(rank);
}

int PeerMemory::ranks_on_this_gpu() const {
  return state_->memory.ranks_on_this_gpu();
}

PeerState PeerMemory::peer_state(int rank) const {
  return state_->regions.peer_state(rank);
}

void PeerMemory::close() {
  state_->regions.close();
}

}  // namespace weft
