// SPDX-License-Identifier: Apache-2.0
#include "survive/message_roll.hpp"

#include <algorithm>
#include <new>
#include <numeric>
#include <poll.h>

#include "core/check.hpp"
#include "group/control_plane.hpp"
#include "survive/messages.hpp"

namespace weft {
namespace {

// Time that the higher of two ranks that do not hear of each other lets the lower one say so first,
// so that they do not leave each other out.
constexpr auto kYield = std::chrono::milliseconds(250);
// A waiting rank sends a beat this often, at most.
constexpr auto kBeatEvery = std::chrono::milliseconds(100);
constexpr auto kClosePatience = std::chrono::seconds(1);
// Frames that a new process may send before a rank has heard that it is let in.
constexpr size_t kMostFrames = 1024;

Agreed all_ranks(int num_ranks) {
  const auto count = static_cast<size_t>(num_ranks);
  Agreed all = {
      .members =
          {.epoch = 0, .ranks = std::vector<int>(count), .lives = std::vector<uint64_t>(count)},
      .committed = 0};
  std::iota(all.members.ranks.begin(), all.members.ranks.end(), 0);
  return all;
}

}  // namespace

MessageRoll::MessageRoll(const Group& group, std::chrono::milliseconds timeout)
    : MessageRoll(context_of(group), timeout, begin(group, timeout)) {}

MessageRoll::MessageRoll(
    const Group& group, const Invitation& invitation, std::chrono::milliseconds timeout
)
    : MessageRoll(context_of(group), timeout, join(group, invitation, timeout)) {}

MessageRoll::MessageRoll(const Context& context, std::chrono::milliseconds timeout, Start start)
    : context_(context),
      beat_every_(std::min<std::chrono::nanoseconds>(kBeatEvery, timeout / 8)),
      life_(start.life),
      links_(std::move(start.links)),
      ballots_(context.rank, start.life, start.agreed),
      peers_(static_cast<size_t>(context.num_ranks)),
      lives_(std::move(start.agreed.members.lives)),
      next_beat_(Clock::now()) {
  lives_[static_cast<size_t>(context.rank)] = life_;
  ring();
  thread_ = std::thread([this] { run(); });
}

MessageRoll::Start MessageRoll::begin(const Group& group, std::chrono::milliseconds timeout) {
  return {.links = Links(group, timeout), .life = 0, .agreed = all_ranks(group.num_ranks())};
}

MessageRoll::Start MessageRoll::join(
    const Group& group, const Invitation& invitation, std::chrono::milliseconds timeout
) {
  const Context context = context_of(group);
  const Deadline deadline(timeout);
  const auto check = [&](bool is_in_time) {
    WEFT_CHECK(
        context,
        is_in_time,
        ErrorCode::kTimeout,
        "rejoin: rank {} is not lost to the others",
        context.rank
    );
  };
  Welcome welcome;
  for (bool is_taken = false;; is_taken = true) {
    Bytes answer;
    try {
      answer = Links::ask(invitation.address, invitation.port, invitation.token, deadline, context);
    } catch (const Error&) {
      check(!is_taken || !deadline.has_passed());  // the last answer holds
      throw;
    }
    std::span<const std::byte> rest = answer;
    const auto num_ranks = static_cast<size_t>(context.num_ranks);
    const Number number = take_number(rest).value_or(Number());
    welcome = welcome_in(number, rest, num_ranks);
    WEFT_CHECK(
        context,
        welcome.agreed.members.lives.size() == num_ranks && welcome.cards.size() == num_ranks,
        ErrorCode::kPeerFailed,
        "rejoin: an answer of {} B is none of {} ranks",
        answer.size(),
        num_ranks
    );
    if (!welcome.agreed.members.has(context.rank)) {
      break;
    }
    check(deadline.left() > Links::kAskEvery);
    std::this_thread::sleep_for(Links::kAskEvery);
  }
  const Members& members = welcome.agreed.members;
  const uint64_t life =
      next_life(members.lives[static_cast<size_t>(context.rank)], random_value<uint32_t>());
  Start start = {.links = Links(group, invitation.token), .life = life, .agreed = welcome.agreed};
  start.links.join(life, members.ranks, members.lives, welcome.cards);
  return start;
}

MessageRoll::~MessageRoll() {
  try {
    leave();
  } catch (const std::bad_alloc&) {  // its connections end all the same
  }
  is_stopping_ = true;
  links_.wake();
  thread_.join();
}

// --- the thread ---

void MessageRoll::run() {
  try {
    listen();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
    links_.close();
    has_failed_.store(true, std::memory_order_release);
    ring();
  }
}

void MessageRoll::check_listens() const {
  if (!has_failed_.load(std::memory_order_acquire)) {
    return;
  }
  constexpr std::string_view kText = "survive: this rank hears no other any more ({})";
  try {
    std::rethrow_exception(failure_);
  } catch (const Error& error) {
    WEFT_RAISE(context_, error.code(), kText, error.what());
  } catch (const std::bad_alloc&) {
    WEFT_RAISE(context_, ErrorCode::kOutOfMemory, kText, "out of memory");
  } catch (const std::exception& error) {
    WEFT_RAISE(context_, ErrorCode::kInternal, kText, error.what());
  }
}

void MessageRoll::beat() {
  check_listens();
  own_beats_.fetch_add(1, std::memory_order_relaxed);
}

void MessageRoll::listen() {
  auto is_over = [&, end = std::optional<Clock::time_point>()]() mutable {
    if (!is_stopping_) {
      return false;
    }
    end = end.value_or(Clock::now() + kClosePatience);
    const std::lock_guard lock(mutex_);
    return !links_.has_unsent() || Clock::now() >= *end;
  };
  while (!is_over()) {
    std::vector<pollfd> wanted;
    {
      const std::lock_guard lock(mutex_);
      wanted = links_.wanted();
    }
    const auto most = std::chrono::duration_cast<std::chrono::milliseconds>(beat_every_);
    const int ms = is_stopping_ ? 1 : std::max(1, static_cast<int>(most.count()));
    ::poll(wanted.data(), wanted.size(), ms);
    const std::lock_guard lock(mutex_);
    links_.move(
        {.on_frame =
             [this](int rank, uint64_t life, const Frame& frame) { hear(rank, life, frame); },
         .on_question = [this] { return welcome(); }}
    );
    tell_beats();
    ring();
  }
}

// Keeps the frames of a later life: it may send some before this rank hears that it is let in.
void MessageRoll::hear(int rank, uint64_t life, const Frame& frame) {
  Peer& one = peer(rank);
  const uint64_t now = lives_[static_cast<size_t>(rank)];
  if (life <= now) {
    if (life == now) {
      hear_member(rank, frame);
    }
    return;
  }
  const bool asks = frame.header.kind == FrameKind::kAsk;
  if (one.next_life != life || asks) {
    one.next_life = life;
    one.next_asks = asks;
    one.next_frames.clear();
  }
  if (frame.header.kind == FrameKind::kLeft) {
    one.next_asks = false;
  }
  if (!asks && one.next_frames.size() < kMostFrames) {
    one.next_frames.push_back(frame);
  }
}

void MessageRoll::hear_member(int rank, const Frame& frame) {
  if (frame.header.kind == FrameKind::kLeft) {
    peer(rank).has_left = true;
    return;
  }
  if (frame.header.kind == FrameKind::kBeat) {
    ++peer(rank).beats;
    return;
  }
  std::span<const std::byte> rest = frame.payload;
  const std::optional<Number> number = take_number(rest);
  // A rank with other members tells so before it says anything else.
  if (!number || (frame.header.kind != FrameKind::kAgreed && number->set != set())) {
    return;
  }
  switch (frame.header.kind) {
    case FrameKind::kArrived:
      ballots_.arrive(rank, number->epoch, number->of);
      return;
    case FrameKind::kVote: {
      const Vote vote = vote_in(*number, rest);
      for (size_t other = 0; other < std::min(vote.wishes.size(), peers_.size()); ++other) {
        peers_[other].has_died = peers_[other].has_died || vote.wishes[other] == Wish::kGone;
      }
      tell(ballots_.hear(rank, vote));
      return;
    }
    case FrameKind::kAgreed: {
      const Welcome welcome = welcome_in(*number, rest, peers_.size());
      tell(ballots_.hear(rank, welcome.agreed));
      links_.learn(welcome.agreed.members.lives, welcome.cards);
      return;
    }
    case FrameKind::kMail: {
      std::map<MailNumber, Bytes>& mail = peer(rank).mail;
      mail[{number->epoch, number->of}] = Bytes(rest.begin(), rest.end());
      // The round before may not have been read yet.
      const uint64_t first = std::max<uint64_t>(number->of, 1) - 1;
      mail.erase(mail.begin(), mail.lower_bound({number->epoch, first}));
      return;
    }
    default:
      return;
  }
}

uint64_t MessageRoll::set() const {
  return number_of(ballots_.agreed().members);
}

void MessageRoll::tell_beats() {
  const auto now = Clock::now();
  if (now < next_beat_) {
    return;
  }
  const uint64_t beats = own_beats_.load(std::memory_order_relaxed);
  if (std::exchange(told_beats_, beats) != beats) {
    next_beat_ = now + beat_every_;
    tell_all(FrameKind::kBeat, {});
  }
  if (is_asking_ && !ballots_.is_in()) {  // again: some may have turned it away before
    next_beat_ = now + beat_every_;
    tell_all(FrameKind::kAsk, {});
  }
}

// Sends to new processes, too: they may be members by then.
void MessageRoll::tell_all(FrameKind kind, std::span<const std::byte> payload) {
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    if (rank != context_.rank) {
      links_.send(rank, kind, payload);
      links_.send_next(rank, kind, payload);
    }
  }
}

