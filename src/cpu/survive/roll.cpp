// SPDX-License-Identifier: Apache-2.0
#include "cpu/survive/roll.hpp"

#include <algorithm>
#include <cstring>
#include <unistd.h>

#include "core/check.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"
#include "group/invitation.hpp"

namespace weft {
namespace {

// The word that decides. Calls count modulo 2^34, which no two of them are apart.
struct State {
  static constexpr int kCallBits = 34;
  static constexpr int kRankBits = 14;
  static_assert(kMaxRanks <= 1 << kRankBits);

  uint64_t epoch = 0;
  uint64_t proposer = 0;
  uint64_t committed = 0;

  explicit State(uint64_t bits)
      : epoch(bits >> (kCallBits + kRankBits)),
        proposer(bits >> kCallBits & ((uint64_t{1} << kRankBits) - 1)),
        committed(bits & ((uint64_t{1} << kCallBits) - 1)) {}
  [[nodiscard]] uint64_t bits() const {
    return (epoch << kRankBits | proposer) << kCallBits | committed;
  }
};

uint64_t counted(uint64_t call) {
  return call & ((uint64_t{1} << State::kCallBits) - 1);
}

uint64_t arrival(uint64_t epoch, uint64_t call) {
  return epoch << State::kCallBits | counted(call);
}

// The bell, then the word that decides, then the lines.
constexpr uint64_t kStateBytes = 64;
const uint64_t kBellBytes = (SignalBlock::num_bytes(0) + 63) / 64 * 64;

// Never 0.
uint64_t mail_number(uint64_t epoch, uint64_t round) {
  return epoch << 32 | (round + 1);
}

}  // namespace

bool Roll::Members::has(int rank) const {
  return std::ranges::binary_search(ranks, rank);
}

size_t Roll::line_bytes() const {
  const size_t bytes = sizeof(Line) + 2 * set_words() * sizeof(uint64_t);
  return (bytes + alignof(Line) - 1) / alignof(Line) * alignof(Line);
}

uint64_t Roll::num_bytes() const {
  return kBellBytes + kStateBytes + static_cast<uint64_t>(num_ranks_) * line_bytes();
}

Roll::Roll(MemorySource& source, const Group& group)
    : rank_(group.rank()),
      num_ranks_(group.num_ranks()),
      watches_(static_cast<size_t>(group.num_ranks())) {
  if (const auto invitation = invitation_of(group)) {
    map(source, invitation->cookie);
    return;
  }
  Cookie cookie = {};
  agree(group, [&] {
    if (rank_ == 0) {
      memory_ = source.allocate(num_bytes());
      cookie = memory_.cookie;
    }
  });
  const Cookie theirs = gather_values(group, cookie).front();
  agree(group, [&] {
    map(source, theirs);
    write(own_line().pid, static_cast<uint64_t>(::getpid()));
  });
  agree(group, [&] {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      watch(rank);
    }
  });
}

void Roll::map(MemorySource& source, const Cookie& cookie) {
  if (memory_.data == nullptr) {
    memory_ = source.reach(cookie, num_bytes(), true);
  }
  bell_ = SignalBlock(memory_.data);
  state_ = reinterpret_cast<uint64_t*>(memory_.data + kBellBytes);
  lines_ = memory_.data + kBellBytes + kStateBytes;
}

void Roll::watch(int rank) {
  const auto pid = read(line(rank).pid);
  auto& watch = watches_[static_cast<size_t>(rank)];
  watch = nullptr;
  try {
    const bool is_here = pid == static_cast<uint64_t>(::getpid());
    watch = std::make_unique<ProcessWatch>(
        is_here ? ProcessWatch() : ProcessWatch(static_cast<int32_t>(pid))
    );
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotAvailable) {
      throw;
    }
  }
}

// What the one before it in its place has left there is not its own.
void Roll::ask(bool is_asking) {
  Line& own = own_line();
  if (!is_asking) {
    write(own.asks, 0);
    return;
  }
  write(own.arrived, 0);
  write(own.mail[0].number, 0);
  write(own.mail[1].number, 0);
  write(own.has_left, 0);
  write(own.pid, static_cast<uint64_t>(::getpid()));
  write(own.asks, 1);
  bell_.ring();
}

