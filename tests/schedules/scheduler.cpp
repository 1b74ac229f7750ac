// SPDX-License-Identifier: Apache-2.0
#include "schedules/scheduler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "weft/error.hpp"

namespace weft::test {
namespace {

using std::chrono::nanoseconds;

// No run needs so long, whatever goes wrong: some wait does not end.
constexpr nanoseconds kMostTime = std::chrono::hours(1);

// A rank's end of a transport whose puts the scheduler holds back.
class ScheduledTransport final : public Transport {
 public:
  ScheduledTransport(std::unique_ptr<Transport> inner, Scheduler& scheduler, int rank)
      : inner_(std::move(inner)), scheduler_(scheduler), rank_(rank) {}

  [[nodiscard]] std::string_view name() const override { return inner_->name(); }
  [[nodiscard]] Region allocate(uint64_t bytes) override { return inner_->allocate(bytes); }
  void release(const RegionRef& region) override { inner_->release(region); }
  void import(int rank, const RegionRef& region) override { inner_->import(rank, region); }

  void put(int rank, std::span<const Put> puts) override {
    for (const Put& put : puts) {
      scheduler_.step(rank_);
      scheduler_.send(rank_, rank, put, 0);
    }
  }
  void raise(int rank, uint32_t signal, uint64_t amount) override {
    scheduler_.step(rank_);
    scheduler_.send(rank_, rank, {.signal = signal}, amount);
  }
  [[nodiscard]] std::byte* mapped(int rank, uint32_t region) const override {
    return inner_->mapped(rank, region);
  }

  [[nodiscard]] uint64_t signal_value(uint32_t signal) const override {
    const uint64_t early = scheduler_.planted() == Planted::kOneEarly ? 1 : 0;
    return inner_->signal_value(signal) + early;
  }
  void progress() override { inner_->progress(); }
  [[nodiscard]] uint32_t doorbell() const override { return inner_->doorbell(); }
  void park(uint32_t seen, nanoseconds at_most) override { scheduler_.park(rank_, seen, at_most); }
  [[nodiscard]] Clock::time_point now() const override { return scheduler_.now(); }

  [[nodiscard]] PeerState peer_state(int rank) const override {
    return scheduler_.is_dead(rank) ? PeerState::kDied : inner_->peer_state(rank);
  }
  void close() override {
    if (!scheduler_.is_dead(rank_)) {
      scheduler_.flush(rank_);
      inner_->close();
    }
  }

