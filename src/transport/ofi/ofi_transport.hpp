// SPDX-License-Identifier: Apache-2.0
// Puts are writes of libfabric whose data names the signal; between the ranks of a domain they are
// plain copies. ofi_open.cpp has set-up, ofi_put.cpp moving, ofi_transport.cpp the rest.
//
// Memory, signals and the ranks of this rank's domain are a MappedTransport's. This class
// registers that memory with the fabric and raises the same signals for what comes over it, so a
// signal grows from either side and there is one doorbell to wait for.
//
// Order. A put over the fabric is one write that carries its signal, so the signal is seen with
// that write's bytes or after them, on fabrics without order too. A put too large for that goes in
// pieces: the last one is posted when all others have been delivered, and only it carries the
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
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "core/clock.hpp"
#include "transport/mapped/mapped_transport.hpp"
#include "transport/mapped/signal_block.hpp"
#include "transport/ofi/fabric/fabric.hpp"
#include "transport/ofi/fabric/queue.hpp"
#include "transport/ofi/peers.hpp"
#include "transport/ofi/progress_thread.hpp"
#include "transport/ofi/regions.hpp"
#include "transport/transport.hpp"

namespace weft::ofi {

// Closes endpoints of a process together, when the last transport of a session there ends, for
// providers that share memory between them: an endpoint that closes takes its memory away under one
// that still looks at it.
class Closing {
 public:
  // Returns one object for all ranks of `session` in this process. Any thread.
  [[nodiscard]] static std::shared_ptr<Closing> join(uint64_t session);
  // Keeps queues that no thread polls any more until the last holder of this object is gone.
  void keep(std::vector<std::unique_ptr<Queue>> queues);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Queue>> queues_;
};

class OfiTransport final : public Transport, private QueueEvents {
 public:
  // Collective. With `shares_memory`, this rank reaches those of its domain without the fabric.
  // Throws the same Error on every rank.
  OfiTransport(
      const Group& group,
      uint32_t num_signals,
      const TransportOptions& options,
      std::string_view kind,
      bool shares_memory
  );
  ~OfiTransport() override;
  OfiTransport(const OfiTransport&) = delete;
  OfiTransport& operator=(const OfiTransport&) = delete;

  [[nodiscard]] std::string_view name() const override { return context_.transport; }
  [[nodiscard]] Region allocate(uint64_t bytes) override {
    return with_fabric(neighbours_->allocate(bytes), {});
  }
  [[nodiscard]] Region lend(std::byte* data, uint64_t bytes, const Device& device) override;
  [[nodiscard]] std::string lend_obstacle(const Device& device) const override;
  void release(const RegionRef& region) override;
  void import(int rank, const RegionRef& region) override;
  void put(int rank, std::span<const Put> puts) override;
  void raise(int rank, uint32_t signal, uint64_t amount) override;
  [[nodiscard]] std::byte* mapped(int rank, uint32_t region) const override;
  [[nodiscard]] uint64_t signal_value(uint32_t signal) const override {
    return neighbours_->signal_value(signal);
  }
  void progress() override;
  [[nodiscard]] uint32_t doorbell() const override { return own_.doorbell(); }
  void park(uint32_t seen, std::chrono::nanoseconds at_most) override;
  [[nodiscard]] PeerState peer_state(int rank) const override;
  void give_up(int rank) override { hear_of_death(rank); }
  void close() override;
  void withdraw() override { local_->withdraw(); }

 private:
  // How an attempt ended that is repeated until the fabric takes it.
  enum class Outcome : uint8_t { kDone, kGone, kFailed, kLate };

  void open(const Group& group, std::string_view kind, const TransportOptions& options);
  [[nodiscard]] Message message(MessageKind kind, uint64_t a = 0, uint64_t b = 0) const;
  void connect(int rank, const Bytes& packed, const std::string& host, bool is_first);
  void greet_all();

  void on_put(uint64_t immediate) override;
  void on_message(const Message& message) override;
  void on_failure(int rank, const char* call, int error) override;
  void on_batch_end() override;
  void note_news() {
    has_news_.store(true, std::memory_order_release);  // pairs with on_batch_end() of any queue
  }
  [[nodiscard]] Region with_fabric(Region region, std::optional<Device> lent_from);

  // --- ofi_put.cpp ---
  using Source = LocalRegions::Source;
  // One of this rank's queues and the rank at its other end.
  struct Way {
    Queue& queue;
    int rank;
  };
  [[nodiscard]] Way way_to(int rank);
  [[nodiscard]] Clock::time_point until() const { return Clock::now() + timeout_; }
  [[nodiscard]] std::span<const Put> next_batch(std::span<const Put> puts) const;
  [[nodiscard]] Source source_of(const Put& put) const;
  void send_pieces(const Way& way, const Put& put, const Source& source);
  [[nodiscard]] Write write_to(int rank, const Put& put, uint64_t amount) const;
  // Posts one write of a batch: copies of its puts or, with `direct`, its only put from its place.
  void post_write(
      const Way& way,
      std::span<const Put> batch,
      Write write,
      const Source* direct,
      const Pending& pending
  );
  void require(Outcome outcome, int rank) const;
  // Returns `result`, what the fabric said when it was given something for `rank`, and notes that
  // the rank answers if it is 0.
  [[nodiscard]] int64_t noted(int rank, int64_t result) const;
  // Repeats `attempt`, which returns 0 (kDone), -FI_EAGAIN, kNoRoom or libfabric's error.
  template <class Attempt>
  Outcome persist(const Way& way, Clock::time_point deadline, const Attempt& attempt);
  Outcome send(
      const Way& way,
      const Message& message,
      Clock::time_point deadline,
      const Pending& pending = nullptr
  );
  // Waits until all operations that `pending` counts have ended.
  Outcome await(const Way& way, const Pending& pending);

  void poll_until_quiet() const;
  void hear_of_death(int rank) const;
  void hear_neighbours() const;
  [[nodiscard]] int find_dead() const;
  void ping(int rank) const;
  void note_silence(int rank) const;
  void knock_at(int rank) const;
  void remove_files_of(int rank) const;
  void throw_failure() const;

  // The rank is reached over the fabric.
  [[nodiscard]] bool is_remote(int rank) const { return !neighbours_->has_member(rank); }

  Context context_;
  bool shares_memory_;
  uint32_t num_signals_;
  std::chrono::milliseconds timeout_;
  std::chrono::nanoseconds spin_;  // before sleeping in park()

  uint64_t session_ = 0;                       // until set-up is over: this rank's proposal
  std::shared_ptr<Closing> closing_;           // null where endpoints may close on their own
  std::vector<std::vector<Bytes>> addresses_;  // [num_ranks][num_queues]

  std::unique_ptr<MappedTransport> neighbours_;
  SignalBlock own_;  // of neighbours_
  std::shared_ptr<Fabric> fabric_;
  std::unique_ptr<Immediate> immediate_;
  std::unique_ptr<Peers> peers_;
  std::vector<std::unique_ptr<RemoteRegions>> remote_;  // [num_ranks], used for remote ones
  std::vector<std::unique_ptr<Queue>> queues_;
  std::unique_ptr<LocalRegions> local_;
  std::atomic<bool> has_news_ = false;
  bool is_closed_ = false;
  std::vector<std::unique_ptr<ProgressThread>> threads_;  // by queue; last: stop before all else
};

}  // namespace weft::ofi
