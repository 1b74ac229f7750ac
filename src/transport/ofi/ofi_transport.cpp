// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/ofi_transport.hpp"

#include <algorithm>
#include <thread>

#include "transport/checks.hpp"

namespace weft::ofi {
namespace {

constexpr int kLooksPerClock = 16;
// Peers are told of a release as a courtesy; one that is stopped shall not hold this rank up for
// longer.
constexpr auto kReleasePatience = std::chrono::seconds(1);

}  // namespace

Message OfiTransport::message(MessageKind kind, uint64_t a, uint64_t b) const {
  return {.kind = kind, .from = static_cast<uint32_t>(rank_), .session = session_, .a = a, .b = b};
}

// --- what the queues find out ---

void OfiTransport::on_put(uint64_t data) {
  const uint32_t signal = immediate_->signal(data);
  if (signal < num_signals_) {
    own_.raise(signal, immediate_->amount(data));
    note_news();
  }
}

void OfiTransport::on_message(const Message& message) {
  const auto from = static_cast<int>(message.from);
  if (message.session != session_ || from < 0 || from >= num_ranks_) {
    return;  // from no rank of ours
  }
  switch (message.kind) {
    case MessageKind::kRaise:
      if (message.a < num_signals_) {
        own_.raise(static_cast<uint32_t>(message.a), message.b);
        note_news();
      }
      return;
    case MessageKind::kReleased:
      remote_[message.from]->release(
          static_cast<uint32_t>(message.a), static_cast<uint32_t>(message.b)
      );
      return;
    case MessageKind::kLeft:
      peers_->on_left(from);
      note_news();
      return;
    case MessageKind::kPing:
      return;
  }
}

void OfiTransport::on_failure(int rank, const char* call, int error) {
  peers_->on_failure(rank < 0 ? rank_ : rank, call, error, fabric_->name());
  note_news();
}

void OfiTransport::note_news() {
  has_news_.store(true, std::memory_order_release);  // pairs with on_batch_end() of any queue
}

void OfiTransport::on_batch_end() {
  if (has_news_.exchange(false, std::memory_order_acquire)) {
    own_.ring();  // after what it announces
  }
}

// --- memory ---

Region OfiTransport::allocate(uint64_t bytes) {
  Region region = near_->allocate(bytes);
  try {
    local_->add(region);
  } catch (...) {
    near_->release(region.ref);
    throw;
  }
  return region;
}

Region OfiTransport::lend(std::byte* data, uint64_t bytes, const Device& device) {
  const std::string obstacle = lend_obstacle(device);
  WEFT_CHECK(context_, obstacle.empty(), ErrorCode::kNotAvailable, "lend: {}", obstacle);
  Region region = near_->add_lent(data, bytes);
  try {
    local_->add(region, device);
  } catch (...) {
    near_->release(region.ref);
    throw;
  }
  return region;
}

std::string OfiTransport::lend_obstacle(const Device& device) const {
  return device.kind == Device::Kind::kCpu ? std::string() : fabric_->gpu_memory_obstacle();
}

void OfiTransport::release(const RegionRef& region) {
  local_->remove(region);
  near_->release(region);  // throws for what is not allocated
  const Message released = message(MessageKind::kReleased, region.slot, region.generation);
  Queue& queue = *queues_.front();
  const Clock::time_point deadline = Clock::now() + kReleasePatience;
  const auto pending = std::make_shared<std::atomic<uint32_t>>(0);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (is_far(rank) && !peers_->is_gone(rank)) {
      static_cast<void>(send(queue, rank, released, deadline, pending));
    }
  }
  while (pending->load(std::memory_order_acquire) > 0 && Clock::now() < deadline) {
    if (queue.poll() == 0) {
      std::this_thread::yield();
    }
  }
}

// Messages that have been delivered here are heeded before what follows.
void OfiTransport::poll_until_quiet() const {
  for (const auto& queue : queues_) {
    poll_until_quiet(*queue);
  }
}

void OfiTransport::poll_until_quiet(Queue& queue) {
  constexpr int kMostRounds = 1000;
  for (int round = 0; round < kMostRounds && queue.poll() > 0; ++round) {
  }
}

void OfiTransport::import(int rank, const RegionRef& region) {
  check_rank(context_, "import", rank);
  if (!is_far(rank)) {
    near_->import(rank, region);
    return;
  }
  poll_until_quiet(*queues_.front());  // which brings word of releases
  WEFT_CHECK(
      context_,
      remote_[static_cast<size_t>(rank)]->insert(region),
      ErrorCode::kTransport,
      "import: region {} generation {} of rank {} is not allocated there",
      region.slot,
      region.generation,
      rank
  );
}

std::byte* OfiTransport::mapped(int rank, uint32_t region) const {
  check_rank(context_, "mapped", rank);
  return is_far(rank) || hides_memory_ ? nullptr : near_->mapped(rank, region);
}

// --- waiting ---

uint64_t OfiTransport::signal_value(uint32_t signal) const {
  return near_->signal_value(signal);
}

void OfiTransport::throw_failure() const {
  if (const auto failure = peers_->any_failure()) {
    raise_error(ErrorCode::kTransport, context_, *failure);
  }
}

void OfiTransport::progress() {
  throw_failure();
  near_->progress();
  for (const auto& queue : queues_) {
    queue->try_poll();
  }
}

uint32_t OfiTransport::doorbell() const {
  return own_.doorbell();
}

void OfiTransport::park(uint32_t seen, std::chrono::nanoseconds at_most) {
  throw_failure();
  const auto begin = Clock::now();
  const auto spin_end = begin + std::min(spin_, at_most);
  do {
    for (int look = 0; look < kLooksPerClock; ++look) {
      if (own_.doorbell() != seen) {
        return;
      }
      queues_[static_cast<size_t>(look) % queues_.size()]->try_poll();
      std::this_thread::yield();
    }
  } while (Clock::now() < spin_end);
  const auto left = at_most - (Clock::now() - begin);
  if (left.count() <= 0) {
    return;
  }
  for (const auto& thread : threads_) {
    thread->add_sleeper();
  }
  own_.sleep(seen, left);
  for (const auto& thread : threads_) {
    thread->remove_sleeper();
  }
}

}  // namespace weft::ofi
