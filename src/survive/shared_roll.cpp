// SPDX-License-Identifier: Apache-2.0
#include "survive/shared_roll.hpp"

#include <algorithm>
#include <cstring>
#include <unistd.h>
#include <utility>

#include "core/check.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"
#include "group/invitation.hpp"

namespace weft {
namespace {

// The bell, then the word that decides, then the lines.
constexpr uint64_t kStateBytes = 64;
const uint64_t kBellBytes = (SignalBlock::num_bytes(0) + 63) / 64 * 64;

// Returns a watch of a process; for this one, a watch that sees nothing.
ProcessWatch watch_of(uint64_t pid) {
  return pid == static_cast<uint64_t>(::getpid()) ? ProcessWatch()
                                                  : ProcessWatch(static_cast<int32_t>(pid));
}

// Never 0.
uint64_t mail_number(uint64_t epoch, uint64_t round) {
  return epoch << 32 | (round + 1);
}

}  // namespace

size_t SharedRoll::line_bytes() const {
  const size_t bytes = sizeof(Line) + 2 * static_cast<size_t>(num_ranks_) * sizeof(uint64_t);
  return (bytes + alignof(Line) - 1) / alignof(Line) * alignof(Line);
}

uint64_t SharedRoll::num_bytes() const {
  return kBellBytes + kStateBytes + 2 * static_cast<uint64_t>(num_ranks_) * line_bytes();
}

SharedRoll::SharedRoll(std::unique_ptr<MemorySource> source, const Group& group)
    : context_(context_of(group)),
      rank_(group.rank()),
      num_ranks_(group.num_ranks()),
      lives_(static_cast<size_t>(group.num_ranks())),
      source_(std::move(source)),
      watches_(static_cast<size_t>(group.num_ranks())) {
  if (const auto invitation = invitation_of(group)) {
    map(invitation->cookie);
    lives_ = members().lives;
    watch_all();
    return;
  }
  Cookie cookie = {};
  agree(group, [&] {
    if (rank_ == 0) {
      memory_ = source_->allocate(num_bytes());
      cookie = memory_.cookie;
    }
  });
  const Cookie theirs = gather_values(group, cookie).front();
  agree(group, [&] {
    map(theirs);
    static_cast<void>(take_line());
  });
  agree(group, [&] { watch_all(); });
}

void SharedRoll::map(const Cookie& cookie) {
  if (memory_.data == nullptr) {
    memory_ = source_->reach(cookie, num_bytes(), true);
  }
  bell_ = SignalBlock(memory_.data);
  state_ = reinterpret_cast<uint64_t*>(memory_.data + kBellBytes);
  lines_ = memory_.data + kBellBytes + kStateBytes;
}

void SharedRoll::watch(int rank) {
  watches_[static_cast<size_t>(rank)] = watch_of(RollHolder(read(line(rank).holder)).pid);
}

void SharedRoll::watch_all() {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    watch(rank);
  }
}

void SharedRoll::follow(const Members& members) {
  const std::vector<uint64_t> before = std::exchange(lives_, members.lives);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const auto at = static_cast<size_t>(rank);
    if (before[at] != lives_[at] || !watches_[at].sees_end()) {
      watch(rank);
    }
  }
}

bool SharedRoll::is_in(const Members& members) const {
  return members.has(rank_) && members.lives[static_cast<size_t>(rank_)] == life_ && has_line();
}

// Takes it only from earlier lives, or a process that ended or left before it was a member.
bool SharedRoll::take_line() {
  uint64_t seen = read(own_line().holder);
  const RollHolder before(seen);
  const bool is_of_this_life = seen != 0 && before.life == life_;
  if (before.life > life_ || (is_of_this_life && is_there(own_line(), seen))) {
    return false;
  }
  const uint64_t own = before.next(life_, static_cast<uint64_t>(::getpid())).bits();
  const bool is_first = swap(own_line().holder, seen, own);
  taken_ = is_first ? own : 0;
  return is_first;
}

bool SharedRoll::is_there(Line& line, uint64_t holder) {
  return read(line.has_left) != holder && watch_of(RollHolder(holder).pid).is_alive();
}

// Asks to be taken in, in a line cleared of what others have left there. If the process that had
// the line was let in, this rank sees that now, or the others see that this one has the line.
void SharedRoll::ask(bool is_asking) {
  if (!is_asking) {
    if (has_line()) {
      write(own_line().asks, 0);
    }
    return;
  }
  if (!take_line()) {
    return;
  }
  Line& own = own_line();
  write(own.arrived, 0);
  write(own.mail[0].number, 0);
  write(own.mail[1].number, 0);
  if (is_past(members())) {
    leave();
    taken_ = 0;
    return;
  }
  write(own.asks, taken_);
  bell_.ring();
}

bool SharedRoll::is_past(const Members& members) const {
  return members.lives[static_cast<size_t>(rank_)] >= life_;
}

bool SharedRoll::is_turned_away() const {
  if (!has_line()) {
    return true;
  }
  const Members now = members();
  return is_past(now) && !is_in(now);
}

bool SharedRoll::asks(int rank) const {
  const uint64_t life = lives_[static_cast<size_t>(rank)] + 1;
  Line& next = line(seat(rank, life));
  const uint64_t holder = read(next.holder);
  return RollHolder(holder).life == life && read(next.asks) == holder && is_there(next, holder);
}

uint64_t SharedRoll::committed() const {
  return RollState(read(*state_)).committed;
}

SharedRoll::Line& SharedRoll::line(size_t seat) const {
  return *reinterpret_cast<Line*>(lines_ + seat * line_bytes());
}