void MessageRoll::tell(const Ballots::News& news) {
  if (news.is_vote && ballots_.own_vote() != nullptr) {
    tell_all(FrameKind::kVote, encode(*ballots_.own_vote(), set()));
  }
  if (news.is_agreed) {
    for (Peer& one : peers_) {
      one.silent_since.reset();
    }
  }
  const std::vector<Said> said = take_lives();
  if (news.is_agreed) {
    tell_all(FrameKind::kAgreed, welcome());
  }
  for (const auto& [rank, frames] : said) {
    for (const Frame& frame : frames) {
      hear(rank, lives_[static_cast<size_t>(rank)], frame);
    }
  }
}

std::vector<MessageRoll::Said> MessageRoll::take_lives() {
  std::vector<Said> said;
  const Members& members = ballots_.agreed().members;
  for (int rank = 0; rank < context_.num_ranks && !ballots_.is_out(); ++rank) {
    const auto at = static_cast<size_t>(rank);
    if (rank == context_.rank) {
      continue;
    }
    if (lives_[at] != members.lives[at]) {
      said.emplace_back(rank, take_life(rank, members.lives[at]));
    }
    if (!members.has(rank)) {
      links_.dismiss(rank);
    }
  }
  return said;
}

std::vector<Frame> MessageRoll::take_life(int rank, uint64_t life) {
  const bool connects = rank < context_.rank || !ballots_.is_in();
  lives_[static_cast<size_t>(rank)] = life;
  links_.take(rank, life, connects);
  if (!ballots_.is_in() && is_asking_) {
    links_.send(rank, FrameKind::kAsk, {});
  }
  Peer before = std::exchange(peer(rank), {});
  if (before.next_life == life) {
    return std::move(before.next_frames);
  }
  if (before.next_life > life) {
    peer(rank).next_life = before.next_life;
    peer(rank).next_asks = before.next_asks;
    peer(rank).next_frames = std::move(before.next_frames);
  }
  return {};
}

