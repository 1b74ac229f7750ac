// SPDX-License-Identifier: Apache-2.0
// One endpoint of libfabric with everything it needs: what travels with writes and messages, room
// for copies, and operations in flight.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <vector>

#include "core/check.hpp"
#include "transport/ofi/fabric/fabric.hpp"
#include "weft/group.hpp"

namespace weft::ofi {

// The data that travels with a write and tells the target which signal grows by how much.
//
//   bit 0 ........ signal_bits ............... 31 or 63
//   | signal       | amount                          |
class Immediate {
 public:
  // `data_bytes`: what the provider carries with a write, at least 4.
  Immediate(uint32_t num_signals, size_t data_bytes)
      : signal_bits_(static_cast<unsigned>(std::bit_width(num_signals))),
        amount_bits_(data_bytes >= 8 ? 32U : 32U - signal_bits_) {}

  // Returns how many puts one write may stand for; 0: the signals do not fit.
  [[nodiscard]] uint64_t max_amount() const { return (uint64_t{1} << amount_bits_) - 1; }
  [[nodiscard]] uint64_t encode(uint32_t signal, uint64_t amount) const {
    return signal | (amount << signal_bits_);
  }
  [[nodiscard]] uint32_t signal(uint64_t data) const {
    return static_cast<uint32_t>(data & ((uint64_t{1} << signal_bits_) - 1));
  }
  [[nodiscard]] uint64_t amount(uint64_t data) const {
    return (data >> signal_bits_) & max_amount();
  }

 private:
  unsigned signal_bits_;
  unsigned amount_bits_;
};

// Kinds of messages that ranks send in addition to the bytes of puts. All ranks run the same build,
// so a Message travels as it is.
enum class MessageKind : uint32_t {
  kRaise,     // signal a grows by b
  kReleased,  // region a, generation b of the sender is gone
  kLeft,      // the sender has said all it had to say on this queue; a - 1 died before, if a > 0
  kPing,      // nothing; that it was delivered is the news
};

struct Message {
  MessageKind kind = MessageKind::kPing;
  uint32_t from = 0;
  uint64_t session = 0;  // of this set of ranks; a stranger's is another
  uint64_t a = 0;
  uint64_t b = 0;
};

// Room for copies of what is being sent, handed out and given back in any order. One thread at a
// time.
class BounceRoom {
 public:
  explicit BounceRoom(uint64_t bytes) : bytes_(bytes) {}
  // Returns the offset of `bytes` in one piece, at a multiple of 64; empty: no room now. More than
  // the whole room never fits.
  [[nodiscard]] std::optional<uint64_t> take(uint64_t bytes);
  void give_back(uint64_t offset) { taken_.erase(offset); }

 private:
  uint64_t bytes_;
  std::map<uint64_t, uint64_t> taken_;  // ends by offset
};

constexpr size_t kMaxFlying = 256;    // operations in flight of a queue
constexpr size_t kNumReceives = 128;  // messages that may come to a queue between two polls

// Receiver of what a queue finds out while it is polled. Called with the queue locked: be quick,
// never call the queue.
class QueueEvents {
 public:
  virtual void on_put(uint64_t immediate) = 0;
  virtual void on_message(const Message& message) = 0;
  // An operation to `rank` failed (-1: the queue itself).
  virtual void on_failure(int rank, const char* call, int error) = 0;
  // Is called after some of the others, before the queue is unlocked.
  virtual void on_batch_end() = 0;

 protected:
  ~QueueEvents() = default;
};

// Counts the operations that its owner waits for.
using Pending = std::shared_ptr<std::atomic<uint32_t>>;

struct Write {
  const void* source = nullptr;
  uint64_t bytes = 0;
  void* descriptor = nullptr;  // of the source, where it must be registered
  uint64_t address = 0;        // at the target
  uint64_t key = 0;
  bool has_immediate = false;
  uint64_t immediate = 0;
  uint64_t completion = 0;  // FI_TRANSMIT_COMPLETE or FI_DELIVERY_COMPLETE
};

// One endpoint with its completion queue, its addresses and a bounded number of operations in
// flight. Nothing here waits; a caller that finds no room polls and tries again.
//
// start() takes an operation and room for a copy, post() gives it to libfabric, and its completion
// gives both back. If post() refuses it, abandon() it or try again. send() does all of this at
// once.
class Queue {
 public:
  struct Operation;

