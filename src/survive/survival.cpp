// SPDX-License-Identifier: Apache-2.0
#include "survive/survival.hpp"

#include <hwy/cache_control.h>

#include <algorithm>
#include <iterator>
#include <thread>
#include <utility>

#include "core/clock.hpp"
#include "core/log.hpp"
#include "group/control_plane.hpp"
#include "group/invitation.hpp"
#include "survive/message_roll.hpp"
#include "survive/shared_roll.hpp"

namespace weft {
namespace {

constexpr int kPolls = 256;  // before the thread sleeps
// How often a waiting rank looks at the others.
constexpr auto kLookEvery = std::chrono::milliseconds(25);
// A loss may be seen this long after its effects: the memory of a process that dies is out of reach
// before its end can be seen, for as long as a busy host needs to end it.
constexpr std::chrono::milliseconds kPatience = std::chrono::seconds(1);

bool share_memory(const Context& context) {
  return context.transport == "loopback" || context.transport == "shm" ||
         context.transport == "peer";
}

std::unique_ptr<Roll> make_roll(
    const Group& group, const Context& context, std::chrono::milliseconds timeout
) {
  if (share_memory(context)) {
    const bool are_threads = group.topology().one_process;
    return std::make_unique<SharedRoll>(
        are_threads ? make_loopback_memory() : make_shm_memory(), group
    );
  }
  const std::optional<Invitation> invitation = invitation_of(group);
  return invitation ? std::make_unique<MessageRoll>(group, *invitation, timeout)
                    : std::make_unique<MessageRoll>(group, timeout);
}

}  // namespace

Survival::Survival(const Group& group, const Context& context, std::chrono::milliseconds timeout)
    : group_(group),
      context_(context),
      timeout_(timeout),
      roll_(make_roll(group, context, timeout)),
      members_(roll_->members()),
      before_(members_) {
  if (invitation_of(group)) {
    join();
  }
}

void Survival::join() {
  roll_->be_next(members_);
  roll_->ask(true);
  const Deadline deadline(timeout_);
  for (;;) {
    const uint32_t doorbell = roll_->doorbell();
    members_ = roll_->members();
    roll_->follow(members_);
    if (roll_->is_in(members_)) {
      break;
    }
    WEFT_CHECK(
        context_,
        !roll_->is_turned_away(),
        ErrorCode::kPeerFailed,
        "rejoin: another process has taken the place of rank {}",
        context_.rank
    );
    const bool is_taken = members_.has(context_.rank) && !roll_->has_ended(context_.rank);
    if (members_.has(context_.rank) && !is_taken) {  // which the others have yet to see
      std::vector<int> rest;
      std::ranges::remove_copy(members_.ranks, std::back_inserter(rest), context_.rank);
      roll_->propose(members_, roll_->committed() + 1, rest);
    }
    if (deadline.has_passed()) {
      roll_->leave();
      WEFT_CHECK(
          context_,
          !is_taken,
          ErrorCode::kTimeout,
          "rejoin: rank {} is not lost to the others",
          context_.rank
      );
      WEFT_RAISE(
          context_,
          ErrorCode::kTimeout,
          "rejoin: the ranks that are left have not called readmit within {} ({} of {} are left)",
          seconds_text(timeout_),
          members_.ranks.size(),
          context_.num_ranks
      );
    }
    roll_->sleep(doorbell, std::min<Clock::duration>(deadline.left(), kLookEvery));
  }
  roll_->ask(false);
  call_ = roll_->committed();
  has_newcomers_ = true;
}

std::string Survival::invitation(std::string_view transport) const {
  Invitation invitation = {
      .num_ranks = context_.num_ranks,
      .topology = group_.topology(),
      .transport = std::string(transport)};
  roll_->invite(invitation);
  return invitation.text();
}

// A rank whose time is up proposes the members as they are: by that all know that it is over.
std::vector<int> Survival::readmit(std::span<const int> ranks) {
  const Deadline deadline(timeout_);
  Vigil wait = begin_wait();
  std::vector<int> missing;
  for (bool is_called_off = false; !is_called_off && !has_come(ranks.front());) {
    const uint32_t doorbell = roll_->doorbell();
    const Roll::Members known = members_;
    if (adopt("readmit")) {
      is_called_off = known.ranks == members_.ranks && known.lives == members_.lives;
      continue;
    }
    missing.clear();
    std::ranges::copy_if(ranks, std::back_inserter(missing), [this](int rank) {
      return !roll_->asks(rank);
    });
    std::vector<int> next = members_.ranks;
    if (missing.empty()) {
      next.insert(next.end(), ranks.begin(), ranks.end());
    }
    const bool is_proposed = missing.empty() || deadline.has_passed();
    if (is_proposed) {
      roll_->propose(members_, call_, next);
    }
    if (is_proposed && !has_moved()) {  // perhaps for the vote of one that is gone
      static_cast<void>(is_over(wait));
      static_cast<void>(propose_without_gone(/*is_open=*/false));
      check_decided(wait, "readmit", ranks);
    }
    if (!has_moved()) {
      roll_->beat();
      roll_->sleep(doorbell, kLookEvery);
    }
  }
  return missing;
}

void Survival::check_lost(std::span<const int> ranks) const {
  for (const int rank : ranks) {
    WEFT_CHECK_ARG(
        context_,
        rank >= 0 && rank < context_.num_ranks && is_lost(rank),
        "readmit: rank {} (expected ranks that are lost; {} of {} are left)",
        rank,
        members_.ranks.size(),
        context_.num_ranks
    );
  }
}

void Survival::check_back(std::span<const int> ranks, std::span<const int> missing) const {
  for (const int rank : ranks) {
    WEFT_CHECK(
        context_,
        has_come(rank),
        ErrorCode::kTimeout,
        "readmit: {} did not come within {}",
        rank_list(missing.empty() ? ranks : missing),
        seconds_text(timeout_)
    );
    WEFT_CHECK(
        context_, !is_lost(rank), ErrorCode::kPeerFailed, "readmit: rank {} was lost again", rank
    );
  }
}

bool Survival::has_come(int rank) const {
  const auto at = static_cast<size_t>(rank);
  return members_.lives[at] > before_.lives[at];
}

void Survival::live_on() const {
  roll_->beat();
  WEFT_CHECK(
      context_,
      !is_stopped_.load(std::memory_order_relaxed),
      ErrorCode::kInterrupted,
      "survive: the exchange ends"
  );
}

void Survival::look() const {
  live_on();
  WEFT_CHECK(
      context_,
      !has_moved(),
      ErrorCode::kPeerFailed,
      "survive: ranks were lost while this rank was in its call"
  );
}

Survival::Trouble Survival::trouble() const {
  if (has_moved()) {
    return Trouble::kLost;
  }
  auto worst = Trouble::kNone;
  for (const int rank : members_.ranks) {
    if (rank != context_.rank && roll_->has_ended(rank)) {
      worst = std::max(worst, roll_->has_left(rank) ? Trouble::kLeft : Trouble::kLost);
    }
  }
  return worst;
}

Survival::Vigil Survival::begin_wait() const {
  Vigil wait = {.begin = Clock::now(), .looks = {}, .silent_since = {}};
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    wait.looks.push_back(roll_->beats(rank));
    wait.silent_since.push_back(wait.begin);
  }
  return wait;
}

