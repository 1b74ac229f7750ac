// SPDX-License-Identifier: Apache-2.0
#include "survive/ballots.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace weft {
namespace {

bool is_end(Wish wish) {
  return wish == Wish::kSilent || wish == Wish::kGone;
}

}  // namespace

Ballots::Ballots(int rank, uint64_t life, Agreed first)
    : rank_(rank),
      life_(life),
      agreed_(std::move(first)),
      before_(agreed_.members),
      arrivals_(agreed_.members.lives.size()),
      votes_(agreed_.members.lives.size()) {}

const Vote* Ballots::vote_of(int rank) const {
  const std::optional<Vote>& vote = votes_[static_cast<size_t>(rank)];
  return vote ? &*vote : nullptr;
}

bool Ballots::is_in() const {
  return is_among(agreed_.members);
}

bool Ballots::is_among(const Roll::Members& members) const {
  return members.has(rank_) && members.lives[static_cast<size_t>(rank_)] == life_;
}

bool Ballots::leaves_out(int rank) const {
  return own_vote() != nullptr && is_end(own_vote()->wishes[static_cast<size_t>(rank)]);
}

bool Ballots::has_arrived(int rank, uint64_t epoch, uint64_t call) const {
  const Arrival& last = arrivals_[static_cast<size_t>(rank)];
  return last.epoch == epoch && last.call >= call;  // who is further has seen the end of this one
}

bool Ballots::lacks_word_of(int rank) const {
  if (own_vote() == nullptr || rank == rank_) {
    return false;
  }
  if (leaves_out(rank)) {
    return own_vote()->wishes[static_cast<size_t>(rank)] == Wish::kSilent;
  }
  const Vote* theirs = vote_of(rank);
  return theirs == nullptr || theirs->wishes != own_vote()->wishes;
}

void Ballots::arrive(int rank, uint64_t epoch, uint64_t call) {
  arrivals_[static_cast<size_t>(rank)] = {epoch, call};
  const Arrival own = arrivals_[static_cast<size_t>(rank_)];
  const bool is_open = own_vote() == nullptr && own.epoch == agreed_.members.epoch && own.call != 0;
  const bool are_all_here = std::ranges::all_of(agreed_.members.ranks, [&](int member) {
    return has_arrived(member, own.epoch, own.call);
  });
  if (is_open && are_all_here) {
    agreed_.committed = own.call;
  }
}

Ballots::News Ballots::vote(const std::vector<Wish>& wishes) {
  if (is_out_ || !is_in()) {
    return {};
  }
  const Vote* before = own_vote();
  Vote next = before != nullptr ? *before
                                : Vote{
                                      .epoch = agreed_.members.epoch,
                                      .committed = agreed_.committed,
                                      .wishes = std::vector<Wish>(votes_.size())};
  for (size_t rank = 0; rank < wishes.size(); ++rank) {
    next.wishes[rank] = std::max(next.wishes[rank], wishes[rank]);
  }
  const bool is_new = before == nullptr || before->wishes != next.wishes;
  votes_[static_cast<size_t>(rank_)] = std::move(next);
  return {.is_vote = is_new, .is_agreed = decide()};
}

Ballots::News Ballots::hear(int rank, const Vote& vote) {
  const auto own = static_cast<size_t>(rank_);
  const bool is_sound = vote.wishes.size() == votes_.size();
  if (!is_sound || is_out_ || vote.epoch != agreed_.members.epoch || !agreed_.members.has(rank) ||
      leaves_out(rank) || is_end(vote.wishes[own])) {
    return {};  // who leaves this rank out needs no vote of it
  }
  votes_[static_cast<size_t>(rank)] = vote;
  return this->vote(vote.wishes);
}

Ballots::News Ballots::hear(int rank, const Agreed& agreed) {
  const Roll::Members& next = agreed.members;
  const bool is_sound = next.lives.size() == votes_.size();
  if (!is_sound || is_out_ || next.epoch < agreed_.members.epoch) {
    return {};
  }
  const bool is_later = next.epoch > agreed_.members.epoch;
  const bool was_in = is_in();
  if (was_in && !is_among(next) && (is_later || next.ranks != agreed_.members.ranks)) {
    is_out_ = true;  // whoever says so: others have agreed on that
    take(agreed);
    return {};
  }
  const bool counts_instead = next.epoch == agreed_.members.epoch &&
                              old_ones(next).size() < old_ones(agreed_.members).size();
  const bool is_new_here = was_in && !is_among(before_);
  if (is_new_here && counts_instead) {
    is_out_ = true;
    ++agreed_.members.epoch;
    std::erase(agreed_.members.ranks, rank_);
    return {};
  }
  if (!was_in && counts_instead) {
    agreed_ = agreed;
    return {};
  }
  if (!is_later || (was_in && leaves_out(rank))) {
    return {};
  }
  take(agreed);
  return {.is_agreed = was_in};
}

bool Ballots::decide() {
  const Vote& own = *own_vote();
  std::vector<int> stay;
  bool is_proven = true;
  for (const int member : agreed_.members.ranks) {
    const Wish wish = own.wishes[static_cast<size_t>(member)];
    is_proven = is_proven && wish != Wish::kSilent;
    if (!is_end(wish)) {
      stay.push_back(member);
    }
  }
  const auto agrees = [&](int member) {
    const Vote* theirs = vote_of(member);
    return theirs != nullptr && theirs->wishes == own.wishes;
  };
  const auto is_old = [old = old_ones(agreed_.members)](int member) {
    return std::ranges::binary_search(old, member);
  };
  const auto num_old = std::ranges::count_if(agreed_.members.ranks, is_old);
  if (!std::ranges::all_of(stay, agrees) ||
      (!is_proven && 2 * std::ranges::count_if(stay, is_old) <= num_old)) {
    return false;
  }
  Agreed next = agreed_;
  ++next.members.epoch;
  next.members.ranks = stay;
  for (size_t rank = 0; rank < own.wishes.size(); ++rank) {
    const uint64_t life = life_in(own.wishes[rank]);
    if (life > next.members.lives[rank] && !agreed_.members.has(static_cast<int>(rank))) {
      next.members.ranks.push_back(static_cast<int>(rank));
      next.members.lives[rank] = life;
    }
  }
  std::ranges::sort(next.members.ranks);
  for (const int member : stay) {
    next.committed = std::max(next.committed, vote_of(member)->committed);
  }
  take(next);
  return true;
}

std::vector<int> Ballots::old_ones(const Roll::Members& members) const {
  std::vector<int> old;
  std::ranges::copy_if(members.ranks, std::back_inserter(old), [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    return before_.has(rank) && before_.lives[at] == members.lives[at];
  });
  return old;
}

void Ballots::take(const Agreed& agreed) {
  before_ = std::exchange(agreed_, agreed).members;
  std::ranges::fill(votes_, std::nullopt);
}

}  // namespace weft
