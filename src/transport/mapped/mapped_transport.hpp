// SPDX-License-Identifier: Apache-2.0
// A transport over memory that every rank maps: puts are copies, signals are atomic additions.
// loopback and shm are this class over two sources of memory; transports domains and ofi have one
// for the ranks that share memory. See signal_block.hpp for the order.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "core/check.hpp"
#include "group/process_watch.hpp"
#include "transport/mapped/memory.hpp"
#include "transport/mapped/signal_block.hpp"
#include "transport/transport.hpp"

namespace weft {

// The regions that this rank allocated. Their generations stand in the signal block, where peers
// see what is alive. One thread at a time.
class OwnRegions {
 public:
  OwnRegions() = default;
  OwnRegions(const OwnRegions&) = delete;
  OwnRegions& operator=(const OwnRegions&) = delete;
  ~OwnRegions();  // peers drop what they have mapped at their next import()

  void publish_in(const SignalBlock& signals) { signals_ = signals; }
  [[nodiscard]] Region add(Memory memory, uint64_t bytes, const Context& context);
  void remove(const RegionRef& region, const Context& context);
  [[nodiscard]] const Memory& at(uint32_t slot) const { return memories_.at(slot); }

 private:
  SignalBlock signals_;
  std::map<uint32_t, Memory> memories_;  // by slot
  uint32_t last_generation_ = 0;
};

// The regions of one rank that this rank has imported. Looked up by any thread without a
// lock, changed by one thread at a time. A region that its owner released is dropped when this rank
// imports another one, which it does while none of its workers moves bytes, so no lookup races with
// its own region's end.
class RegionTable {
 public:
  struct View {
    std::byte* data = nullptr;
    uint64_t bytes = 0;
    uint32_t generation = 0;  // 0: nothing imported
  };

  // --- any thread ---
  [[nodiscard]] View find(uint32_t slot) const;

  // --- one thread at a time ---
  void insert(uint32_t slot, uint32_t generation, Memory memory);
  void erase(uint32_t slot);
  // Drops what the owner of these regions has released since the last call.
  void drop_released(const SignalBlock& owner);

 private:
  struct Entry {
    std::atomic<std::byte*> data = nullptr;
    std::atomic<uint64_t> bytes = 0;
    std::atomic<uint32_t> generation = 0;
    std::shared_ptr<void> owner;
  };
  // Made on first use, so that an idle table costs little; never freed before the table.
  static constexpr uint32_t kPageSlots = 64;
  struct Page {
    std::array<Entry, kPageSlots> entries;
  };
  [[nodiscard]] Entry* entry(uint32_t slot) const;

  std::array<std::atomic<Page*>, kMaxRegions / kPageSlots> pages_ = {};
  std::array<std::unique_ptr<Page>, kMaxRegions / kPageSlots> page_owners_;
  std::set<uint32_t> slots_;  // imported
  uint32_t seen_releases_ = 0;
};

class MappedTransport final : public Transport {
 public:
  // Collective over the group. Joins this rank with `members`, itself included; empty: all. Throws
  // the same Error on every rank if any rank cannot reach a member.
  MappedTransport(
      std::unique_ptr<MemorySource> source,
      const Group& group,
      uint32_t num_signals,
      std::span<const int> members = {}
  );
  ~MappedTransport() override { close(); }
  MappedTransport(const MappedTransport&) = delete;
  MappedTransport& operator=(const MappedTransport&) = delete;

  // Returns whether `rank` is a member; all other calls are only for members.
  [[nodiscard]] bool has_member(int rank) const {
    return rank >= 0 && rank < context_.num_ranks && peers_[static_cast<size_t>(rank)] != nullptr;
  }
  // Block of this rank's signals, for code that raises them by other means.
  [[nodiscard]] const SignalBlock& signals() const { return own_; }

  [[nodiscard]] std::string_view name() const override { return context_.transport; }
  [[nodiscard]] Region allocate(uint64_t bytes) override;
  // Adds a region as Transport::lend() does, for a network that works beside this transport:
  // members cannot reach it.
  [[nodiscard]] Region add_lent(std::byte* data, uint64_t bytes);
  void release(const RegionRef& region) override;
  void import(int rank, const RegionRef& region) override;
  void put(int rank, std::span<const Put> puts) override;
  void raise(int rank, uint32_t signal, uint64_t amount) override;
  [[nodiscard]] std::byte* mapped(int rank, uint32_t region) const override;
  [[nodiscard]] uint64_t signal_value(uint32_t signal) const override;
  // Copies need no help. What a peer has released stays mapped until the next import(): where the
  // peer gave up and this rank is only late, other workers may be copying there.
  void progress() override {}
  [[nodiscard]] uint32_t doorbell() const override { return own_.doorbell(); }
  void park(uint32_t seen, std::chrono::nanoseconds at_most) override;
  [[nodiscard]] PeerState peer_state(int rank) const override;
  void close() override { leave(-1); }
  // Closes, and tells the members that rank `dead` has died, a member or not; -1: none.
  void leave(int dead);
  // Returns the rank of whose death `rank` told when it left; -1: none.
  [[nodiscard]] int death_told_by(int rank) const {
    return peer("death_told_by", rank).signals.told_death();
  }

 private:
  struct Peer {
    Memory memory;
    SignalBlock signals;
    ProcessWatch watch;
    RegionTable regions;  // of that rank, imported here
  };
  [[nodiscard]] Peer& peer(std::string_view verb, int rank) const;
  void connect(int rank, const Bytes& block);

  std::unique_ptr<MemorySource> source_;
  Context context_;
  uint32_t num_signals_;
  std::chrono::nanoseconds spin_;             // before sleeping in park()
  std::vector<std::unique_ptr<Peer>> peers_;  // [num_ranks], this rank included; null: no member
  SignalBlock own_;

  std::mutex memory_mutex_;  // guards own_regions_ and every change of a RegionTable
  OwnRegions own_regions_;
  bool is_closed_ = false;
};

}  // namespace weft
