// SPDX-License-Identifier: Apache-2.0
// Ranks that agree by messages, in a world without time: what is sent arrives in order on each
// connection and at any moment, ranks die between any two steps and lose what they have sent last,
// ranks that live are taken for silent, and new processes come in the places of lost ranks, two for
// one place at times. What a rank does is what Survival and MessageRoll do; its ballots are theirs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "plan/random_routing.hpp"
#include "survive/ballots.hpp"
#include "survive/links.hpp"

namespace weft::test {

inline Agreed first_of(int num_ranks) {
  Agreed first;
  first.members.ranks.resize(static_cast<size_t>(num_ranks));
  std::iota(first.members.ranks.begin(), first.members.ranks.end(), 0);
  first.members.lives.resize(static_cast<size_t>(num_ranks));
  return first;
}

inline bool are_same(const Roll::Members& a, const Roll::Members& b) {
  return a.epoch == b.epoch && a.ranks == b.ranks && a.lives == b.lives;
}

struct Arrived {
  uint64_t epoch = 0;
  uint64_t call = 0;
};
struct Asks {};   // to be let in
struct Ended {};  // the connection is closed
using Words = std::variant<Ended, Arrived, Vote, Agreed, Asks>;

// Words about a set of members, which count for processes that have the same set.
struct Message {
  Roll::Members among;
  Words words;
};

// The process of a place: the one that began there, or one that came later.
class Process {
 public:
  Process(int at, uint64_t of, const Agreed& first)
      : rank(at),
        life(of),
        ballots(rank, life, first),
        members(first.members),
        lives(first.members.lives),
        next(lives.size()) {
    lives[static_cast<size_t>(rank)] = life;
  }

  enum class Step : uint8_t { kJoin, kReadmit, kArrive, kWait };
  [[nodiscard]] bool is_in() const { return !is_dead && ballots.is_in(); }

  int rank;
  uint64_t life;
  Ballots ballots;
  bool is_dead = false;
  Step step = Step::kArrive;
  uint64_t call = 1;      // that it makes
  Roll::Members members;  // as it has taken them on
  Roll::Members before;   // when the call began
  // Members of each call when it was over, by call.
  std::map<uint64_t, Roll::Members> results;
  uint64_t side = 0;  // of a cut

  // --- what it knows of others, by rank ---
  std::vector<uint64_t> lives;              // that it listens to
  std::set<std::pair<int, uint64_t>> dead;  // these lives of ranks
  struct Next {
    uint64_t life = 0;  // of one that has come, 0: none
    bool is_asking = false;
    std::vector<Message> said;  // before it was let in
  };
  std::vector<Next> next;
};

class World {
 public:
  // Events that happen by chance, and how often at most. Every other call takes a lost rank back.
  struct Fates {
    int deaths = 0;
    int suspicions = 0;
    int returns = 0;
  };

