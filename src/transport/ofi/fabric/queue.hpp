// SPDX-License-Identifier: Apache-2.0
// One endpoint with its completion queue, its addresses and a bounded number of operations in
// flight. Nothing here waits; who finds no room polls and tries again.
//
// An operation: start() takes it and room for a copy, post() gives it to libfabric, its completion
// gives both back. post() refused: abandon() or try again.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/check.hpp"
#include "transport/ofi/bounce_ring.hpp"
#include "transport/ofi/fabric.hpp"
#include "transport/ofi/message.hpp"
#include "weft/group.hpp"

namespace weft::ofi {

constexpr size_t kMaxFlying = 256;    // operations in flight of a queue
constexpr size_t kNumReceives = 128;  // messages that may come to a queue between two polls

// What a queue finds out while it is polled. Called with the queue locked: be quick, never call it.
class QueueEvents {
 public:
  virtual void on_put(uint64_t immediate) = 0;
  virtual void on_message(const Message& message) = 0;
  // An operation to `rank` failed (-1: the queue itself).
  virtual void on_failure(int rank, const char* call, int error) = 0;
  // After some of these, before the queue is unlocked.
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
  // An operation to `rank` with `bytes` of room for a copy; null: not now.
  [[nodiscard]] Operation* start(int rank, uint64_t bytes, Pending pending = nullptr);
  [[nodiscard]] std::byte* room(const Operation& operation) const;
  [[nodiscard]] void* room_descriptor() const;
  // 0, or libfabric's negative error; -FI_EAGAIN: not now.
  [[nodiscard]] int64_t post(Operation& operation, const Write& write);
  [[nodiscard]] int64_t post(Operation& operation, const Message& message);
  void abandon(Operation& operation);

  // Handles what has completed or come; returns how much that was.
  size_t poll();
  // The same, but 0 at once while another thread polls or posts.
  size_t try_poll();
  // Nothing will be handled any more, for this reason.
  void break_off(const char* call, int error);
  // Calls of poll() and try_poll() so far; wraps.
  [[nodiscard]] uint32_t num_polls() const { return num_polls_.load(std::memory_order_relaxed); }
  // Operations in flight.
  [[nodiscard]] uint32_t num_flying() const;
  [[nodiscard]] uint32_t num_flying_to(int rank) const;

  // --- for the progress thread ---
  // To wait for with poll(2), -1 if the provider has none.
  [[nodiscard]] int descriptor() const { return descriptor_; }
  // Whether waiting for the descriptor is safe now.
  [[nodiscard]] bool may_sleep();

 private:
  struct Receive;
  struct Space;  // registered memory for copies and received messages

  void open();
  // With mutex_ held:
  void give_back(Operation& operation);
  void post_receive(Receive& receive);
  size_t read_completions();
  void handle(const fi_cq_data_entry& entry);
  void handle_error();
  void finish(Operation& operation);
  [[nodiscard]] Operation* operation_at(void* context);
  [[nodiscard]] Receive* receive_at(void* context);
  [[nodiscard]] fi_addr_t target(const Operation& operation) const;

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
  BounceRing ring_;
  std::vector<Operation> operations_;
  std::vector<Operation*> idle_;
  std::vector<Receive> receives_;
  std::vector<Receive*> unposted_;
  bool is_broken_ = false;
};

}  // namespace weft::ofi
