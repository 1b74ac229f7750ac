// SPDX-License-Identifier: Apache-2.0
#include "cpu/survive/survival.hpp"

#include <hwy/cache_control.h>

#include <algorithm>
#include <iterator>
#include <thread>
#include <utility>

#include "core/clock.hpp"
#include "core/log.hpp"
#include "group/control_plane.hpp"

namespace weft {
namespace {

constexpr int kPolls = 256;  // before the thread sleeps
// How often a waiting rank looks at the others.
constexpr auto kLookEvery = std::chrono::milliseconds(25);
// A failed transport may be seen this long before the death that is its cause.
constexpr auto kPatience = std::chrono::seconds(1);

std::unique_ptr<MemorySource> shared_by(const Group& group, const Context& context) {
  WEFT_CHECK(
      context,
      context.transport == "loopback" || context.transport == "shm",
      ErrorCode::kUnsupported,
      "exchange: on_peer_loss = shrink by transport {} (so far by loopback and shm, in one domain)",
      context.transport
  );
  return group.topology().one_process ? make_loopback_memory() : make_shm_memory();
}

}  // namespace

Survival::Survival(const Group& group, const Context& context, std::chrono::milliseconds timeout)
    : group_(group),
      context_(context),
      timeout_(timeout),
      source_(shared_by(group, context)),
      roll_(*source_, group),
      members_(roll_.members()) {}

void Survival::look() const {
  roll_.beat();
  WEFT_CHECK(
      context_,
      roll_.epoch() == members_.epoch,
      ErrorCode::kPeerFailed,
      "survive: ranks were lost while this rank was in its call"
  );
}

Survival::Vigil Survival::begin_wait() const {
  Vigil wait = {.begin = Clock::now(), .looks = {}, .silent_since = {}};
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    wait.looks.push_back(roll_.beats(rank));
    wait.silent_since.push_back(wait.begin);
  }
  return wait;
}

bool Survival::is_over(Vigil& wait) {
  const auto now = Clock::now();
  std::vector<int> silent;
  for (const int rank : members_.ranks) {
    const auto at = static_cast<size_t>(rank);
    const uint64_t seen = std::exchange(wait.looks[at], roll_.beats(rank));
    if (seen != wait.looks[at]) {
      wait.silent_since[at] = now;
    } else if (now - wait.silent_since[at] >= timeout_ && rank != context_.rank && !roll_.has_arrived(rank, members_, call_)) {
      silent.push_back(rank);
    }
  }
  if (group_.topology().one_process) {  // nothing keeps away what a thread stores
    return now - wait.begin >= timeout_;
  }
  if (silent.empty()) {
    return now - wait.begin >= 2 * timeout_;
  }
  const std::lock_guard lock(mutex_);
  silent_ = std::move(silent);
  return true;
}

void Survival::begin_call() {
  ++call_;
  lost_in_call_.clear();
  roll_.beat();
}

bool Survival::finish_call(std::string_view op) {
  roll_.arrive(members_, call_);
  for (int poll = 0; poll < kPolls; ++poll) {
    if (roll_.commits(members_, call_)) {
      return true;
    }
    hwy::Pause();
  }
  Vigil wait = begin_wait();
  for (;;) {
    const uint32_t doorbell = roll_.doorbell();
    if (roll_.commits(members_, call_)) {
      return true;
    }
    if (adopt(op)) {
      return false;
    }
    roll_.beat();
    const bool is_late = is_over(wait);
    if (propose_without_gone()) {
      continue;
    }
    WEFT_CHECK(
        context_,
        !is_late,
        ErrorCode::kTimeout,
        "{}: not all ranks had what they need within {} (call {})",
        op,
        seconds_text(timeout_),
        call_
    );
    roll_.sleep(doorbell, kLookEvery);
  }
}

