// SPDX-License-Identifier: Apache-2.0
// Moving: small puts are copied and go on alone, large ones go from where they are and are waited
// for.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/copy.hpp"
#include "transport/checks.hpp"
#include "transport/ofi/ofi_transport.hpp"

namespace weft::ofi {
namespace {

// Up to so many bytes are copied, so that put() need not wait; a chunk of rows fits in one write,
// since each costs as much as the copying of many KiB.
constexpr uint64_t kCopyBytes = 512 << 10;

}  // namespace

Queue& OfiTransport::pick_queue() {
  static std::atomic<size_t> num_threads = 0;
  thread_local const size_t mine = num_threads++;  // threads spread over the queues
  return *queues_[mine % queues_.size()];
}

void OfiTransport::put(int rank, std::span<const Put> puts) {
  check_rank(context_, "put", rank);
  if (!is_far(rank)) {
    near_->put(rank, puts);
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
  Queue& queue = pick_queue();
  Pending pending;
  while (!puts.empty()) {
    const Put& first = puts.front();
    const Source source = source_of(first);
    if (first.bytes <= kCopyBytes && !source.is_lent) {
      const std::span<const Put> batch = next_batch(puts);
      puts = puts.subspan(batch.size());
      send_copy(queue, rank, batch);
      continue;
    }
    puts = puts.subspan(1);
    const bool is_reachable = !fabric_->needs_local() || source.descriptor != nullptr;
    if (!is_reachable || first.bytes > fabric_->info()->ep_attr->max_msg_size) {
      send_pieces(queue, rank, first, source);
      continue;
    }
    if (pending == nullptr) {
      pending = std::make_shared<std::atomic<uint32_t>>(0);
    }
    post_direct(queue, rank, first, signalling_write_to(rank, first, 1), source, pending);
  }
  if (pending != nullptr) {
    require(await(queue, rank, pending), rank);
  }
}

// What this process may not copy, and what a write from where it lies needs.
OfiTransport::Source OfiTransport::source_of(const Put& put) const {
  const bool may_be_direct = put.bytes > kCopyBytes && fabric_->needs_local();
  return put.bytes > 0 && (may_be_direct || local_->has_lent())
             ? local_->source_at(put.source, put.bytes)
             : Source();
}

// Puts that one write can carry, as copies: neighbours in the target that raise one signal.
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

// Its bytes and where they come from are still to be filled in.
Write OfiTransport::write_to(int rank, const Put& put) const {
  const auto view = remote_[static_cast<size_t>(rank)]->find(put.region);
  Write write;
  write.address = view->base + put.offset;
  write.key = view->key;
  write.completion = FI_DELIVERY_COMPLETE;
  return write;
}

Write OfiTransport::signalling_write_to(int rank, const Put& put, size_t amount) const {
  Write write = write_to(rank, put);
  write.completion = fabric_->provider().write_completion;
  write.has_immediate = true;
  write.immediate = immediate_->encode(put.signal, amount);
  return write;
}

void OfiTransport::post_copy(
    Queue& queue, int rank, std::span<const Put> batch, Write write, const Pending& pending
) {
  for (const Put& put : batch) {
    write.bytes += put.bytes;
  }
  Queue::Operation* operation = nullptr;
  const Clock::time_point deadline = Clock::now() + timeout_;
  require(start(queue, rank, write.bytes, deadline, operation, pending), rank);
  std::byte* room = queue.room(*operation);
  write.source = room;
  write.descriptor = queue.room_descriptor();
  for (const Put& put : batch) {
    if (put.bytes > 0) {
      std::memcpy(room, put.source, put.bytes);
      room += put.bytes;
    }
  }
  post(queue, rank, *operation, write);
}

void OfiTransport::send_copy(Queue& queue, int rank, std::span<const Put> batch) {
  const Put& first = batch.front();
  if (std::any_of(batch.begin(), batch.end(), [](const Put& put) { return put.bytes > 0; })) {
    post_copy(queue, rank, batch, signalling_write_to(rank, first, batch.size()), nullptr);
    return;
  }
  const Message raising = message(MessageKind::kRaise, first.signal, batch.size());
  require(send(queue, rank, raising, Clock::now() + timeout_), rank);
}

void OfiTransport::post_direct(
    Queue& queue,
    int rank,
    const Put& put,
    Write write,
    const Source& source,
    const Pending& pending
) {
  Queue::Operation* operation = nullptr;
  require(start(queue, rank, 0, Clock::now() + timeout_, operation, pending), rank);
  write.source = put.source;
  write.bytes = put.bytes;
  write.descriptor = source.descriptor;
  post(queue, rank, *operation, write);
}

void OfiTransport::send_pieces(Queue& queue, int rank, const Put& put, const Source& source) {
  const auto pending = std::make_shared<std::atomic<uint32_t>>(0);
  const uint64_t most = source.is_lent ? fabric_->info()->ep_attr->max_msg_size : kCopyBytes;
  const auto send = [&](const Put& piece, const Write& write) {
    if (source.is_lent) {
      post_direct(queue, rank, piece, write, source, pending);
    } else {
      post_copy(queue, rank, std::span(&piece, 1), write, pending);
    }
  };
  Put rest = put;
  while (rest.bytes > most) {
    Put piece = rest;
    piece.bytes = most;
    send(piece, write_to(rank, piece));
    rest.source = static_cast<const std::byte*>(rest.source) + most;
    rest.offset += most;
    rest.bytes -= most;
  }
  require(await(queue, rank, pending), rank);
  send(rest, signalling_write_to(rank, rest, 1));
  if (source.is_lent) {
    require(await(queue, rank, pending), rank);
  }
}

void OfiTransport::raise(int rank, uint32_t signal, uint64_t amount) {
  check_rank(context_, "raise", rank);
  if (!is_far(rank)) {
    near_->raise(rank, signal, amount);
    return;
  }
  check_signal(context_, "raise", rank, signal, num_signals_);
  streaming_fence();  // the caller may have stored into a neighbour's memory before
  const Message raising = message(MessageKind::kRaise, signal, amount);
  const Outcome outcome = send(pick_queue(), rank, raising, Clock::now() + timeout_);
  if (outcome != Outcome::kGone) {  // nobody is there to see it
    require(outcome, rank);
  }
}

}  // namespace weft::ofi
