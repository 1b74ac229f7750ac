// SPDX-License-Identifier: Apache-2.0
#include "hosts/message_transfer.hpp"

#include <utility>

#include "core/clock.hpp"
#include "core/host_map.hpp"

namespace weft {
namespace {

bool is_any(size_t count, const auto& holds) {
  size_t i = 0;
  while (i < count && !holds(i)) {
    ++i;
  }
  return i < count;
}

}  // namespace

void MessageTransfer::run(
    std::span<const MessageSend> sends,
    std::span<const MessageReceive> receives,
    const std::function<void(size_t, int64_t)>& take,
    const std::function<void()>& look
) {
  sends_ = sends;
  receives_ = receives;
  next_send_.assign(sends.size(), 0);
  next_receive_.assign(receives.size(), 0);
  last_move_ = Clock::now();
  while (!is_sent() || !is_through(receives_, next_receive_)) {
    const bool has_sent = send_packed();
    const bool has_taken = take_arrived(take);
    if (has_sent || has_taken) {
      last_move_ = Clock::now();
    } else if (is_sent()) {
      await_arrival(look);
    } else {
      await_packing(look);
    }
  }
}

// Reads a word that a GPU may write meanwhile.
bool MessageTransfer::is_packed(size_t i) const {
  const MessageSend& send = sends_[i];
  if (next_send_[i] >= num_messages(send)) {
    return false;
  }
  auto& done = const_cast<uint32_t&>(send.done[next_send_[i]]);
  return std::atomic_ref(done).load(std::memory_order_acquire) == send.number;
}

bool MessageTransfer::is_any_packed() const {
  return is_any(sends_.size(), [&](size_t i) { return is_packed(i); });
}

// Sends one message to each peer at a time, so that none waits for all of another's.
bool MessageTransfer::send_packed() {
  bool has_sent = false;
  for (size_t i = 0; i < sends_.size(); ++i) {
    if (!is_packed(i)) {
      continue;
    }
    const MessageSend& send = sends_[i];
    const int64_t c = next_send_[i]++;
    const auto offset = static_cast<uint64_t>(c * format_.stride());
    const Put put = {
        .source = send.messages + offset,
        .bytes = static_cast<uint64_t>(format_.num_rows(c, send.count) * format_.token_bytes()),
        .region = send.target.region.slot,
        .signal = send.first_signal + static_cast<uint32_t>(c),
        .offset = send.target.offset + offset};
    owner_.transport.put(send.to, {&put, 1});
    has_sent = true;
  }
  return has_sent;
}

bool MessageTransfer::has_come(size_t i) const {
  return next_receive_[i] < num_messages(receives_[i]) &&
         owner_.transport.signal_value(next_signal(i)) >= wanted(i);
}

bool MessageTransfer::take_arrived(const std::function<void(size_t, int64_t)>& take) {
  bool has_taken = false;
  for (size_t i = 0; i < receives_.size(); ++i) {
    while (has_come(i)) {
      ++owner_.settled[next_signal(i)];
      take(i, next_receive_[i]++);
      has_taken = true;
    }
  }
  return has_taken;
}

std::vector<Missing> MessageTransfer::missing() const {
  std::vector<Missing> late;
  for (size_t i = 0; i < receives_.size(); ++i) {
    if (next_receive_[i] < num_messages(receives_[i]) && !has_come(i)) {
      late.push_back(
          {.peer = receives_[i].from,
           .signal = next_signal(i),
           .seen = owner_.transport.signal_value(next_signal(i)),
           .wanted = wanted(i)}
      );
    }
  }
  return late;
}

void MessageTransfer::await_arrival(const std::function<void()>& look) {
  const auto has_any = [&] {
    return is_any(receives_.size(), [&](size_t i) { return has_come(i); });
  };
  const auto never_stops = [&] {
    look();
    return false;
  };
  owner_.waiter.until(
      reason_, has_any, [&] { return missing(); }, never_stops
  );
}

// Polls, as the GPU rings no bell, then lets other threads run.
void MessageTransfer::await_packing(const std::function<void()>& look) {
  constexpr int kLooks = 64;
  for (int n = 0; n < kLooks; ++n) {
    owner_.transport.progress();
    if (is_any_packed()) {
      return;
    }
  }
  look();
  std::this_thread::yield();
  for (size_t i = 0; i < sends_.size(); ++i) {
    const int64_t all = num_messages(sends_[i]);
    WEFT_CHECK(
        owner_.context,
        next_send_[i] == all || Clock::now() - last_move_ < owner_.timeout,
        ErrorCode::kTimeout,
        "{}: call {}: the GPU has packed {} of {} messages for rank {} (no other within {} ms)",
        reason_.op,
        reason_.call,
        next_send_[i],
        all,
        sends_[i].to,
        owner_.timeout.count()
    );
  }
}

TransferThread::TransferThread(const std::vector<int>& cores)
    : thread_([this, cores] {
        stay_on(cores);
        serve();
      }) {}

TransferThread::~TransferThread() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  change_.notify_all();
  thread_.join();
}

void TransferThread::start(Job job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  change_.notify_all();
}

void TransferThread::wait(const std::function<void()>& look) {
  constexpr auto kLookEvery = std::chrono::milliseconds(25);
  std::unique_lock lock(mutex_);
  while (!change_.wait_for(lock, kLookEvery, [&] { return jobs_.empty(); })) {
    lock.unlock();
    look();
    lock.lock();
  }
  if (const auto failure = std::exchange(failure_, nullptr)) {
    std::rethrow_exception(failure);
  }
}

bool TransferThread::is_running() const {
  const std::lock_guard lock(mutex_);
  return !jobs_.empty();
}

void TransferThread::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    change_.wait(lock, [&] { return !jobs_.empty() || is_ending_; });
    if (jobs_.empty()) {
      return;
    }
    const Job& job = jobs_.front();  // stays where it is while others follow
    std::exception_ptr failure = failure_;
    lock.unlock();
    try {
      if (!failure) {
        job.run();
      }
    } catch (...) {
      failure = std::current_exception();
    }
    if (failure) {
      job.give_up();
    }
    lock.lock();
    failure_ = failure;
    jobs_.pop_front();
    change_.notify_all();
  }
}

}  // namespace weft