  World(int num_ranks, uint64_t num_calls, uint64_t seed, Fates fates)
      : num_ranks_(num_ranks), num_calls_(num_calls), fates_(fates), random_(seed) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      processes_.push_back(std::make_unique<Process>(rank, 0, first_of(num_ranks)));
    }
  }

  void step() {
    const uint64_t what = random_.below(100);
    Process& one = pick();
    if (what < 3) {
      die_by_chance(one);
    } else if (what < 6) {
      suspect(one, static_cast<int>(random_.below(static_cast<uint64_t>(num_ranks_))));
    } else if (what < 10) {
      come(one);
    } else if (what < 40) {
      act(one, /*is_patient=*/random_.below(8) != 0);
    } else {
      deliver(one, pick());
    }
  }

  // Processes of two sides hear nothing of each other any more.
  void cut() {
    is_cut_ = true;
    for (const auto& one : processes_) {
      one->side = random_.below(2);
    }
  }

  // All that has been sent comes, and all go on as far as they can.
  void settle() {
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (size_t i = 0; i < processes_.size(); ++i) {
        for (const auto& from : processes_) {
          while (deliver(*processes_[i], *from)) {
            has_moved = true;
          }
        }
      }
      for (const auto& one : processes_) {
        has_moved = act(*one, has_moved) || has_moved;
      }
    }
  }

  [[nodiscard]] const std::vector<std::unique_ptr<Process>>& processes() const {
    return processes_;
  }
  [[nodiscard]] bool has_finished(const Process& one) const { return one.call > num_calls_; }

 private:
  using Step = Process::Step;

  [[nodiscard]] static size_t at(int rank) { return static_cast<size_t>(rank); }
  [[nodiscard]] Process& pick() { return *processes_[random_.below(processes_.size())]; }
  [[nodiscard]] std::deque<Message>& link(const Process& from, const Process& to) {
    return links_[{&from, &to}];
  }
  [[nodiscard]] bool are_linked(const Process& a, const Process& b) const {
    return a.rank != b.rank && (a.life == 0 || b.life == 0 || linked_.contains({&a, &b})) &&
           (linked_.contains({&a, &b}) || (a.life == 0 && b.life == 0));
  }
  [[nodiscard]] Process* find(int rank, uint64_t life) const {
    const auto found = std::ranges::find_if(processes_, [&](const auto& one) {
      return one->rank == rank && one->life == life;
    });
    return found == processes_.end() ? nullptr : found->get();
  }

  // --- messages ---
  void connect(Process& a, Process& b) {
    linked_.insert({&a, &b});
    linked_.insert({&b, &a});
  }
  void send(const Process& from, const Words& words) {
    for (const auto& to : processes_) {
      if (!to->is_dead && are_linked(from, *to)) {
        link(from, *to).push_back({from.ballots.agreed().members, words});
      }
    }
  }
  void tell(Process& one, const Ballots::News& news) {
    if (news.is_vote && one.ballots.own_vote() != nullptr) {
      send(one, *one.ballots.own_vote());
    }
    take_lives(one);
    if (news.is_agreed) {
      send(one, one.ballots.agreed());
    }
    const uint64_t last = one.ballots.agreed().members.lives[at(one.rank)];
    const bool is_turned_away = !one.ballots.is_in() && turn_of(last) >= turn_of(one.life);
    if ((one.ballots.is_out() || is_turned_away) && one.life > 0) {
      end(one);  // it may join again, as another process
    }
  }

  // Meets the processes that are in a new life.
  void take_lives(Process& one) {
    std::vector<std::pair<Process*, std::vector<Message>>> said;
    for (int rank = 0; rank < num_ranks_ && !one.ballots.is_out(); ++rank) {
      const uint64_t life = one.ballots.agreed().members.lives[at(rank)];
      if (rank == one.rank || one.lives[at(rank)] == life) {
        continue;
      }
      one.lives[at(rank)] = life;
      Process* const other = find(rank, life);
      if (other->is_dead) {
        one.dead.insert({rank, life});
      } else if (!are_linked(one, *other)) {
        connect(one, *other);
      }
      if (!one.ballots.is_in() && one.step == Step::kJoin && !other->is_dead) {
        link(one, *other).push_back({one.ballots.agreed().members, Asks()});
      }
      if (one.next[at(rank)].life == life) {
        said.emplace_back(other, std::move(one.next[at(rank)].said));
        one.next[at(rank)] = {};
      }
    }
    for (const auto& [other, messages] : said) {
      for (const Message& message : messages) {
        hear(one, *other, message);
      }
    }
  }

  bool deliver(Process& to, const Process& from) {
    std::deque<Message>& sent = link(from, to);
    if (sent.empty() || to.is_dead || (is_cut_ && to.side != from.side)) {
      return false;
    }
    const Message message = std::move(sent.front());
    sent.pop_front();
    hear(to, from, message);
    return true;
  }

  void hear(Process& self, const Process& from, const Message& message) {
    const uint64_t life = self.lives[at(from.rank)];
    if (from.life == life) {
      hear_member(self, from, message);
    }
    if (from.life <= life) {
      return;
    }
    Process::Next& next = self.next[at(from.rank)];
    const bool asks = std::holds_alternative<Asks>(message.words);
    if (std::holds_alternative<Ended>(message.words)) {
      self.dead.insert({from.rank, from.life});
    }
    if (next.life != from.life && turn_of(next.life) >= turn_of(from.life) &&
        !self.dead.contains({from.rank, next.life})) {
      return;  // the first is heard until it ends
    }
    if (std::holds_alternative<Ended>(message.words)) {
      next.is_asking = false;
    } else if (next.life != from.life || asks) {
      next = {.life = from.life, .is_asking = asks, .said = {}};
    }
    if (!asks) {
      next.said.push_back(message);
    }
  }

  void hear_member(Process& self, const Process& from, const Message& message) {
    const bool is_of_same = are_same(message.among, self.ballots.agreed().members);
    if (const auto* agreed = std::get_if<Agreed>(&message.words)) {
      tell(self, self.ballots.hear(from.rank, *agreed));
    } else if (std::holds_alternative<Ended>(message.words)) {
      self.dead.insert({from.rank, from.life});
    } else if (const auto* arrived = std::get_if<Arrived>(&message.words);
               arrived != nullptr && is_of_same) {
      self.ballots.arrive(from.rank, arrived->epoch, arrived->call);
    } else if (const auto* vote = std::get_if<Vote>(&message.words);
               vote != nullptr && is_of_same) {
      tell(self, self.ballots.hear(from.rank, *vote));
    }
  }

  // --- fates ---
  void end(Process& one) {
    one.is_dead = true;
    for (const auto& to : processes_) {
      if (are_linked(one, *to)) {
        std::deque<Message>& sent = link(one, *to);
        sent.resize(random_.below(sent.size() + 1));
        sent.push_back({{}, Ended()});
      }
    }
  }
  void die_by_chance(Process& one) {
    const auto is_other = [&](const auto& other) { return other.get() != &one && other->is_in(); };
    if (!one.is_dead && fates_.deaths > 0 && std::ranges::any_of(processes_, is_other)) {
      --fates_.deaths;
      end(one);
    }
  }
  void suspect(Process& one, int other) {
    if (fates_.suspicions > 0 && one.is_in() && one.rank != other) {
      --fates_.suspicions;
      wish(one, other, Wish::kSilent);
    }
  }
  // A new process asks `one` who there is, and to be let in; at most two at a time for a turn.
  void come(const Process& one) {
    const Agreed& known = one.ballots.agreed();
    for (int rank = 0; rank < num_ranks_ && fates_.returns > 0 && one.is_in() && !is_cut_; ++rank) {
      const auto random = static_cast<uint32_t>(random_.below(1U << 31U));
      const uint64_t life = next_life(known.members.lives[at(rank)], random);
      const auto num_there = std::ranges::count_if(processes_, [&](const auto& there) {
        return there->rank == rank && turn_of(there->life) == turn_of(life) && !there->is_dead;
      });
      if (known.members.has(rank) || num_there > 1 || find(rank, life) != nullptr) {
        continue;
      }
      --fates_.returns;
      processes_.push_back(std::make_unique<Process>(rank, life, known));
      Process& fresh = *processes_.back();
      fresh.step = Step::kJoin;
      fresh.side = one.side;
      for (const int member : known.members.ranks) {
        Process* const other = find(member, known.members.lives[at(member)]);
        if (other->is_dead) {
          fresh.dead.insert({member, other->life});
        } else {
          connect(fresh, *other);
        }
      }
      send(fresh, Asks());
      return;
    }
  }

  // --- a rank's own thread ---
  bool wish(Process& self, int other, Wish wish) {
    std::vector<Wish> wishes(at(num_ranks_));
    wishes[at(other)] = wish;
    const Vote* own = self.ballots.own_vote();
    if (own != nullptr && own->wishes[at(other)] >= wish) {
      return false;
    }
    tell(self, self.ballots.vote(wishes));
    return true;
  }

  [[nodiscard]] Wish end_of(const Process& self, int other) const {
    const uint64_t life = self.lives[at(other)];
    if (self.dead.contains({other, life})) {
      return Wish::kGone;
    }
    const Process* const one = find(other, life);
    return is_cut_ && one != nullptr && one->side != self.side ? Wish::kSilent : Wish::kNone;
  }

  // False: all others are there, as far as it knows, or it has voted.
  bool leave_gone_out(Process& self) {
    for (const int other : self.ballots.agreed().members.ranks) {
      const Wish end = other == self.rank ? Wish::kNone : end_of(self, other);
      if (end != Wish::kNone && wish(self, other, end)) {
        return true;
      }
    }
    return false;
  }

  // The number of ranks: none is.
  [[nodiscard]] int lowest_lost(const Roll::Members& members) const {
    int rank = 0;
    while (rank < num_ranks_ && members.has(rank)) {
      ++rank;
    }
    return rank;
  }

  void begin_call(Process& self) {
    self.before = self.members;
    const bool takes_back = self.call % 2 == 0 && lowest_lost(self.members) < num_ranks_;
    self.step = takes_back ? Step::kReadmit : Step::kArrive;
  }

  // It arrives, returns, votes, or takes other members on. False: it waits. Who is not patient lets
  // its time be up.
  bool act(Process& self, bool is_patient) {
    if (self.is_dead || self.ballots.is_out() || has_finished(self)) {
      return false;
    }
    const Agreed now = self.ballots.agreed();
    const bool has_moved = now.members.epoch != self.members.epoch;
    switch (self.step) {
      case Step::kJoin:
        if (!self.is_in()) {
          return false;
        }
        self.members = self.before = now.members;
        self.call = now.committed + 1;
        self.step = Step::kArrive;
        return true;
      case Step::kReadmit:
        return readmit(self, now, is_patient);
      case Step::kArrive:
        self.members = now.members;
        self.step = Step::kWait;
        self.ballots.arrive(self.rank, self.members.epoch, self.call);
        send(self, Arrived{self.members.epoch, self.call});
        return true;
      case Step::kWait:
        if (now.committed == self.call) {
          self.results[self.call++] = self.members;
          begin_call(self);
          return true;
        }
        if (has_moved) {
          self.step = Step::kArrive;  // the call is made again
          return true;
        }
        return leave_gone_out(self);
    }
    return false;
  }

  bool readmit(Process& self, const Agreed& now, bool is_patient) {
    const int lost = lowest_lost(self.before);
    if (now.members.epoch != self.members.epoch) {
      const Roll::Members known = std::exchange(self.members, now.members);
      const bool has_come = self.members.lives[at(lost)] > self.before.lives[at(lost)];
      const bool is_called_off =
          known.ranks == self.members.ranks && known.lives == self.members.lives;
      self.step = has_come || is_called_off ? Step::kArrive : Step::kReadmit;
      return true;
    }
    if (leave_gone_out(self)) {
      return true;
    }
    const Process::Next& next = self.next[at(lost)];
    const bool asks = next.is_asking && !self.dead.contains({lost, next.life}) &&
                      turn_of(next.life) == turn_of(self.lives[at(lost)]) + 1;
    if (asks) {
      return wish(self, lost, taken_in(next.life));
    }
    if (is_patient || self.ballots.own_vote() != nullptr) {
      return false;
    }
    tell(self, self.ballots.vote(std::vector<Wish>(at(num_ranks_))));
    return true;
  }

  int num_ranks_;
  uint64_t num_calls_;
  Fates fates_;
  RandomSource random_;
  bool is_cut_ = false;
  std::vector<std::unique_ptr<Process>> processes_;
  std::set<std::pair<const Process*, const Process*>> linked_;  // those who came later
  std::map<std::pair<const Process*, const Process*>, std::deque<Message>> links_;
};

}  // namespace weft::test
