// SPDX-License-Identifier: Apache-2.0
#include "cpu/protocol/waiter.hpp"

#include <hwy/cache_control.h>

#include <thread>
#include <utility>

#include "core/clock.hpp"
#include "core/interrupt.hpp"

namespace weft {
namespace {

// Polls before the thread sleeps: a few microseconds, since ranks may outnumber cores.
constexpr int kPolls = 64;
// How often a waiting thread looks at its peers, its deadline and its caller, however often it is
// woken meanwhile.
constexpr auto kLookEvery = std::chrono::milliseconds(25);

}  // namespace

Waiter::Waiter(
    Transport& transport,
    const Context& context,
    std::chrono::milliseconds timeout,
    uint32_t first_notice,
    Company company
)
    : transport_(&transport),
      context_(context),
      timeout_(timeout),
      first_notice_(first_notice),
      company_(std::move(company)),
      wait_ns_(static_cast<size_t>(context.num_ranks)) {}

void Waiter::until(
    const WaitReason& reason,
    const std::function<bool()>& ready,
    const std::function<std::vector<Missing>()>& missing,
    const std::function<bool()>& is_stopping
) {
  for (int poll = 0; poll < kPolls; ++poll) {
    if (ready()) {
      return;
    }
    transport_->progress();
    hwy::Pause();
  }
  const auto start = transport_->now();
  auto last_look = start;
  Survival* const survival = company_.survival;
  Survival::Vigil wait = survival ? survival->begin_wait() : Survival::Vigil();
  for (;;) {
    const uint32_t doorbell = transport_->doorbell();
    if (ready() || (is_stopping && is_stopping())) {
      return;
    }
    check_interrupts(reason);
    const std::vector<Missing> late = missing();
    const auto now = transport_->now();
    const auto left = timeout_ - (now - start);
    bool is_late = left <= left.zero();
    if (now - last_look >= kLookEvery || is_late) {
      last_look = now;
      if (company_.look) {
        company_.look();
      }
      if (survival != nullptr) {
        is_late = survival->is_over(wait);
      }
      WEFT_CHECK(
          context_,
          !InterruptScope::is_interrupted(),
          ErrorCode::kInterrupted,
          "{}: interrupted while it waited for {} (call {})",
          reason.op,
          reason.what,
          reason.call
      );
      check_peers(reason, late, ready);
    }
    if (is_late) {
      give_up(reason, late);
    }
    const bool ends_before = survival == nullptr && left < kLookEvery;
    transport_->park(doorbell, ends_before ? Clock::duration(left) : kLookEvery);
    const auto slept = transport_->now() - now;
    for (const Missing& one : late) {
      wait_ns_[static_cast<size_t>(one.peer)].fetch_add(slept.count(), std::memory_order_relaxed);
    }
  }
}

void Waiter::check_interrupts(const WaitReason& reason) const {
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    const uint64_t call = transport_->signal_value(first_notice_ + static_cast<uint32_t>(rank));
    WEFT_CHECK(
        context_,
        call == 0 || call > reason.call,  // what it gave to earlier calls still counts
        ErrorCode::kPeerFailed,
        "{}: rank {} was interrupted in call {} (this is call {})",
        reason.op,
        rank,
        call,
        reason.call
    );
  }
}

void Waiter::until_raised(const WaitReason& reason, const std::vector<Missing>& wanted) {
  const auto is_raised = [this](const Missing& one) {
    return transport_->signal_value(one.signal) >= one.wanted;
  };
  size_t first = 0;  // signals before it have been seen raised
  const auto ready = [&] {
    while (first < wanted.size() && is_raised(wanted[first])) {
      ++first;
    }
    return first == wanted.size();
  };
  const auto missing = [&] {
    std::vector<Missing> late;
    for (Missing one : wanted) {
      one.seen = transport_->signal_value(one.signal);
      if (one.seen < one.wanted) {
        late.push_back(one);
      }
    }
    return late;
  };
  until(reason, ready, missing);
}

// Finds the end of a peer, or of its forwarder, that leaves the signal unraised. A peer that left
// has given its forwarder all it had.
Waiter::Gone Waiter::find_gone(const Missing& one) const {
  const PeerState state = transport_->peer_state(one.peer);
  if (one.via >= 0) {
    const PeerState forwarder = transport_->peer_state(one.via);
    if (forwarder != PeerState::kAlive || state != PeerState::kDied) {
      return {&one, one.via, forwarder};
    }
  }
  return {&one, one.peer, state};
}

void Waiter::check_peers(
    const WaitReason& reason,
    const std::vector<Missing>& missing,
    const std::function<bool()>& ready
) {
  Gone gone;  // rather one that died than one that left for that reason
  for (const Missing& one : missing) {
    const Gone found = find_gone(one);
    // Signals that a peer raised before it ended still count, so look once more after its state.
    const bool is_raised = transport_->signal_value(one.signal) >= one.wanted;
    if (found.how != PeerState::kAlive && !is_raised && gone.how != PeerState::kDied) {
      gone = found;
    }
  }
  if (gone.missing == nullptr || ready()) {
    return;
  }
  const Missing& late = *gone.missing;
  WEFT_RAISE(
      context_,
      ErrorCode::kPeerFailed,
      "{}: {} before {} {} arrived (call {}, signal {} at {} of {})",
      reason.op,
      end_of(gone.rank),
      gone.rank == late.peer ? "its" : fmt::format("rank {}'s", late.peer),
      reason.what,
      reason.call,
      late.signal,
      late.seen,
      late.wanted
  );
}

std::string Waiter::end_of(int peer, std::chrono::milliseconds patience) const {
  const Deadline deadline(patience);
  for (;;) {
    const PeerState how = peer < 0 ? PeerState::kAlive : transport_->peer_state(peer);
    int dead = how == PeerState::kDied ? peer : -1;
    for (int rank = 0; rank < context_.num_ranks && dead < 0; ++rank) {
      const bool is_other = rank != context_.rank && !company_.is_lost(rank);
      dead = is_other && transport_->peer_state(rank) == PeerState::kDied ? rank : -1;
    }
    std::string death = dead < 0 ? "" : fmt::format("rank {} died", dead);
    if (how == PeerState::kLeft) {
      return fmt::format("{}{}rank {} left the exchange", death, dead < 0 ? "" : " and ", peer);
    }
    if (dead >= 0 || deadline.has_passed()) {
      return death;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Waiter::give_up(const WaitReason& reason, const std::vector<Missing>& missing) const {
  std::vector<std::string> peers;
  for (const Missing& one : missing) {
    peers.push_back(fmt::format(
        "rank {}{} (signal {} at {} of {})",
        one.peer,
        one.via < 0 ? "" : fmt::format(" by way of rank {}", one.via),
        one.signal,
        one.seen,
        one.wanted
    ));
  }
  WEFT_RAISE(
      context_,
      ErrorCode::kTimeout,
      "{}: no {} for {} from {} (call {}). Is the peer alive and in the same call?",
      reason.op,
      reason.what,
      seconds_text(timeout_),
      fmt::join(peers, ", "),
      reason.call
  );
}

std::vector<double> Waiter::wait_seconds() const {
  std::vector<double> seconds;
  for (const auto& ns : wait_ns_) {
    seconds.push_back(static_cast<double>(ns.load(std::memory_order_relaxed)) * 1e-9);
  }
  return seconds;
}

}  // namespace weft