uint64_t* SharedRoll::proposal(size_t seat, uint64_t epoch) const {
  auto* const sets = reinterpret_cast<uint64_t*>(&line(seat) + 1);
  return sets + epoch % 2 * static_cast<size_t>(num_ranks_);
}

uint64_t SharedRoll::epoch() const {
  return RollState(read(*state_)).epoch;
}

uint64_t SharedRoll::beats(int rank) const {
  return read(line(rank).beats);
}

bool SharedRoll::has_ended(int rank) const {
  return has_left(rank) || !watches_[static_cast<size_t>(rank)].is_alive();
}

bool SharedRoll::has_left(int rank) const {
  Line& of = line(rank);
  const uint64_t holder = read(of.has_left);
  return holder != 0 && RollHolder(holder).life == lives_[static_cast<size_t>(rank)] &&
         holder == read(of.holder);
}

// A proposal is overwritten two epochs later, so the epoch is read once more after it.
Roll::Members SharedRoll::members() const {
  for (;;) {
    const RollState now(read(*state_));
    Members members = {.epoch = now.epoch, .ranks = {}, .lives = {}};
    uint64_t* const set = proposal(now.proposer, now.epoch);
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const uint64_t bits = now.epoch == 0 ? 1 : read(set[rank]);
      members.lives.push_back(bits / 2);
      if (bits % 2 != 0) {
        members.ranks.push_back(rank);
      }
    }
    if (epoch() == now.epoch) {
      return members;
    }
  }
}

bool SharedRoll::has_line() const {
  return RollHolder(taken_).pid == static_cast<uint64_t>(::getpid()) &&
         read(own_line().holder) == taken_;
}

void SharedRoll::leave() {
  if (!has_line()) {
    return;
  }
  write(own_line().has_left, taken_);
  bell_.ring();
}

void SharedRoll::arrive(const Members& with, uint64_t call) {
  if (has_line()) {
    write(own_line().arrived, RollState::arrival(with.epoch, call));
  }
}

bool SharedRoll::has_arrived(int rank, const Members& with, uint64_t call) const {
  return read(line(rank).arrived) == RollState::arrival(with.epoch, call);
}

bool SharedRoll::commits(const Members& with, uint64_t call) {
  uint64_t seen = read(*state_);
  RollState next(seen);
  if (next.committed == RollState::counted(call)) {
    // The call did not end in a later epoch with this rank: that needed its arrival there.
    return next.epoch == with.epoch || is_in(members());
  }
  const auto is_here = [&](int rank) { return has_arrived(rank, with, call); };
  if (next.epoch != with.epoch || !std::ranges::all_of(with.ranks, is_here)) {
    return false;
  }
  next.committed = RollState::counted(call);
  const bool is_first = swap(*state_, seen, next.bits());
  if (is_first) {
    bell_.ring();
  }
  return is_first || (RollState(seen).committed == RollState::counted(call) &&
                      RollState(seen).epoch == with.epoch);
}

void SharedRoll::propose(const Members& instead_of, uint64_t call, std::span<const int> ranks) {
  uint64_t seen = read(*state_);
  RollState next(seen);
  if (next.epoch != instead_of.epoch || next.committed == RollState::counted(call)) {
    return;
  }
  next.change(seat(rank_, life_), context_);
  uint64_t* const set = proposal(next.proposer, next.epoch);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const bool is_member = std::ranges::find(ranks, rank) != ranks.end();
    const bool is_new = is_member && !instead_of.has(rank);
    const uint64_t life = instead_of.lives[static_cast<size_t>(rank)] + (is_new ? 1 : 0);
    write(set[rank], 2 * life + (is_member ? 1 : 0));
  }
  if (swap(*state_, seen, next.bits())) {
    bell_.ring();
  }
}

void SharedRoll::post(uint64_t epoch, uint64_t round, std::span<const std::byte> block) {
  WEFT_CHECK(
      (Context{rank_, num_ranks_}),
      block.size() <= kMailBytes,
      ErrorCode::kInternal,
      "survive: a block of {} B is too long (at most {})",
      block.size(),
      kMailBytes
  );
  if (!has_line()) {
    return;
  }
  Mail& mail = own_line().mail[round % 2];
  // Each store after the first, and each load before the last, keeps the order of the two numbers.
  write(mail.number, 0);
  write(mail.bytes, block.size());
  for (size_t begin = 0; begin < block.size(); begin += sizeof(uint64_t)) {
    uint64_t bits = 0;
    std::memcpy(&bits, block.data() + begin, std::min(sizeof bits, block.size() - begin));
    write(mail.words[begin / sizeof bits], bits);
  }
  write(mail.number, mail_number(epoch, round));
  bell_.ring();
}

std::optional<Bytes> SharedRoll::mail(int rank, uint64_t epoch, uint64_t round) const {
  Mail& mail = line(rank).mail[round % 2];
  const auto is_there = [&] { return read(mail.number) == mail_number(epoch, round); };
  if (!is_there()) {
    return std::nullopt;
  }
  Bytes block(std::min<size_t>(read(mail.bytes), kMailBytes));
  for (size_t begin = 0; begin < block.size(); begin += sizeof(uint64_t)) {
    const auto bits = read(mail.words[begin / sizeof(uint64_t)]);
    std::memcpy(block.data() + begin, &bits, std::min(sizeof bits, block.size() - begin));
  }
  return is_there() ? std::optional(std::move(block)) : std::nullopt;
}

}  // namespace weft
