// SPDX-License-Identifier: Apache-2.0
#include "cuda/exchange/loss_watch.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <utility>

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

// The threads of this process that wait for other ranks, and where.
struct WaitingThreads {
  std::mutex mutex;
  std::map<std::thread::id, const LossWatch*> where;

  // Returns what was there.
  const LossWatch* set(std::thread::id thread, const LossWatch* now) {
    const std::lock_guard lock(mutex);
    return std::exchange(where[thread], now);
  }
  [[nodiscard]] bool is_elsewhere(std::thread::id thread, const LossWatch* here) {
    const std::lock_guard lock(mutex);
    const auto found = where.find(thread);
    return found != where.end() && found->second != nullptr && found->second != here;
  }
};

WaitingThreads& waiting_threads() {
  static WaitingThreads threads;
  return threads;
}

}  // namespace

LossWatch::Wait::Wait(const LossWatch* where) : where_(where) {
  if (where_ != nullptr) {
    before_ = waiting_threads().set(std::this_thread::get_id(), where_);
  }
}

LossWatch::Wait::~Wait() {
  if (where_ != nullptr) {
    waiting_threads().set(std::this_thread::get_id(), before_);
  }
}

LossWatch::LossWatch(
    const Group& group, const Context& context, std::chrono::milliseconds timeout, Kernels kernels
)
    : context_(context),
      timeout_(timeout),
      kernels_(std::move(kernels)),
      survival_(group, context, timeout),
      vigil_(survival_.begin_wait()),
      has_news_(invitation_of(group).has_value()) {
  tell();
  thread_ = std::thread([this] { run(); });
}

LossWatch::~LossWatch() {
  is_ended_.store(true, std::memory_order_relaxed);
  survival_.stop();
  thread_.join();
  survival_.leave();
}