bool Survival::is_over(Vigil& wait) {
  const auto now = Clock::now();
  std::vector<int> silent;
  for (const int rank : members_.ranks) {
    const auto at = static_cast<size_t>(rank);
    const uint64_t seen = std::exchange(wait.looks[at], roll_->beats(rank));
    const bool is_awaited = rank != context_.rank && roll_->is_awaited(rank, members_, call_);
    if (seen != wait.looks[at]) {
      wait.silent_since[at] = now;
    } else if (is_awaited && now - wait.silent_since[at] >= timeout_) {
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

void Survival::begin_call(bool is_second_part) {
  ++call_;
  if (!is_second_part) {
    before_ = members_;
  }
  {
    const std::lock_guard lock(mutex_);
    silent_.clear();
  }
  roll_->beat();
}

bool Survival::finish_call(std::string_view op) {
  roll_->arrive(members_, call_);
  for (int poll = 0; poll < kPolls; ++poll) {
    if (roll_->commits(members_, call_)) {
      return true;
    }
    hwy::Pause();
  }
  Vigil wait = begin_wait();
  for (;;) {
    const uint32_t doorbell = roll_->doorbell();
    // First: once others are members, the call can no longer be committed among these.
    const bool is_over_here = has_moved();
    if (roll_->commits(members_, call_)) {
      return true;
    }
    if (is_over_here && adopt(op)) {
      return false;
    }
    live_on();
    const bool is_late = is_over(wait);
    const bool is_proposed = propose_without_gone(/*is_open=*/false);
    if (is_late && (!is_proposed || is_undecided(wait))) {
      std::vector<int> late;
      std::ranges::copy_if(members_.ranks, std::back_inserter(late), [this](int rank) {
        return roll_->is_awaited(rank, members_, call_);
      });
      WEFT_RAISE(
          context_,
          ErrorCode::kTimeout,
          "{}: no word that all is there for {} from {} (call {})",
          op,
          seconds_text(timeout_),
          late.empty() ? "nobody" : rank_list(late),
          call_
      );
    }
    roll_->sleep(doorbell, kLookEvery);
  }
}

bool Survival::settle(std::string_view op, ErrorCode cause) {
  if (roll_->has_arrived(context_.rank, members_, call_)) {
    return false;  // the others may have returned: it is not made again
  }
  const bool may_be_dying = cause == ErrorCode::kNotAvailable || cause == ErrorCode::kTransport;
  const Deadline deadline(may_be_dying ? std::max(timeout_, kPatience) : kPatience);
  Vigil wait = begin_wait();
  while (!adopt(op)) {
    live_on();
    const bool is_proposed = propose_without_gone(/*is_open=*/true);
    if (is_proposed ? is_undecided(wait) : deadline.has_passed()) {
      return false;
    }
    if (is_proposed && !has_moved()) {
      static_cast<void>(is_over(wait));  // whose vote does not come is given up, too
    }
    if (!has_moved()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return true;
}

// A proposal by messages takes the votes of the others, which those who are cut off do not get.
bool Survival::is_undecided(const Vigil& wait) const {
  return Clock::now() - wait.begin >= 2 * timeout_ + kPatience;
}

void Survival::check_decided(const Vigil& wait, std::string_view op, std::span<const int> about)
    const {
  if (!is_undecided(wait)) {
    return;
  }
  const Roll::Members now = roll_->members();
  std::vector<int> late;
  std::ranges::copy_if(now.ranks, std::back_inserter(late), [&](int rank) {
    return rank != context_.rank && roll_->is_awaited(rank, now, call_);
  });
  WEFT_RAISE(
      context_,
      ErrorCode::kTimeout,
      "{}: no word from {} on {} (more than half of {} ranks have to agree)",
      op,
      late.empty() ? "nobody" : rank_list(late),
      rank_list(about),
      now.ranks.size()
  );
}

void Survival::give_up(std::span<const int> ranks) {
  for (const int rank : ranks) {
    WEFT_CHECK(
        context_,
        !group_.topology().one_process || roll_->has_ended(rank),
        ErrorCode::kUnsupported,
        "mask: rank {} is a thread of this process and has not left",
        rank
    );
  }
  const auto is_out = [&](int rank) { return std::ranges::find(ranks, rank) != ranks.end(); };
  // Repeats until none is a member: others may give up ranks at the same time, or this one before.
  const Vigil wait = begin_wait();
  for (;;) {
    const uint32_t doorbell = roll_->doorbell();
    const Roll::Members now = roll_->members();
    if (!roll_->is_in(now) || std::ranges::none_of(now.ranks, is_out)) {
      return;
    }
    std::vector<int> rest;
    std::ranges::remove_copy_if(now.ranks, std::back_inserter(rest), is_out);
    roll_->propose(now, call_ + 1, rest);
    check_decided(wait, "mask", ranks);
    if (roll_->epoch() == now.epoch) {
      roll_->sleep(doorbell, kLookEvery);
    }
  }
}

bool Survival::propose_without_gone(bool is_open) {
  std::vector<int> rest;
  {
    const std::lock_guard lock(mutex_);
    for (const int rank : members_.ranks) {
      const bool stays = !is_open && !roll_->is_awaited(rank, members_, call_);
      const bool is_gone = std::ranges::binary_search(silent_, rank) || roll_->has_ended(rank);
      if (rank == context_.rank || stays || !is_gone) {
        rest.push_back(rank);
      }
    }
  }
  if (rest.size() == members_.ranks.size()) {
    return false;
  }
  roll_->propose(members_, call_, rest);
  return true;
}

// Takes on new members; false: they are the same.
bool Survival::adopt(std::string_view op) {
  if (!has_moved()) {
    return false;
  }
  const Roll::Members next = roll_->members();
  WEFT_CHECK(
      context_,
      roll_->is_in(next),
      ErrorCode::kPeerFailed,
      "{}: this rank was given up by the others, which did not hear of it in time ({} ranks go on, "
      "from call {})",
      op,
      next.ranks.size(),
      call_
  );
  const std::vector<int> lost = members_.beside(next);
  const std::vector<int> back = next.beside(members_);
  for (const int rank : lost) {
    has_strays_ = has_strays_ || !roll_->has_ended(rank);
  }
  roll_->follow(next);
  has_newcomers_ = has_newcomers_ || !back.empty();
  const auto tell = [&](const std::vector<int>& ranks, std::string_view what) {
    if (!ranks.empty()) {
      log(LogLevel::kWarn,
          "{} (call {}): {} {} {}; {} of {} ranks go on",
          op,
          call_,
          rank_list(ranks),
          ranks.size() == 1 ? "is" : "are",
          what,
          next.ranks.size(),
          context_.num_ranks);
    }
  };
  tell(lost, "lost");
  tell(back, "back");
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
  roll_->post(members_.epoch, round, block);
  std::vector<Bytes> blocks(static_cast<size_t>(context_.num_ranks));
  Vigil wait = begin_wait();
  for (const int rank : members_.ranks) {
    for (;;) {
      const uint32_t doorbell = roll_->doorbell();
      const bool has_ended = roll_->has_ended(rank);  // first: it may post and then end
      if (auto mail = roll_->mail(rank, members_.epoch, round)) {
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
      roll_->sleep(doorbell, kLookEvery);
    }
  }
  return blocks;
}

}  // namespace weft
