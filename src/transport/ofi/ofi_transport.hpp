// SPDX-License-Identifier: Apache-2.0
// Puts as writes of libfabric whose data names the signal, and plain copies between the ranks of a
// domain. Set-up is in ofi_open.cpp, moving in ofi_put.cpp and ofi_wait.cpp, leaving in
// ofi_life.cpp, the rest in ofi_transport.cpp.
//
// Memory, signals and the ranks of this rank's domain are a MappedTransport's. This class
// registers that memory with the fabric and raises the same signals for what comes over it, so a
// signal grows from either side and there is one doorbell to wait for.
//
// Order. A put over the fabric is one write that carries its signal, so the signal is seen with
// that write's bytes or after them, on fabrics without order too. A put too large for that goes in
// pieces: the last one is posted when all others have been delivered, and it alone carries the
// signal.
//
// Three hand-overs inside a rank:
//   1. on_put(): signal += n (release)        with  signal_value(): load (acquire), like the raises
//      of ranks that map the signal; all are additions, so one load acquires them all.
//   2. on_batch_end(): doorbell               with  doorbell(), park(); see signal_block.hpp.
//   3. Queue::finish(): pending -= 1 (release) with  await(): load (acquire).
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "transport/mapped/mapped_transport.hpp"
#include "transport/mapped/signal_block.hpp"
#include "transport/ofi/closing.hpp"
#include "transport/ofi/fabric.hpp"
#include "transport/ofi/immediate.hpp"
#include "transport/ofi/local_regions.hpp"
#include "transport/ofi/peers.hpp"
#include "transport/ofi/progress_thread.hpp"
#include "transport/ofi/queue.hpp"
#include "transport/ofi/remote_regions.hpp"
#include "transport/ofi/select.hpp"
#include "transport/transport.hpp"

namespace weft::ofi {

// The ranks that are reached without the fabric.
struct Neighbours {
  std::string_view transport;  // name of the whole, a literal
  std::unique_ptr<MemorySource> memory;
  std::vector<int> ranks;     // this one included
  bool hides_memory = false;  // mapped() is null for all of them
};

class OfiTransport final : public Transport, private QueueEvents {
 public:
  // Collective. Throws the same Error on every rank.
  OfiTransport(
      const Group& group,
      Neighbours neighbours,
      uint32_t num_signals,
      const TransportOptions& options,
      std::string_view kind
  );
  ~OfiTransport() override;
  OfiTransport(const OfiTransport&) = delete;
  OfiTransport& operator=(const OfiTransport&) = delete;

  [[nodiscard]] std::string_view name() const override { return context_.transport; }
  [[nodiscard]] Region allocate(uint64_t bytes) override;
  [[nodiscard]] Region lend(std::byte* data, uint64_t bytes, const Device& device) override;
  [[nodiscard]] std::string lend_obstacle(const Device& device) const override;
  void release(const RegionRef& region) override;
  void import(int rank, const RegionRef& region) override;
  void put(int rank, std::span<const Put> puts) override;
  void raise(int rank, uint32_t signal, uint64_t amount) override;
  [[nodiscard]] std::byte* mapped(int rank, uint32_t region) const override;
  [[nodiscard]] uint64_t signal_value(uint32_t signal) const override;
  void progress() override;
  [[nodiscard]] uint32_t doorbell() const override;
  void park(uint32_t seen, std::chrono::nanoseconds at_most) override;
  [[nodiscard]] PeerState peer_state(int rank) const override;
  void close() override;

 private:
  using Clock = std::chrono::steady_clock;
  // How an attempt ended that is repeated until the fabric takes it.
  enum class Outcome : uint8_t { kDone, kGone, kFailed, kLate };

  void open(
      const Group& group, Neighbours neighbours, std::string_view kind, std::string_view device
  );
  [[nodiscard]] Bytes make_hello() const;
  [[nodiscard]] Message message(MessageKind kind, uint64_t a = 0, uint64_t b = 0) const;
  void connect(int rank, const Bytes& hello, const std::string& host);
  void greet_all();

  void on_put(uint64_t immediate) override;
  void on_message(const Message& message) override;
  void on_failure(int rank, const char* call, int error) override;
  void on_batch_end() override;
  void note_news();

  // ofi_put.cpp
  [[nodiscard]] std::span<const Put> next_batch(std::span<const Put> puts) const;
  void send_copy(Queue& queue, int rank, std::span<const Put> batch);
  using Source = LocalRegions::Source;
  [[nodiscard]] Source source_of(const Put& put) const;
  void send_pieces(Queue& queue, int rank, const Put& put, const Source& source);
  [[nodiscard]] Write write_to(int rank, const Put& put) const;
  [[nodiscard]] Write signalling_write_to(int rank, const Put& put, size_t amount) const;
  void post_copy(
      Queue& queue, int rank, std::span<const Put> batch, Write write, const Pending& pending
  );
  // From where it lies.
  void post_direct(
      Queue& queue,
      int rank,
      const Put& put,
      Write write,
      const Source& source,
      const Pending& pending
  );
  [[nodiscard]] Queue& pick_queue();

  // ofi_wait.cpp
  void post(Queue& queue, int rank, Queue::Operation& operation, const Write& write);
  void require(Outcome outcome, int rank) const;
  // `attempt` returns 0, -FI_EAGAIN or libfabric's error; kDone is what is left.
  template <class Attempt>
  Outcome persist(Queue& queue, int rank, Clock::time_point deadline, const Attempt& attempt);
  Outcome start(
      Queue& queue,
      int rank,
      uint64_t bytes,
      Clock::time_point deadline,
      Queue::Operation*& operation,
      Pending pending = nullptr
  );
  Outcome send(
      Queue& queue,
      int rank,
      const Message& message,
      Clock::time_point deadline,
      const Pending& pending = nullptr
  );
  // Until all of them have ended.
  Outcome await(Queue& queue, int rank, const Pending& pending);

  void poll_until_quiet() const;
  static void poll_until_quiet(Queue& queue);
  void ping(int rank) const;
  void knock_at(int rank) const;
  void remove_files_of(int rank) const;
  void throw_failure() const;

  // Over the fabric.
  [[nodiscard]] bool is_far(int rank) const { return !near_->has_member(rank); }

  Context context_;
  bool hides_memory_;
  int rank_;
  int num_ranks_;
  uint32_t num_signals_;
  std::chrono::milliseconds timeout_;
  std::chrono::nanoseconds spin_;  // before sleeping in park()

  uint64_t session_ = 0;                       // until set-up is over: this rank's proposal
  std::shared_ptr<Closing> closing_;           // null where endpoints may close alone
  std::vector<std::vector<Bytes>> addresses_;  // [num_ranks][num_queues]

  std::unique_ptr<MappedTransport> near_;
  SignalBlock own_;  // near_'s
  std::shared_ptr<Fabric> fabric_;
  std::unique_ptr<Immediate> immediate_;
  std::unique_ptr<Peers> peers_;
  std::vector<std::unique_ptr<RemoteRegions>> remote_;  // [num_ranks], used for far ones
  std::vector<std::unique_ptr<Queue>> queues_;
  std::unique_ptr<LocalRegions> local_;
  std::atomic<bool> has_news_ = false;
  bool is_closed_ = false;
  std::vector<std::unique_ptr<ProgressThread>> threads_;  // by queue; last: stop before all else
};

}  // namespace weft::ofi
