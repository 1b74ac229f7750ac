// SPDX-License-Identifier: Apache-2.0
// Waiting for the fabric: what it does not take at once is tried again until it does, the peer is
// gone or time is up.
#include <hwy/cache_control.h>

#include <rdma/fi_errno.h>
#include <thread>

#include "transport/ofi/ofi_transport.hpp"

namespace weft::ofi {
namespace {

constexpr int kPauses = 64;
// A message takes less than that; two peers that sleep wait for each other's naps.
constexpr int kYields = 1024;         // a millisecond or two
constexpr int kRoundsPerKnock = 512;  // some 20 ms of naps

// Others run while this thread waits for the fabric.
void relax(int round) {
  if (round < kPauses) {
    hwy::Pause();
  } else if (round < kYields) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace

template <class Attempt>
OfiTransport::Outcome OfiTransport::persist(
    Queue& queue, int rank, Clock::time_point deadline, const Attempt& attempt
) {
  for (int round = 0;; ++round) {
    if (peers_->has_left(rank)) {
      return Outcome::kGone;
    }
    if (!peers_->has_failed(rank)) {
      const int64_t result = attempt();
      if (result == 0) {
        return Outcome::kDone;
      }
      if (result != -FI_EAGAIN) {
        on_failure(rank, "post", static_cast<int>(-result));
      }
    }
    if (queue.poll() > 0) {
      round = 0;
      continue;
    }
    if (round > 0 && peers_->has_died(rank)) {
      return Outcome::kGone;
    }
    if (round > kYields && round % kRoundsPerKnock == kRoundsPerKnock - 1) {
      knock_at(rank);
    }
    if (peers_->failure(rank)) {
      return Outcome::kFailed;
    }
    if (Clock::now() >= deadline) {
      return Outcome::kLate;
    }
    relax(round);
  }
}

OfiTransport::Outcome OfiTransport::start(
    Queue& queue,
    int rank,
    uint64_t bytes,
    Clock::time_point deadline,
    Queue::Operation*& operation,
    Pending pending
) {
  return persist(queue, rank, deadline, [&]() -> int64_t {
    operation = queue.start(rank, bytes, pending);
    return operation != nullptr ? 0 : -FI_EAGAIN;
  });
}

OfiTransport::Outcome OfiTransport::send(
    Queue& queue,
    int rank,
    const Message& message,
    Clock::time_point deadline,
    const Pending& pending
) {
  Queue::Operation* operation = nullptr;
  Outcome outcome = start(queue, rank, sizeof message, deadline, operation, pending);
  if (outcome != Outcome::kDone) {
    return outcome;
  }
  outcome = persist(queue, rank, deadline, [&] { return queue.post(*operation, message); });
  if (outcome != Outcome::kDone) {
    queue.abandon(*operation);
  }
  return outcome;
}

OfiTransport::Outcome OfiTransport::await(Queue& queue, int rank, const Pending& pending) {
  return persist(queue, rank, Clock::now() + timeout_, [&]() -> int64_t {
    // Pairs with Queue::finish(); a failure was noted before and is persist()'s to report.
    const bool has_ended = pending->load(std::memory_order_acquire) == 0;
    const bool is_well = !peers_->has_failed(rank) && !peers_->has_died(rank);
    return has_ended && is_well ? 0 : -FI_EAGAIN;
  });
}

void OfiTransport::require(Outcome outcome, int rank) const {
  const std::string failure = peers_->failure(rank).value_or("");
  switch (outcome) {
    case Outcome::kDone:
      return;
    case Outcome::kGone:
      raise_error(
          ErrorCode::kTransport,
          context_,
          fmt::format("put: rank {} {}", rank, peers_->has_left(rank) ? "has left" : "died")
      );
    case Outcome::kFailed:
      raise_error(
          ErrorCode::kTransport, context_, fmt::format("put: to rank {} failed, {}", rank, failure)
      );
    case Outcome::kLate:
      raise_error(
          ErrorCode::kTimeout,
          context_,
          fmt::format(
              "put: rank {} took nothing for {:.1f} s (provider {}). Is the peer alive?",
              rank,
              static_cast<double>(timeout_.count()) / 1000.0,
              fabric_->name()
          )
      );
  }
}

void OfiTransport::post(Queue& queue, int rank, Queue::Operation& operation, const Write& write) {
  const Outcome outcome =
      persist(queue, rank, Clock::now() + timeout_, [&] { return queue.post(operation, write); });
  if (outcome != Outcome::kDone) {
    queue.abandon(operation);
  }
  require(outcome, rank);
  queue.try_poll();  // what is under way goes on
}

}  // namespace weft::ofi