bool Roll::asks(int rank) {
  if (read(line(rank).asks) == 0) {
    return false;
  }
  watch(rank);
  return !has_ended(rank);
}

uint64_t Roll::committed() const {
  return State(read(*state_)).committed;
}

Roll::Line& Roll::line(int rank) const {
  return *reinterpret_cast<Line*>(lines_ + static_cast<size_t>(rank) * line_bytes());
}

uint64_t* Roll::proposal(int rank, uint64_t epoch) const {
  auto* const sets = reinterpret_cast<uint64_t*>(&line(rank) + 1);
  return sets + epoch % 2 * set_words();
}

uint64_t Roll::epoch() const {
  return State(read(*state_)).epoch;
}

uint64_t Roll::beats(int rank) const {
  return read(line(rank).beats);
}

bool Roll::has_ended(int rank) const {
  return read(line(rank).has_left) != 0 || watches_[static_cast<size_t>(rank)] == nullptr ||
         !watches_[static_cast<size_t>(rank)]->is_alive();
}

// A slot is written again two epochs later, so the epoch is looked at once more after it was read.
Roll::Members Roll::members() const {
  for (;;) {
    const State now(read(*state_));
    Members members = {.epoch = now.epoch, .ranks = {}};
    uint64_t* const set = proposal(static_cast<int>(now.proposer), now.epoch);
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const auto at = static_cast<size_t>(rank);
      const uint64_t bits = read(set[at / 64]);
      if (now.epoch == 0 || (bits >> at % 64 & 1) != 0) {
        members.ranks.push_back(rank);
      }
    }
    if (epoch() == now.epoch) {
      return members;
    }
  }
}

void Roll::leave() {
  ask(false);
  write(own_line().has_left, 1);
  bell_.ring();
}

void Roll::arrive(const Members& with, uint64_t call) {
  write(own_line().arrived, arrival(with.epoch, call));
}

bool Roll::has_arrived(int rank, const Members& with, uint64_t call) const {
  return read(line(rank).arrived) == arrival(with.epoch, call);
}

bool Roll::commits(const Members& with, uint64_t call) {
  uint64_t seen = read(*state_);
  State next(seen);
  if (next.committed == counted(call)) {
    // In a later epoch of which this rank is a member it was not: that needed its arrival there.
    return next.epoch == with.epoch || members().has(rank_);
  }
  const auto is_here = [&](int rank) { return has_arrived(rank, with, call); };
  if (next.epoch != with.epoch || !std::ranges::all_of(with.ranks, is_here)) {
    return false;
  }
  next.committed = counted(call);
  const bool is_first = swap(*state_, seen, next.bits());
  if (is_first) {
    bell_.ring();
  }
  return is_first || (State(seen).committed == counted(call) && State(seen).epoch == with.epoch);
}

void Roll::propose(const Members& instead_of, uint64_t call, std::span<const int> ranks) {
  uint64_t seen = read(*state_);
  State next(seen);
  if (next.epoch != instead_of.epoch || next.committed == counted(call)) {
    return;
  }
  ++next.epoch;
  next.proposer = static_cast<uint64_t>(rank_);
  uint64_t* const set = proposal(rank_, next.epoch);
  for (size_t i = 0; i < set_words(); ++i) {
    uint64_t bits = 0;
    for (const int rank : ranks) {
      const auto at = static_cast<size_t>(rank);
      bits |= at / 64 == i ? uint64_t{1} << at % 64 : 0;
    }
    write(set[i], bits);
  }
  if (swap(*state_, seen, next.bits())) {
    bell_.ring();
  }
}

void Roll::post(uint64_t epoch, uint64_t round, std::span<const std::byte> block) {
  WEFT_CHECK(
      (Context{rank_, num_ranks_}),
      block.size() <= kMailBytes,
      ErrorCode::kInternal,
      "survive: a block of {} B is too long (at most {})",
      block.size(),
      kMailBytes
  );
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

std::optional<Bytes> Roll::mail(int rank, uint64_t epoch, uint64_t round) const {
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