Bytes MessageRoll::welcome() const {
  return encode(Welcome{.agreed = ballots_.agreed(), .cards = links_.cards()});
}

void MessageRoll::ring() {
  committed_.store(ballots_.agreed().committed, std::memory_order_release);
  epoch_.store(ballots_.agreed().members.epoch, std::memory_order_release);
  doorbell_.fetch_add(1, std::memory_order_release);
  bell_.notify_all();
}

void MessageRoll::sleep(uint32_t seen, std::chrono::nanoseconds at_most) {
  std::unique_lock lock(mutex_);
  bell_.wait_for(lock, at_most, [&] { return doorbell() != seen; });
  check_listens();
}

// --- what is known ---

bool MessageRoll::has_ended_here(int rank) const {
  return rank != context_.rank &&
         (peer(rank).has_left || peer(rank).has_died || links_.has_ended(rank));
}

uint64_t MessageRoll::beats(int rank) const {
  const std::lock_guard lock(mutex_);
  return peer(rank).beats;
}

bool MessageRoll::has_ended(int rank) const {
  const std::lock_guard lock(mutex_);
  return has_ended_here(rank);
}

bool MessageRoll::has_left(int rank) const {
  const std::lock_guard lock(mutex_);
  return peer(rank).has_left;
}

Roll::Members MessageRoll::members() const {
  const std::lock_guard lock(mutex_);
  return ballots_.agreed().members;
}

bool MessageRoll::is_in(const Members& members) const {
  return members.has(context_.rank) && members.lives[static_cast<size_t>(context_.rank)] == life_;
}

bool MessageRoll::has_arrived(int rank, const Members& with, uint64_t call) const {
  const std::lock_guard lock(mutex_);
  return ballots_.has_arrived(rank, with.epoch, call);
}

