// SPDX-License-Identifier: Apache-2.0
#include "cuda/exchange/loss_watch.hpp"

#include <algorithm>
#include <array>

#include "core/check.hpp"
#include "core/clock.hpp"
#include "core/log.hpp"
#include "group/control_plane.hpp"
#include "group/invitation.hpp"

namespace weft {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(5);
// A rank that has left may have given the others all that they need for their last calls.
constexpr auto kFarewell = std::chrono::milliseconds(200);

}  // namespace

LossWatch::LossWatch(
    const Group& group,
    const Context& context,
    std::chrono::milliseconds timeout,
    std::function<void()> stop
)
    : context_(context),
      timeout_(timeout),
      stop_(std::move(stop)),
      survival_(group, context, timeout),
      vigil_(survival_.begin_wait()),
      has_news_(invitation_of(group).has_value()) {
  thread_ = std::thread([this] { run(); });
}

LossWatch::~LossWatch() {
  is_ended_.store(true, std::memory_order_relaxed);
  thread_.join();
  survival_.leave();
}

void LossWatch::run() {
  set_log_rank(context_.rank, context_.num_ranks);
  while (!is_ended_.load(std::memory_order_relaxed)) {
    try {
      look();
    } catch (const std::exception& error) {
      log(LogLevel::kWarn, "exchange: watching for lost ranks: {}", error.what());
    }
    std::this_thread::sleep_for(kLookEvery);
  }
}

void LossWatch::look() {
  const std::lock_guard lock(mutex_);
  survival_.beat();
  static_cast<void>(survival_.is_over(vigil_));  // for settle(): who has been silent, since when
  if (has_news()) {
    return;
  }
  const Survival::Trouble trouble = survival_.trouble();
  if (trouble == Survival::Trouble::kNone) {
    return;
  }
  if (trouble == Survival::Trouble::kLeft) {
    has_left_.store(true, std::memory_order_relaxed);
    const auto now = Clock::now();
    seen_to_leave_ = seen_to_leave_.value_or(now);
    if (now - *seen_to_leave_ < kFarewell) {
      return;
    }
  }
  has_news_.store(true, std::memory_order_release);  // first: a call that is cut short has a reason
  stop_();
}