void LossWatch::run() {
  set_log_rank(context_.rank, context_.num_ranks);
  std::string told;
  while (!is_ended_.load(std::memory_order_relaxed)) {
    try {
      look();
      if (!kernels_.repeats.make) {
        answer();
      } else if (has_news() && kernels_.repeats.try_lock()) {
        const std::unique_ptr<const Repeats, void (*)(const Repeats*)> locked(
            &kernels_.repeats, [](const Repeats* repeats) { repeats->unlock(); }
        );
        answer();
      }
    } catch (const std::exception& error) {
      if (std::exchange(told, error.what()) != told) {
        log(LogLevel::kWarn, "exchange: watching for lost ranks: {}", error.what());
      }
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
  const bool is_late = !is_no_loss_ && kernels_.repeats.late && kernels_.repeats.late();
  if (trouble == Survival::Trouble::kNone && !is_late) {
    return;
  }
  if (!is_late && trouble == Survival::Trouble::kLeft) {
    has_left_.store(true, std::memory_order_relaxed);
    const auto now = Clock::now();
    seen_to_leave_ = seen_to_leave_.value_or(now);
    if (now - *seen_to_leave_ < kFarewell) {
      return;
    }
  }
  has_news_.store(true, std::memory_order_release);  // first: a call that is cut short has a reason
  kernels_.stop();
}

// Answers for void calls only if others have begun to agree and the calling thread waits elsewhere,
// not here for its turn. A rank that has heard of a loss, and of another one before its next call,
// says that it has gone on from the first, and made no call since.
void LossWatch::answer() {
  const std::lock_guard lock(mutex_);
  const bool repeats = kernels_.repeats.make != nullptr;
  const bool is_asked =
      (survival_.has_moved() || are_void_) &&
      waiting_threads().is_elsewhere(caller_.load(std::memory_order_relaxed), this);
  const bool is_due = is_asked || (repeats && !answered_ && !is_no_loss_ && !are_void_);
  if (!has_news() || answer_error_ || !is_due) {
    return;
  }
  try {
    const std::optional<Calls> own = answered_ ? calls_since_answer() : kernels_.calls();
    if (!own) {
      return;
    }
    const auto late = repeats ? kernels_.repeats.late() : std::nullopt;
    survival_.begin_call(/*is_second_part=*/answered_.has_value() || are_void_);
    const ErrorCode cause = late ? late->cause : ErrorCode::kPeerFailed;
    if (!are_void_ && !settle_members("check", cause, late ? late->rank : std::nullopt)) {
      if (late) {
        is_no_loss_ = true;
        kernels_.repeats.release();
      }
      return;
    }
    const Agreement agreement = agree_on_calls("check", *own);
    if (repeats && !are_void_) {
      if (agreement.is_repeated) {
        tell();
        kernels_.repeats.make(agreement);
        resume();
      } else {
        are_void_ = true;
        kernels_.repeats.release();
      }
      return;
    }
    are_void_ = false;
    if (answered_) {
      add_to_answer(agreement);
    } else {
      answered_last_ = own->last;
      answered_ = agreement;
    }
  } catch (const std::exception&) {
    answer_error_ = std::current_exception();
    if (repeats) {
      kernels_.repeats.release();
    }
  }
}

// This rank has gone on from the answer and made no call since.
LossWatch::Calls LossWatch::calls_since_answer() const {
  return {.last = answered_->last + 1, .first_void = answered_->last + 2};
}

void LossWatch::add_to_answer(const Agreement& agreement) {
  answered_->last = agreement.last;
  answered_->calls_behind += agreement.calls_behind;
}

bool LossWatch::settle_members(std::string_view op, ErrorCode cause, std::optional<int> late) {
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
  return survival_.settle(op, cause);
}

bool LossWatch::await_news(std::chrono::milliseconds at_most) const {
  const Deadline deadline(at_most);
  while (!has_news() && !deadline.has_passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return has_news();
}

void LossWatch::tell() {
  const std::lock_guard lock(told_mutex_);
  told_ = {
      .epoch = survival_.epoch(), .alive = survival_.members(), .lost = survival_.lost_in_call()};
}

CallReport LossWatch::report() const {
  const std::lock_guard lock(told_mutex_);
  return told_;
}

void LossWatch::leave() {
  const std::lock_guard lock(mutex_);
  survival_.leave();
}

void LossWatch::mask(std::span<const int> ranks) {
  const std::lock_guard lock(mutex_);
  survival_.give_up(ranks);
}

std::optional<LossWatch::Agreement> LossWatch::settle(
    std::string_view op, ErrorCode cause, const Calls& own, std::optional<int> late
) {
  const Wait wait(this);
  const std::lock_guard lock(mutex_);
  has_news_.store(true, std::memory_order_release);  // no kernel is stopped until resume()
  if (answer_error_) {
    std::rethrow_exception(answer_error_);
  }
  if (answered_ && are_void_) {  // of another loss since
    survival_.begin_call(/*is_second_part=*/true);
    add_to_answer(agree_on_calls(op, calls_since_answer()));
    are_void_ = false;
  }
  if (answered_) {
    const auto replays = static_cast<int64_t>(own.last - answered_last_);  // since
    answered_->void_calls += replays;
    answered_->calls_behind = std::max<int64_t>(answered_->calls_behind - replays, 0);
    tell();
    return std::exchange(answered_, std::nullopt);
  }
  is_no_loss_ = false;
  survival_.begin_call(/*is_second_part=*/are_void_);
  if (are_void_ || settle_members(op, cause, late)) {
    Agreement agreement = agree_on_calls(op, own);
    if (kernels_.repeats.make && !are_void_) {
      survival_.begin_call(/*is_second_part=*/true);
      agreement = agree_on_calls(op, own);
    }
    are_void_ = false;
    tell();
    return agreement;
  }
  tell();
  resume();
  return std::nullopt;
}

std::optional<LossWatch::Agreement> LossWatch::assemble(std::string_view op, const Calls& own) {
  const Wait wait(this);
  const std::lock_guard lock(mutex_);
  has_news_.store(true, std::memory_order_release);
  survival_.begin_call();
  std::optional<Agreement> agreement;
  if (!survival_.finish_call(op)) {
    agreement = agree_on_calls(op, own);
  }
  tell();
  return agreement;
}

LossWatch::Agreement LossWatch::agree_on_calls(std::string_view op, const Calls& own) {
  for (;;) {
    try {
      Calls all = own;
      std::vector<Calls> each;
      const std::vector<Bytes> blocks =
          survival_.group().all_gather(std::as_bytes(std::span(&own, 1)));
      for (const int rank : survival_.members()) {
        const auto at = static_cast<size_t>(rank);
        const auto theirs = block_value<Calls>(blocks[at], at, context_);
        all.last = std::max(all.last, theirs.last);
        all.first_void = std::min(all.first_void, theirs.first_void);
        all.passed = std::max(all.passed, theirs.passed);
        all.whole = std::min(all.whole, theirs.whole);
        each.push_back(theirs);
      }
      // A gate that some have passed has let all know that they are whole up to it; then come the
      // calls before one gate more, if any.
      const bool is_repeated = std::ranges::all_of(each, [&](const Calls& one) {
        const auto held = static_cast<uint64_t>(one.num_held);
        const bool is_there = one.passed == all.passed
                                  ? one.last == one.passed + held
                                  : one.whole == all.passed && one.last == all.passed;
        return one.can_repeat != 0 && is_there;
      });
      // Only what all have heard holds: a rank that returned alone would go on from other numbers
      // than ranks that ask again, as one was lost before it had heard.
      if (survival_.finish_call(op)) {
        seen_to_leave_.reset();
        has_left_.store(false, std::memory_order_relaxed);
        if (kernels_.connect) {
          survival_.begin_call(/*is_second_part=*/true);
          meet_at_last(op, kernels_.connect);
        }
        return {
            .last = all.last,
            .void_calls = static_cast<int64_t>(own.last + 1 - all.first_void),
            .calls_behind = static_cast<int64_t>(all.last - own.last),
            .is_repeated = is_repeated,
            .whole = all.whole};
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
  const Wait wait(this);
  const std::lock_guard lock(mutex_);
  has_news_.store(true, std::memory_order_release);  // no kernel is stopped until resume()
  survival_.begin_call();
  std::vector<int> missing = survival_.readmit(ranks);
  meet_at_last("readmit", connect);
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
  const Wait wait(this);
  const std::lock_guard lock(mutex_);
  survival_.begin_call();
  meet_at_last("rejoin", connect);
}

// Ends on all members with the same members, even if ranks are lost meanwhile.
void LossWatch::meet_at_last(std::string_view op, const Connect& connect) {
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
      Meeting who = {.ranks = survival_.members()};
      // Maybe more than when this rank ended its own wait.
      std::ranges::copy_if(who.ranks, std::back_inserter(who.newcomers), [this](int rank) {
        return survival_.has_come(rank);
      });
      connect(group, who);
      is_over = survival_.finish_call(op);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kInvalidArgument || !survival_.settle(op, error.code())) {
        survival_.leave();
        throw;
      }
    }
  }
  seen_to_leave_.reset();
  has_left_.store(false, std::memory_order_relaxed);
  tell();
}

uint32_t LossWatch::lost() const {
  const std::lock_guard lock(told_mutex_);
  uint32_t lost = 0;
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    const bool is_alive = std::ranges::binary_search(told_.alive, rank);
    lost |= is_alive ? 0U : 1U << static_cast<uint32_t>(rank);
  }
  return lost;
}

void LossWatch::raise(
    std::string_view op,
    const CallReport& now,
    const std::function<void(const CallReport&)>& on_loss
) const {
  if (on_loss) {
    on_loss(now);
  }
  WEFT_RAISE(
      context_,
      ErrorCode::kRanksLost,
      "{}: {} {} lost; {} of {} ranks go on, and the last {} calls of this one are to be made "
      "again",
      op,
      rank_list(now.lost),
      now.lost.size() == 1 ? "is" : "are",
      now.alive.size(),
      context_.num_ranks,
      now.void_calls
  );
}

void LossWatch::resume() {
  has_news_.store(false, std::memory_order_release);
}

void await_stopped(
    const Context& context,
    std::chrono::milliseconds timeout,
    const std::function<bool()>& have_ended
) {
  const auto at_most = 2 * timeout;
  const Deadline deadline(at_most);
  while (!have_ended()) {
    WEFT_CHECK(
        context,
        !deadline.has_passed(),
        ErrorCode::kTimeout,
        "survive: what was queued before the last call has not ended within {}",
        seconds_text(at_most)
    );
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace weft