bool MessageRoll::is_awaited(int rank, const Members& with, uint64_t call) const {
  const std::lock_guard lock(mutex_);
  return !ballots_.has_arrived(rank, with.epoch, call) || ballots_.lacks_word_of(rank);
}

std::optional<Bytes> MessageRoll::mail(int rank, uint64_t epoch, uint64_t round) const {
  const std::lock_guard lock(mutex_);
  const auto found = peer(rank).mail.find({epoch, round});
  return found == peer(rank).mail.end() ? std::nullopt : std::optional(found->second);
}

// --- what this rank does ---

void MessageRoll::arrive(const Members& with, uint64_t call) {
  const std::lock_guard lock(mutex_);
  const Number number = {.epoch = with.epoch, .of = call, .set = set()};
  if (ballots_.agreed().members.epoch != with.epoch) {
    return;
  }
  ballots_.arrive(context_.rank, with.epoch, call);
  tell_all(FrameKind::kArrived, value_bytes(number));
  ring();
}

bool MessageRoll::commits(const Members& with, uint64_t call) {
  if (committed() != call) {
    return false;
  }
  // The call did not end in a later epoch with this rank: that needed its arrival there.
  return epoch() == with.epoch || is_in(members());
}

void MessageRoll::propose(const Members& instead_of, uint64_t call, std::span<const int> ranks) {
  const std::lock_guard lock(mutex_);
  const Agreed& agreed = ballots_.agreed();
  if (agreed.members.epoch != instead_of.epoch || agreed.committed == call) {
    return;
  }
  const auto now = Clock::now();
  std::vector<Wish> wishes(peers_.size());
  bool is_same = true;
  for (const int rank : ranks) {
    if (!instead_of.has(rank)) {
      is_same = false;
      wishes[static_cast<size_t>(rank)] =
          asks_here(rank) ? taken_in(peer(rank).next_life) : Wish::kNone;
    }
  }
  for (const int rank : instead_of.ranks) {
    if (std::ranges::find(ranks, rank) != ranks.end()) {
      continue;
    }
    is_same = false;
    std::optional<Clock::time_point>& since = peer(rank).silent_since;
    since = since.value_or(now);
    const bool yields = rank < context_.rank && now - *since < kYield;
    const Wish silent = yields ? Wish::kNone : Wish::kSilent;
    wishes[static_cast<size_t>(rank)] = has_ended_here(rank) ? Wish::kGone : silent;
  }
  const bool is_any = std::ranges::any_of(wishes, [](Wish wish) { return wish != Wish::kNone; });
  if (is_any || is_same) {
    tell(ballots_.vote(wishes));
    ring();
  }
}

void MessageRoll::post(uint64_t epoch, uint64_t round, std::span<const std::byte> block) {
  const std::lock_guard lock(mutex_);
  const Bytes bytes = encode(Number{.epoch = epoch, .of = round, .set = set()}, block);
  hear_member(context_.rank, {.header = {.kind = FrameKind::kMail}, .payload = bytes});
  tell_all(FrameKind::kMail, bytes);
  ring();
}

void MessageRoll::leave() {
  const std::lock_guard lock(mutex_);
  is_asking_ = false;
  if (!std::exchange(peer(context_.rank).has_left, true)) {
    tell_all(FrameKind::kLeft, {});
  }
}

// --- joining again ---

void MessageRoll::invite(Invitation& invitation) const {
  const std::lock_guard lock(mutex_);
  invitation.address = links_.own_card().address.data();
  invitation.port = links_.own_card().port;
  invitation.token = links_.token();
}

void MessageRoll::ask(bool is_asking) {
  const std::lock_guard lock(mutex_);
  is_asking_ = is_asking;
  if (is_asking) {
    tell_all(FrameKind::kAsk, {});
  }
}

bool MessageRoll::is_turned_away() const {
  const std::lock_guard lock(mutex_);
  const Members& members = ballots_.agreed().members;
  const bool is_taken =
      turn_of(members.lives[static_cast<size_t>(context_.rank)]) >= turn_of(life_);
  const bool is_heard = std::ranges::any_of(members.ranks, [this](int rank) {
    return rank != context_.rank && (links_.is_open(rank) || links_.is_awaited(rank));
  });
  return !ballots_.is_in() && (is_taken || !is_heard);
}

bool MessageRoll::asks_here(int rank) const {
  return peer(rank).next_asks && links_.has_next(rank, peer(rank).next_life);
}

bool MessageRoll::asks(int rank) const {
  const std::lock_guard lock(mutex_);
  return asks_here(rank);
}

}  // namespace weft
