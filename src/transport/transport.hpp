// SPDX-License-Identifier: Apache-2.0
// How bytes reach a peer: one interface for every wire.
//
// A transport promises counts, not order: a put's signal grows by one after that put's own bytes
// are visible at the target, and nothing is said about other puts. Signals only ever grow.
// docs/adding_a_transport.md builds one step by step.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/clock.hpp"
#include "weft/group.hpp"
#include "weft/tensor.hpp"

namespace weft {

// Memory that peers may address, as told to peers; trivially copyable, travels between ranks.
struct RegionRef {
  uint32_t slot = 0;        // reused after release, then with another generation
  uint32_t generation = 0;  // 0: no region
  uint64_t bytes = 0;
  uint64_t cookie[4] = {};  // whatever the transport needs to reach it
};

struct Region {
  std::byte* data = nullptr;
  RegionRef ref = {};
};

// One contiguous write. Zero bytes is legal and still counts.
struct Put {
  const void* source = nullptr;
  uint64_t bytes = 0;
  uint32_t region = 0;  // slot of an imported region of the target rank
  uint32_t signal = 0;  // of the target rank, grows by one
  uint64_t offset = 0;  // in the region
};

enum class PeerState : uint8_t {
  kAlive,
  kLeft,  // closed its transport
  kDied,  // its process ended without closing
};

class Transport {
 public:
  virtual ~Transport() = default;  // closes, never throws
  [[nodiscard]] virtual std::string_view name() const = 0;

  // --- memory: one thread at a time ---
  // Returns memory, 64-byte aligned, contents undefined. Throws Error (kOutOfMemory).
  [[nodiscard]] virtual Region allocate(uint64_t bytes) = 0;
  // Makes memory of the caller's a region: peers that do not share memory with this rank may put
  // into it, this rank's puts may come out of it. The caller keeps the memory until it has released
  // the region, with no put out of it under way. A GPU's memory is touched only by the network.
  // Throws Error: kNotAvailable with lend_obstacle(), kOutOfMemory if the network refuses these
  // bytes, kInvalidArgument if a region holds some of them already.
  [[nodiscard]] virtual Region lend(std::byte* data, uint64_t bytes, const Device& device);
  // Returns why memory of this device cannot be lent; empty: it can. Most transports take none.
  [[nodiscard]] virtual std::string lend_obstacle(const Device& device) const;
  // Frees the region. The caller guarantees that no peer still writes there; peers unmap it later.
  virtual void release(const RegionRef& region) = 0;
  // Makes a peer's region (or this rank's own) reachable under its slot; cheap when it already is.
  // Throws LostPeerError (core/context.hpp) if the peer has released it.
  virtual void import(int rank, const RegionRef& region) = 0;

  // --- moving: any thread ---
  // Returns when the sources may be reused. Throws Error (kTransport, or kTimeout for a peer that
  // takes nothing) naming the rank; then nothing is promised of the puts. LostPeerError if the rank
  // has died, left or released the region.
  virtual void put(int rank, std::span<const Put> puts) = 0;
  // Raises a signal by `amount` after everything this thread wrote through mapped() before is
  // visible.
  virtual void raise(int rank, uint32_t signal, uint64_t amount) = 0;
  // Returns where this rank can store into an imported region itself; null if it cannot.
  [[nodiscard]] virtual std::byte* mapped(int rank, uint32_t region) const = 0;

  // --- waiting: any thread ---
  // Returns this rank's own signal; what its raises covered is visible to the caller (acquire).
  [[nodiscard]] virtual uint64_t signal_value(uint32_t signal) const = 0;
  // Drives transfers of transports that need it. This and park() throw Error (kTransport) for an
  // earlier put that has failed since it returned.
  virtual void progress() = 0;
  // A number that moves whenever a signal of this rank does; park() sleeps until it differs from
  // `seen` or time is up.
  [[nodiscard]] virtual uint32_t doorbell() const = 0;
  virtual void park(uint32_t seen, std::chrono::nanoseconds at_most) = 0;
  // Returns the time of park() and of deadlines. Only a simulation has a clock of its own.
  [[nodiscard]] virtual Clock::time_point now() const { return Clock::now(); }

  // --- life ---
  [[nodiscard]] virtual PeerState peer_state(int rank) const = 0;
  // Counts the rank as lost, whatever can be seen of it: nothing waits for it any more.
  virtual void give_up(int /*rank*/) {}
  // Tells peers that this rank leaves; a second call has no effect. Afterwards only peer_state(),
  // withdraw(), release() and destruction are legal.
  virtual void close() = 0;
  // After close(): keeps the network from writing into any region. Ranks that map memory still can.
  virtual void withdraw() {}
};

struct TransportOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  // of a put that its peer holds up
  // The ranks that are joined, ascending; empty: all. Others have blocks in no all_gather.
  std::vector<int> members = {};
  std::string device = {};  // PCI address of the GPU whose rows it carries; empty: there is none

  [[nodiscard]] bool has(int rank) const {
    return members.empty() || std::ranges::binary_search(members, rank);
  }
};

// Collective. `name` is "auto" (the cheapest that reaches all ranks), one of transport_names(), or
// "domains:" or "ofi:" with a provider of libfabric ("ofi:tcp"). Each rank gets `num_signals`
// signals, all zero. Throws Error (kNotAvailable) saying why on every rank. Tests may also ask for
// "faulty:<name>?delay=0.2&...", see faulty/faulty_transport.hpp.
[[nodiscard]] std::unique_ptr<Transport> make_transport(
    std::string_view name,
    const Group& group,
    uint32_t num_signals,
    const TransportOptions& options = {}
);
using TransportMaker = std::function<std::unique_ptr<Transport>(
    std::string_view name, const Group& group, uint32_t num_signals, const TransportOptions& options
)>;

// Returns every name that this build knows, best first.
[[nodiscard]] std::vector<std::string> transport_names();
// Returns why the transport cannot join these ranks; empty: it can.
[[nodiscard]] std::string transport_obstacle(std::string_view name, const Group& group);

}  // namespace weft
