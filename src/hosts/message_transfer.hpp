// SPDX-License-Identifier: Apache-2.0
// Moves messages between this rank and other domains, in both directions at once, by the calling
// thread: each is put as soon as it is packed and handed over as soon as it has come. Also the
// counts of messages that have come, which the GPU reads, and the thread that does all this.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "core/check.hpp"
#include "cpu/protocol/call_board.hpp"
#include "cpu/protocol/waiter.hpp"
#include "hosts/message_format.hpp"
#include "transport/transport.hpp"

namespace weft {

// Sends `count` rows to a peer. Message c raises `first_signal` + c there.
struct MessageSend {
  int to = 0;
  int64_t count = 0;
  Target target;
  uint32_t first_signal = 0;
  const std::byte* messages = nullptr;  // c at c * format.stride()
  const uint32_t* done = nullptr;       // [num chunks] is `number` once a message is packed
  uint32_t number = 0;
};

struct MessageReceive {
  int from = 0;
  int64_t count = 0;
  uint32_t first_signal = 0;
};

// Counts messages that have come. Copies of messages are queued before these have come, and wait
// for the counts. The caller says how many are expected; the thread that receives them counts.
class MessageCounts {
 public:
  // One count for each place, from 0; they go on from call to call, beyond 2^32 from 0 again.
  explicit MessageCounts(std::span<uint32_t> counts) : counts_(counts), expected_(counts.size()) {}

  // The caller expects `count` more; returns the count before them.
  uint32_t expect(size_t place, int64_t count) {
    const uint32_t before = expected_[place];
    expected_[place] += static_cast<uint32_t>(count);
    return before;
  }
  // The receiver sets the count: so many messages can be read, or will never come.
  void set(size_t place, uint32_t count) {
    std::atomic_ref(counts_[place]).store(count, std::memory_order_release);
  }
  // Any thread: returns whether the count at `place` is `count` or beyond.
  [[nodiscard]] bool has_reached(size_t place, uint32_t count) const {
    const uint32_t now = std::atomic_ref(counts_[place]).load(std::memory_order_acquire);
    return static_cast<int32_t>(now - count) >= 0;
  }
  // Returns the word that the GPU waits for.
  [[nodiscard]] const uint32_t* word(size_t place) const { return &counts_[place]; }

 private:
  std::span<uint32_t> counts_;
  std::vector<uint32_t> expected_;
};

class MessageTransfer {
 public:
  struct Owner {
    Transport& transport;
    Waiter& waiter;
    std::vector<uint64_t>& settled;  // see CpuRank
    const Context& context;
    std::chrono::milliseconds timeout;
  };

  MessageTransfer(const Owner& owner, const MessageFormat& format, const WaitReason& reason)
      : owner_(owner), format_(format), reason_(reason) {}

  // Runs until all has passed. `take(i, c)`: message c of receive i is here; in order for each i.
  // `look()` is called now and then during waits and throws what has gone wrong elsewhere. Throws
  // TimeoutError and PeerError.
  void run(
      std::span<const MessageSend> sends,
      std::span<const MessageReceive> receives,
      const std::function<void(size_t, int64_t)>& take,
      const std::function<void()>& look
  );

 private:
  [[nodiscard]] bool is_packed(size_t i) const;
  [[nodiscard]] bool has_come(size_t i) const;
  // Returns the signal of a receive's next message; wanted() its value once the message is here.
  [[nodiscard]] uint32_t next_signal(size_t i) const {
    return receives_[i].first_signal + static_cast<uint32_t>(next_receive_[i]);
  }
  [[nodiscard]] uint64_t wanted(size_t i) const { return owner_.settled[next_signal(i)] + 1; }
  // Returns the messages of a send or receive; is_through(): whether all have passed, by `next`.
  [[nodiscard]] int64_t num_messages(const auto& one) const {
    return format_.num_chunks(one.count);
  }
  [[nodiscard]] bool is_through(const auto& all, const std::vector<int64_t>& next) const {
    size_t i = 0;
    return std::ranges::all_of(all, [&](const auto& one) {
      return next[i++] == num_messages(one);
    });
  }
  [[nodiscard]] bool is_sent() const { return is_through(sends_, next_send_); }
  [[nodiscard]] bool is_any_packed() const;
  bool send_packed();
  bool take_arrived(const std::function<void(size_t, int64_t)>& take);
  void await_packing(const std::function<void()>& look);
  void await_arrival(const std::function<void()>& look);
  [[nodiscard]] std::vector<Missing> missing() const;

  Owner owner_;
  MessageFormat format_;
  WaitReason reason_;
  std::span<const MessageSend> sends_;
  std::span<const MessageReceive> receives_;
  std::vector<int64_t> next_send_;
  std::vector<int64_t> next_receive_;
  std::chrono::steady_clock::time_point last_move_;
};

// A thread that moves data for callers who go on meanwhile, one job after the other. Its jobs use
// no CUDA: a caller that waits for the GPU inside of CUDA keeps other threads out of CUDA, and the
// GPU may wait for this thread.
class TransferThread {
 public:
  struct Job {
    std::function<void()> run;
    std::function<void()> give_up;  // after run() threw, and instead of it if an earlier one did
  };

  // Starts the thread, which stays on `cores`, if there are any.
  explicit TransferThread(const std::vector<int>& cores = {});
  ~TransferThread();  // once all jobs have ended
  TransferThread(const TransferThread&) = delete;
  TransferThread& operator=(const TransferThread&) = delete;

  void start(Job job);
  // Waits until all jobs have ended. Throws, once, what the first job that failed threw; then jobs
  // run again. `look()` is called now and then meanwhile.
  void wait(const std::function<void()>& look = [] {});
  [[nodiscard]] bool is_running() const;

 private:
  void serve();

  mutable std::mutex mutex_;
  std::condition_variable change_;
  std::deque<Job> jobs_;  // the first is running
  std::exception_ptr failure_;
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace weft