bool Survival::settle(std::string_view op) {
  const Deadline deadline(kPatience);
  while (!adopt(op)) {
    if (deadline.has_passed()) {
      return false;
    }
    roll_.beat();
    if (!propose_without_gone()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return true;
}

void Survival::give_up(std::span<const int> ranks) {
  for (const int rank : ranks) {
    WEFT_CHECK(
        context_,
        !group_.topology().one_process || roll_.has_ended(rank),
        ErrorCode::kUnsupported,
        "mask: rank {} is a thread of this process and has not left",
        rank
    );
  }
  std::vector<int> out(ranks.begin(), ranks.end());
  std::ranges::sort(out);
  for (;;) {  // until no others come first
    const Roll::Members now = roll_.members();
    std::vector<int> rest;
    std::ranges::set_difference(now.ranks, out, std::back_inserter(rest));
    if (rest.size() == now.ranks.size() || !now.has(context_.rank)) {
      return;
    }
    roll_.propose(now, call_ + 1, rest);
  }
}

bool Survival::propose_without_gone() {
  std::vector<int> rest;
  {
    const std::lock_guard lock(mutex_);
    for (const int rank : members_.ranks) {
      const bool has_arrived = roll_.has_arrived(rank, members_, call_);
      const bool is_gone = std::ranges::binary_search(silent_, rank) || roll_.has_ended(rank);
      if (rank == context_.rank || has_arrived || !is_gone) {
        rest.push_back(rank);
      }
    }
  }
  if (rest.size() == members_.ranks.size()) {
    return false;
  }
  roll_.propose(members_, call_, rest);
  return true;
}

// Takes on new members; false: they are the same.
bool Survival::adopt(std::string_view op) {
  if (roll_.epoch() == members_.epoch) {
    return false;
  }
  const Roll::Members next = roll_.members();
  WEFT_CHECK(
      context_,
      next.has(context_.rank),
      ErrorCode::kPeerFailed,
      "{}: this rank was given up by the others, which did not hear of it in time ({} ranks go on, "
      "from call {})",
      op,
      next.ranks.size(),
      call_
  );
  std::vector<int> lost;
  std::ranges::set_difference(members_.ranks, next.ranks, std::back_inserter(lost));
  for (const int rank : lost) {
    has_strays_ = has_strays_ || !roll_.has_ended(rank);
  }
  const std::string verb = lost.size() == 1 ? "is" : "are";
  log(LogLevel::kWarn,
      "{} (call {}): {} {} lost; {} of {} ranks go on",
      op,
      call_,
      rank_list(lost),
      verb,
      next.ranks.size(),
      context_.num_ranks);
  lost_in_call_.insert(lost_in_call_.end(), lost.begin(), lost.end());
  std::ranges::sort(lost_in_call_);
  members_ = next;
  round_ = 0;
  const std::lock_guard lock(mutex_);
  silent_.clear();
  return true;
}

Group Survival::group() {
  return with_control(group_, [this](std::span<const std::byte> block) {
    return all_gather(block);
  });
}

std::vector<Bytes> Survival::all_gather(std::span<const std::byte> block) {
  const uint64_t round = round_++;
  roll_.post(members_.epoch, round, block);
  std::vector<Bytes> blocks(static_cast<size_t>(context_.num_ranks));
  Vigil wait = begin_wait();
  for (const int rank : members_.ranks) {
    for (;;) {
      const uint32_t doorbell = roll_.doorbell();
      const bool has_ended = roll_.has_ended(rank);  // first: it may post and then end
      if (auto mail = roll_.mail(rank, members_.epoch, round)) {
        blocks[static_cast<size_t>(rank)] = std::move(*mail);
        break;
      }
      look();
      WEFT_CHECK(
          context_, !has_ended, ErrorCode::kPeerFailed, "survive: rank {} is lost, too", rank
      );
      WEFT_CHECK(
          context_,
          !is_over(wait),
          ErrorCode::kTimeout,
          "survive: rank {} did not come within {}",
          rank,
          seconds_text(timeout_)
      );
      roll_.sleep(doorbell, kLookEvery);
    }
  }
  return blocks;
}

}  // namespace weft