  Queue(std::shared_ptr<Fabric> fabric, QueueEvents& events, int num_ranks);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // --- set-up, one thread ---
  [[nodiscard]] Bytes address() const;
  void connect(int rank, const Bytes& address);
  [[nodiscard]] fid_ep* endpoint() const { return endpoint_.get(); }

  // --- any thread ---
  // Takes an operation to `rank` with `bytes` of room for a copy; null: not now.
  [[nodiscard]] Operation* start(int rank, uint64_t bytes, Pending pending = nullptr);
  [[nodiscard]] std::byte* room(const Operation& operation) const;
  [[nodiscard]] void* room_descriptor() const;
  // Returns 0, or libfabric's negative error; -FI_EAGAIN: not now.
  [[nodiscard]] int64_t post(Operation& operation, const Write& write);
  void abandon(Operation& operation);
  static constexpr int64_t kNoRoom = 1;  // too much is in flight
  // Returns what post() would, or kNoRoom.
  [[nodiscard]] int64_t send(int rank, const Message& message, Pending pending = nullptr);

  // Handles what has completed or come; returns how much that was.
  size_t poll();
  // Does the same, but returns 0 at once while another thread polls or posts.
  size_t try_poll();
  // Makes the queue handle nothing any more, and gives the reason to `events`.
  void break_off(const char* call, int error);
  // Calls of poll() and try_poll() so far; wraps.
  [[nodiscard]] uint32_t num_polls() const { return num_polls_.load(std::memory_order_relaxed); }
  // Returns how many operations are in flight.
  [[nodiscard]] uint32_t num_flying() const {
    return std::accumulate(flying_to_.begin(), flying_to_.end(), 0U);
  }
  [[nodiscard]] uint32_t num_flying_to(int rank) const {
    return flying_to_[static_cast<size_t>(rank)].load(std::memory_order_relaxed);
  }

  // --- for the progress thread ---
  // Returns the descriptor to wait for with poll(2), -1 if the provider has none.
  [[nodiscard]] int descriptor() const { return descriptor_; }
  // Returns whether waiting for the descriptor is safe now.
  [[nodiscard]] bool may_sleep();

 private:
  struct Receive;
  struct Space;  // registered memory for copies and received messages

  void open();
  int open_endpoint();  // -> fi_enable's result
  // With mutex_ held:
  Operation* take(int rank, uint64_t bytes, Pending pending);
  int64_t note_posted(Operation& operation, const char* call, int64_t result);
  void give_back(Operation& operation);
  void post_receive(Receive& receive);
  size_t read_completions();
  void handle(const fi_cq_data_entry& entry);
  void handle_error();
  void finish(Operation& operation);

  std::shared_ptr<Fabric> fabric_;
  QueueEvents& events_;
  std::unique_ptr<Space> space_;
  Owned<fid_av> addresses_;
  Owned<fid_cq> completions_;
  Owned<fid_ep> endpoint_;  // closed first
  int descriptor_ = -1;
  std::vector<fi_addr_t> targets_;                // [num_ranks]
  std::vector<std::atomic<uint32_t>> flying_to_;  // [num_ranks]
  std::atomic<uint32_t> num_polls_ = 0;

  std::mutex mutex_;  // guards what follows and all calls of libfabric on this endpoint
  BounceRoom bounce_;
  std::vector<Operation> operations_;
  std::vector<Operation*> idle_;
  std::vector<Receive> receives_;
  std::vector<Receive*> unposted_;
  bool is_broken_ = false;
};

}  // namespace weft::ofi