 private:
  std::unique_ptr<Transport> inner_;
  Scheduler& scheduler_;
  int rank_;
};

}  // namespace

Scheduler::Scheduler(uint64_t seed, int num_ranks, const Misfortune& misfortune, Planted planted)
    : ranks_(static_cast<size_t>(num_ranks)),
      misfortune_(misfortune),
      planted_(planted),
      random_(seed) {
  // Mostly far below any deadline; some runs have slow networks.
  longest_hold_ = std::chrono::microseconds(choose(4) == 0 ? 100'000 : 100);
}

std::unique_ptr<Transport> Scheduler::wrap(std::unique_ptr<Transport> inner, int rank) {
  ranks_[static_cast<size_t>(rank)].inner = inner.get();
  return std::make_unique<ScheduledTransport>(std::move(inner), *this, rank);
}

// A number below `bound`, which becomes part of the trace.
uint64_t Scheduler::choose(uint64_t bound) {
  const uint64_t number = random_.below(bound);
  trace_ = (trace_ ^ number) * 1099511628211U;
  return number;
}

// --- a rank's thread ---

void Scheduler::enter(int rank) {
  bool is_last = false;
  {
    const std::lock_guard lock(entering_);
    is_last = ++num_entered_ == static_cast<int>(ranks_.size());
  }
  if (is_last) {
    hand_on(-1);
  }
  ranks_[static_cast<size_t>(rank)].turn.acquire();
}

void Scheduler::leave(int rank) {
  ranks_[static_cast<size_t>(rank)].has_ended = true;
  hand_on(rank);
}

void Scheduler::await_end() {
  end_.acquire();
  end_.release();
}

void Scheduler::step(int rank) {
  strike(rank);
  hand_on(rank);
}

void Scheduler::park(int rank, uint32_t seen, nanoseconds at_most) {
  strike(rank);
  Rank& own = ranks_[static_cast<size_t>(rank)];
  own.is_parked = true;
  own.seen = seen;
  own.wake = time_ + at_most;
  hand_on(rank);
  own.is_parked = false;
}

void Scheduler::strike(int rank) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  if (own.is_dead) {
    return;  // its memory is cleared away
  }
  if (time_ > kMostTime) {
    failure_ = fmt::format("rank {} still waits after {} s", rank, time_ / std::chrono::seconds(1));
    own.is_dead = true;
    throw Killed();
  }
  if (rank != misfortune_.victim || own.num_steps++ != misfortune_.at_step) {
    return;
  }
  has_struck_ = true;
  loses_next_ = misfortune_.loses_put;
  own.resume = time_ + misfortune_.stop;
  if (misfortune_.dies) {
    own.is_dead = true;
    throw Killed();
  }
}

// --- what is sent ---

void Scheduler::send(int from, int to, const Put& put, uint64_t raise_amount) {
  if (is_dead(from) || std::exchange(loses_next_, false)) {
    return;
  }
  Sent sent = {.from = from, .to = to, .put = put, .raise_amount = raise_amount};
  const auto* source = static_cast<const std::byte*>(put.source);
  sent.bytes.assign(source, source + put.bytes);
  sent.due = time_ + nanoseconds(choose(static_cast<uint64_t>(longest_hold_.count())));
  sent_.push_back(std::move(sent));
}

void Scheduler::arrive(size_t index) {
  Sent& sent = sent_[index];
  Transport& inner = *ranks_[static_cast<size_t>(sent.from)].inner;
  if (planted_ == Planted::kSignalFirst && sent.raise_amount == 0 && !sent.has_raised) {
    sent.has_raised = true;
    inner.raise(sent.to, sent.put.signal, 1);
    return;
  }
  const Sent arrived = std::exchange(sent, std::move(sent_.back()));
  sent_.pop_back();
  Put put = arrived.put;
  put.source = arrived.bytes.data();
  try {
    if (arrived.raise_amount > 0) {
      inner.raise(arrived.to, put.signal, arrived.raise_amount);
    } else {
      inner.put(arrived.to, {&put, 1});
    }
  } catch (const Error& error) {
    // A rank that has ended after a failure has let go of its memory.
    if (!has_struck_ && failure_.empty()) {
      failure_ = error.what();
    }
  }
}

void Scheduler::flush(int rank) {
  for (;;) {
    const auto found = std::find_if(sent_.begin(), sent_.end(), [rank](const Sent& sent) {
      return sent.from == rank;
    });
    if (found == sent_.end()) {
      return;
    }
    arrive(static_cast<size_t>(found - sent_.begin()));
  }
}

// --- who is next ---

bool Scheduler::is_ready(const Rank& rank) const {
  if (rank.has_ended || rank.resume > time_) {
    return false;
  }
  return !rank.is_parked || rank.wake <= time_ || rank.inner->doorbell() != rank.seen;
}

int Scheduler::next() {
  for (;;) {
    time_ += nanoseconds(1 + choose(2000));
    std::vector<int> ready;
    nanoseconds soonest = nanoseconds::max();
    bool is_any = false;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const Rank& one = ranks_[rank];
      is_any = is_any || !one.has_ended;
      if (is_ready(one)) {
        ready.push_back(static_cast<int>(rank));
      } else if (!one.has_ended) {
        soonest = std::min(soonest, std::max(one.resume, one.is_parked ? one.wake : time_));
      }
    }
    if (!is_any) {
      return -1;
    }
    std::vector<size_t> due;
    for (size_t i = 0; i < sent_.size(); ++i) {
      if (sent_[i].due <= time_) {
        due.push_back(i);
      } else {
        soonest = std::min(soonest, sent_[i].due);
      }
    }
    const uint64_t num_choices = ready.size() + due.size();
    if (num_choices == 0) {
      time_ = soonest;
      continue;
    }
    const uint64_t chosen = choose(num_choices);
    if (chosen < ready.size()) {
      return ready[chosen];
    }
    arrive(due[chosen - ready.size()]);
  }
}

void Scheduler::hand_on(int from) {
  const int to = next();
  if (to == from) {
    return;
  }
  if (to < 0) {
    end_.release();
    return;
  }
  Rank* own = from < 0 ? nullptr : &ranks_[static_cast<size_t>(from)];
  const bool stays = own != nullptr && !own->has_ended;
  ranks_[static_cast<size_t>(to)].turn.release();
  if (stays) {
    own->turn.acquire();
  }
}

}  // namespace weft::test
