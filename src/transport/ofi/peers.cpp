// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/peers.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/check.hpp"
#include "transport/ofi/fabric/fabric.hpp"

namespace weft::ofi {
namespace {

// A connection breaks a moment before the death of its process can be seen.
constexpr auto kGrace = std::chrono::seconds(1);

// Errors of a connection whose other end has gone.
bool is_end_of_connection(int error) {
  static constexpr std::array kErrors = {
      ECONNRESET,
      ECONNREFUSED,
      ECONNABORTED,
      ECANCELED,  // of writes that were under way when it ended
      ENOTCONN,
      EPIPE,
      ESHUTDOWN,
      EHOSTUNREACH,
      EHOSTDOWN,
      ENETUNREACH,
      ETIMEDOUT};
  return std::find(kErrors.begin(), kErrors.end(), error) != kErrors.end();
}

}  // namespace

void Peers::watch(int rank, int32_t pid) {
  at(rank).watch = ProcessWatch(pid);
  at(rank).is_watched = at(rank).watch.sees_end();  // else messages will tell
}

void Peers::on_failure(int rank, const char* call, int error, std::string_view provider) {
  if (has_left(rank)) {
    return;
  }
  Peer& peer = at(rank);
  if (!peer.is_watched && is_end_of_connection(error)) {
    on_lost(rank);
    return;
  }
  const std::lock_guard lock(mutex_);
  if (peer.has_failed.load(std::memory_order_relaxed)) {
    return;  // the first is the cause
  }
  peer.what = fmt::format("{}: {}, provider {}", call, error_text(error), provider);
  peer.when = Clock::now();
  peer.has_failed.store(true, std::memory_order_release);
  has_any_failure_.store(true, std::memory_order_release);
}

std::chrono::nanoseconds Peers::note_unanswered(int rank) {
  Peer& peer = at(rank);
  if (!peer.has_answered.load(std::memory_order_relaxed)) {
    return {};
  }
  const Clock::rep now = Clock::now().time_since_epoch().count();
  Clock::rep since = 0;
  const bool is_first =
      peer.unanswered_since.compare_exchange_strong(since, now, std::memory_order_relaxed);
  return Clock::duration(is_first ? 0 : now - since);
}

// Every put calls this, so it writes only what changes.
void Peers::note_answered(int rank) {
  Peer& peer = at(rank);
  if (!peer.has_answered.load(std::memory_order_relaxed)) {
    peer.has_answered.store(true, std::memory_order_relaxed);
  }
  if (peer.unanswered_since.load(std::memory_order_relaxed) != 0) {
    peer.unanswered_since.store(0, std::memory_order_relaxed);
  }
}

std::optional<std::string> Peers::failure(int rank) const {
  if (!has_failed(rank) || is_gone(rank)) {
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  const Peer& peer = at(rank);
  return Clock::now() - peer.when < kGrace ? std::nullopt : std::optional(peer.what);
}

std::optional<std::string> Peers::any_failure() const {
  if (!has_any_failure_.load(std::memory_order_acquire)) {
    return std::nullopt;
  }
  for (int rank = 0; std::cmp_less(rank, peers_.size()); ++rank) {
    if (const auto what = failure(rank)) {
      return fmt::format("put: to rank {} failed, {}", rank, *what);
    }
  }
  return std::nullopt;
}

}  // namespace weft::ofi
