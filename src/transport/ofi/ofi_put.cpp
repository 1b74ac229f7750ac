// SPDX-License-Identifier: Apache-2.0
// Moving: small puts are copied and travel on their own, large ones go from where they are and are
// waited for. What the fabric does not take at once is tried again until it does, the peer is gone
// or time is up.
#include <hwy/cache_control.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <rdma/fi_errno.h>
#include <thread>

#include "core/clock.hpp"
#include "core/copy.hpp"
#include "transport/common.hpp"
#include "transport/ofi/ofi_transport.hpp"

namespace weft::ofi {
namespace {

// Up to so many bytes are copied, so that put() need not wait; a chunk of rows fits in one write,
// since each costs as much as the copying of many KiB.
constexpr uint64_t kCopyBytes = 512 << 10;

constexpr int kPauses = 64;
// Yields outlast a message: two peers that both sleep wait out each other's sleep.
constexpr int kYields = 1024;  // a millisecond or two
// How often a thread that waits for the fabric looks whether its peer is there. By the clock: on a
// busy machine a yield may take milliseconds, and soon a host that ended does not answer at all.
constexpr auto kLookEvery = std::chrono::milliseconds(50);

// Lets other threads run while this one waits for the fabric.
void relax(int round) {
  if (round < kPauses) {
    hwy::Pause();
  } else if (round < kYields) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace

OfiTransport::Way OfiTransport::way_to(int rank) {
  static std::atomic<size_t> num_threads = 0;
  thread_local const size_t mine = num_threads++;  // threads spread over the queues
  return {*queues_[mine % queues_.size()], rank};
}

// --- puts ---

void OfiTransport::put(int rank, std::span<const Put> puts) {
  check_rank(context_, "put", rank);
  if (!is_remote(rank)) {
    neighbours_->put(rank, puts);
    return;
  }
  for (const Put& put : puts) {
    const auto view = remote_[static_cast<size_t>(rank)]->find(put.region);
    const PutRegion region = {
        .is_imported = view.has_value(),
        .is_released = view && view->is_released,
        .bytes = view ? view->bytes : 0};
    check_put(context_, rank, put, region, num_signals_);
  }
  const Way way = way_to(rank);
  Pending pending;
  while (!puts.empty()) {
    const Put& first = puts.front();
    const Source source = source_of(first);
    if (first.bytes <= kCopyBytes && !source.is_lent) {
      const std::span<const Put> batch = next_batch(puts);
      puts = puts.subspan(batch.size());
      if (std::ranges::any_of(batch, [](const Put& put) { return put.bytes > 0; })) {
        post_write(way, batch, write_to(rank, first, batch.size()), nullptr, nullptr);
      } else {
        const Message raising = message(MessageKind::kRaise, first.signal, batch.size());
        require(send(way, raising, until()), rank);
      }
      continue;
    }
    const bool is_reachable = !fabric_->needs_local() || source.descriptor != nullptr;
    if (!is_reachable || first.bytes > fabric_->info()->ep_attr->max_msg_size) {
      send_pieces(way, first, source);
    } else {
      if (pending == nullptr) {
        pending = std::make_shared<std::atomic<uint32_t>>(0);
      }
      post_write(way, puts.first(1), write_to(rank, first, 1), &source, pending);
    }
    puts = puts.subspan(1);
  }
  if (pending != nullptr) {
    require(await(way, pending), rank);
  }
}

// Returns whether this process must not copy the put's source (is_lent), and what a write from
// where it lies needs.
OfiTransport::Source OfiTransport::source_of(const Put& put) const {
  const bool may_be_direct = put.bytes > kCopyBytes && fabric_->needs_local();
  return put.bytes > 0 && (may_be_direct || local_->has_lent())
             ? local_->source_at(put.source, put.bytes)
             : Source();
}

// Returns puts that one write can carry, as copies: neighbours in the target that raise one signal.
std::span<const Put> OfiTransport::next_batch(std::span<const Put> puts) const {
  const Put& first = puts.front();
  uint64_t bytes = first.bytes;
  size_t count = 1;
  for (; count < puts.size() && count < immediate_->max_amount(); ++count) {
    const Put& next = puts[count];
    const bool follows = next.region == first.region && next.signal == first.signal &&
                         next.offset == first.offset + bytes;
    if (!follows || bytes + next.bytes > kCopyBytes || source_of(next).is_lent) {
      break;
    }
    bytes += next.bytes;
  }
  return puts.first(count);
}

// Returns a write that raises the put's signal by `amount`, or, for 0, none. The caller fills in
// its bytes and where they come from.
Write OfiTransport::write_to(int rank, const Put& put, uint64_t amount) const {
  const auto view = remote_[static_cast<size_t>(rank)]->find(put.region);
  Write write;
  write.address = view->base + put.offset;
  write.key = view->key;
  write.has_immediate = amount > 0;
  write.immediate = immediate_->encode(put.signal, amount);
  write.completion = amount > 0 ? fabric_->provider().write_completion : FI_DELIVERY_COMPLETE;
  return write;
}

void OfiTransport::send_pieces(const Way& way, const Put& put, const Source& source) {
  const auto pending = std::make_shared<std::atomic<uint32_t>>(0);
  const uint64_t most = source.is_lent ? fabric_->info()->ep_attr->max_msg_size : kCopyBytes;
  const Source* direct = source.is_lent ? &source : nullptr;
  Put rest = put;
  while (rest.bytes > most) {
    Put piece = rest;
    piece.bytes = most;
    post_write(way, std::span(&piece, 1), write_to(way.rank, piece, 0), direct, pending);
    rest.source = static_cast<const std::byte*>(rest.source) + most;
    rest.offset += most;
    rest.bytes -= most;
  }
  require(await(way, pending), way.rank);
  post_write(way, std::span(&rest, 1), write_to(way.rank, rest, 1), direct, pending);
  if (source.is_lent) {
    require(await(way, pending), way.rank);
  }
}

void OfiTransport::post_write(
    const Way& way,
    std::span<const Put> batch,
    Write write,
    const Source* direct,
    const Pending& pending
) {
  for (const Put& put : batch) {
    write.bytes += put.bytes;
  }
  Queue& queue = way.queue;
  Queue::Operation* operation = nullptr;
  const uint64_t room_bytes = direct != nullptr ? 0 : write.bytes;
  const Outcome start = persist(way, until(), [&] {
    operation = queue.start(way.rank, room_bytes, pending);
    return operation != nullptr ? 0 : Queue::kNoRoom;
  });
  require(start, way.rank);
  if (direct != nullptr) {
    write.source = batch.front().source;
    write.descriptor = direct->descriptor;
  } else {
    std::byte* room = queue.room(*operation);
    write.source = room;
    write.descriptor = queue.room_descriptor();
    for (const Put& put : batch) {
      if (put.bytes > 0) {
        std::memcpy(room, put.source, put.bytes);
        room += put.bytes;
      }
    }
  }
  const Outcome outcome =
      persist(way, until(), [&] { return noted(way.rank, queue.post(*operation, write)); });
  if (outcome != Outcome::kDone) {
    queue.abandon(*operation);
  }
  require(outcome, way.rank);
  queue.try_poll();  // what is under way goes on
}

void OfiTransport::raise(int rank, uint32_t signal, uint64_t amount) {
  check_rank(context_, "raise", rank);
  if (!is_remote(rank)) {
    neighbours_->raise(rank, signal, amount);
    return;
  }
  check_signal(context_, "raise", rank, signal, num_signals_);
  streaming_fence();  // the caller may have stored into a neighbour's memory before
  const Message raising = message(MessageKind::kRaise, signal, amount);
  const Outcome outcome = send(way_to(rank), raising, until());
  if (outcome != Outcome::kGone) {  // no rank is there to see it
    require(outcome, rank);
  }
}

// --- trying again ---

int64_t OfiTransport::noted(int rank, int64_t result) const {
  if (result == 0) {
    peers_->note_answered(rank);
  }
  return result;
}

template <class Attempt>
OfiTransport::Outcome OfiTransport::persist(
    const Way& way, Clock::time_point deadline, const Attempt& attempt
) {
  const int rank = way.rank;
  std::optional<Clock::time_point> next_look;
  for (int round = 0;; ++round) {
    if (peers_->has_left(rank)) {
      return Outcome::kGone;
    }
    bool is_silent = false;
    if (!peers_->has_failed(rank)) {
      const int64_t result = attempt();
      if (result == 0) {
        return Outcome::kDone;
      }
      if (result != -FI_EAGAIN && result != Queue::kNoRoom) {
        on_failure(rank, "post", static_cast<int>(-result));
      }
      is_silent = result == -FI_EAGAIN && way.queue.num_flying() == 0;  // no lack of room
    }
    if (way.queue.poll() > 0) {
      round = 0;
      next_look.reset();
      continue;
    }
    if (round > 0 && peers_->has_died(rank)) {
      return Outcome::kGone;
    }
    if (peers_->failure(rank)) {
      return Outcome::kFailed;
    }
    const auto now = Clock::now();
    if (now >= deadline) {
      return Outcome::kLate;
    }
    next_look = next_look.value_or(now + kLookEvery);
    if (now >= *next_look) {
      next_look = now + kLookEvery;
      hear_neighbours();
      if (is_silent) {
        note_silence(rank);
      }
      knock_at(rank);
    }
    relax(round);
  }
}

OfiTransport::Outcome OfiTransport::send(
    const Way& way, const Message& message, Clock::time_point deadline, const Pending& pending
) {
  return persist(way, deadline, [&] {
    return noted(way.rank, way.queue.send(way.rank, message, pending));
  });
}

OfiTransport::Outcome OfiTransport::await(const Way& way, const Pending& pending) {
  return persist(way, until(), [&]() -> int64_t {
    // Pairs with Queue::finish(); a failure was noted before and is persist()'s to report.
    const bool has_ended = pending->load(std::memory_order_acquire) == 0;
    const bool is_well = !peers_->has_failed(way.rank) && !peers_->has_died(way.rank);
    return has_ended && is_well ? 0 : -FI_EAGAIN;
  });
}

void OfiTransport::require(Outcome outcome, int rank) const {
  std::string problem;
  Context context = context_;
  switch (outcome) {
    case Outcome::kDone:
      return;
    case Outcome::kGone:
      context = context_.without(rank);
      problem = fmt::format("rank {} {}", rank, peers_->has_left(rank) ? "has left" : "died");
      break;
    case Outcome::kFailed:
      problem = fmt::format("to rank {} failed, {}", rank, peers_->failure(rank).value_or(""));
      break;
    case Outcome::kLate:
      problem = fmt::format(
          "rank {} took nothing for {} (provider {}). Is the peer alive?",
          rank,
          seconds_text(timeout_),
          fabric_->name()
      );
  }
  const bool is_late = outcome == Outcome::kLate;
  raise_error(is_late ? ErrorCode::kTimeout : ErrorCode::kTransport, context, "put: " + problem);
}

}  // namespace weft::ofi