bool LossWatch::await_news(std::chrono::milliseconds at_most) const {
  const Deadline deadline(at_most);
  while (!has_news() && !deadline.has_passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return has_news();
}

CallReport LossWatch::report() const {
  const std::lock_guard lock(mutex_);
  return {
      .epoch = survival_.epoch(), .alive = survival_.members(), .lost = survival_.lost_in_call()};
}

void LossWatch::leave() {
  const std::lock_guard lock(mutex_);
  survival_.leave();
}

void LossWatch::mask(std::span<const int> ranks) {
  const std::lock_guard lock(mutex_);
  survival_.give_up(ranks);
}

std::optional<LossWatch::Calls> LossWatch::settle(
    std::string_view op, ErrorCode cause, const Calls& own, std::optional<int> late
) {
  const std::lock_guard lock(mutex_);
  has_news_.store(true, std::memory_order_release);  // nobody stops the kernels until resume()
  survival_.begin_call();
  if (late && survival_.are_processes()) {
    survival_.give_up(std::array{*late});
  } else if (cause == ErrorCode::kTimeout) {  // a stopped rank, once it was silent so long
    const Deadline deadline(timeout_);
    vigil_.begin = Clock::now();
    while (!survival_.is_over(vigil_) && survival_.trouble() == Survival::Trouble::kNone &&
           !deadline.has_passed()) {
      survival_.beat();
      std::this_thread::sleep_for(kLookEvery);
    }
  }
  if (survival_.settle(op, cause)) {
    return agree_on_calls(op, own);
  }
  resume();
  return std::nullopt;
}

std::optional<LossWatch::Calls> LossWatch::assemble(std::string_view op, const Calls& own) {
  const std::lock_guard lock(mutex_);
  has_news_.store(true, std::memory_order_release);
  survival_.begin_call();
  return survival_.finish_call(op) ? std::nullopt : std::optional(agree_on_calls(op, own));
}

LossWatch::Calls LossWatch::agree_on_calls(std::string_view op, const Calls& own) {
  for (;;) {
    try {
      Calls all = own;
      const std::vector<Bytes> blocks =
          survival_.group().all_gather(std::as_bytes(std::span(&own, 1)));
      for (const int rank : survival_.members()) {
        const auto at = static_cast<size_t>(rank);
        const auto theirs = block_value<Calls>(blocks[at], at, context_);
        all.last = std::max(all.last, theirs.last);
        all.first_void = std::min(all.first_void, theirs.first_void);
      }
      // Only what all have heard holds: whoever returned alone would go on from other numbers than
      // those who ask again, as one was lost before it had heard.
      if (survival_.finish_call(op)) {
        seen_to_leave_.reset();
        has_left_.store(false, std::memory_order_relaxed);
        return all;
      }
    } catch (const Error& error) {  // others were lost meanwhile, or have not come
      if (error.code() != ErrorCode::kPeerFailed || !survival_.settle(op, error.code())) {
        throw;
      }
    }
  }
}

bool LossWatch::has_ended(int rank) const {
  const std::lock_guard lock(mutex_);
  return survival_.has_ended(rank);
}

std::vector<int> LossWatch::readmit(std::span<const int> ranks, const Connect& connect) {
  const std::lock_guard lock(mutex_);
  has_news_.store(true, std::memory_order_release);  // nobody stops the kernels until resume()
  survival_.begin_call();
  std::vector<int> missing = survival_.readmit(ranks);
  meet_at_last(connect);
  return missing;
}

void LossWatch::check_lost(std::span<const int> ranks) const {
  const std::lock_guard lock(mutex_);
  survival_.check_lost(ranks);
}

void LossWatch::check_back(std::span<const int> ranks, std::span<const int> missing) const {
  const std::lock_guard lock(mutex_);
  survival_.check_back(ranks, missing);
}

void LossWatch::meet(const Connect& connect) {
  const std::lock_guard lock(mutex_);
  survival_.begin_call();
  meet_at_last(connect);
}

// It ends on all members with the same of them, whoever is lost meanwhile.
void LossWatch::meet_at_last(const Connect& connect) {
  for (bool is_over = false; !is_over;) {
    try {
      const Group group = with_control(survival_.group(), [this](std::span<const std::byte> block) {
        std::vector<Bytes> blocks = survival_.group().all_gather(block);
        for (size_t rank = 0; rank < blocks.size(); ++rank) {
          if (survival_.is_lost(static_cast<int>(rank))) {
            blocks[rank].assign(block.begin(), block.end());
          }
        }
        return blocks;
      });
      uint32_t newcomers = 0;  // maybe more than when this rank ended its own wait
      for (int rank = 0; rank < context_.num_ranks; ++rank) {
        newcomers |= survival_.has_come(rank) ? 1U << static_cast<uint32_t>(rank) : 0U;
      }
      connect(group, {.ranks = survival_.members(), .newcomers = newcomers});
      is_over = survival_.finish_call("readmit");
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kInvalidArgument ||
          !survival_.settle("readmit", error.code())) {
        survival_.leave();
        throw;
      }
    }
  }
  seen_to_leave_.reset();
  has_left_.store(false, std::memory_order_relaxed);
}

uint32_t LossWatch::lost() const {
  const std::lock_guard lock(mutex_);
  uint32_t lost = 0;
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    lost |= survival_.is_lost(rank) ? 1U << static_cast<uint32_t>(rank) : 0U;
  }
  return lost;
}

void LossWatch::resume() {
  has_news_.store(false, std::memory_order_release);
}

}  // namespace weft
