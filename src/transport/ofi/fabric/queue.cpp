// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/queue.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <utility>

#include "transport/ofi/queue_parts.hpp"

namespace weft::ofi {
namespace {

constexpr size_t kReadAtOnce = 32;

}  // namespace

fi_addr_t Queue::target(const Operation& operation) const {
  return targets_[static_cast<size_t>(operation.rank)];
}

// --- operations ---

Queue::Operation* Queue::start(int rank, uint64_t bytes, Pending pending) {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) {
    return nullptr;
  }
  Operation* const operation = idle_.back();
  operation->has_room = bytes > 0;
  if (bytes > 0) {
    const auto block = ring_.take(bytes);
    if (!block) {
      return nullptr;
    }
    operation->block = *block;
  }
  idle_.pop_back();
  operation->rank = rank;
  operation->pending = std::move(pending);
  if (operation->pending != nullptr) {
    operation->pending->fetch_add(1, std::memory_order_relaxed);
  }
  return operation;
}

std::byte* Queue::room(const Operation& operation) const {
  return space_->data.get() + operation.block.offset;
}

void* Queue::room_descriptor() const {
  return space_->descriptor;
}

int64_t Queue::post(Operation& operation, const Write& write) {
  const iovec source = {.iov_base = const_cast<void*>(write.source), .iov_len = write.bytes};
  const fi_rma_iov place = {.addr = write.address, .len = write.bytes, .key = write.key};
  void* descriptor = write.descriptor;
  const std::lock_guard lock(mutex_);
  const fi_msg_rma message = {
      .msg_iov = &source,
      .desc = &descriptor,
      .iov_count = 1,
      .addr = target(operation),
      .rma_iov = &place,
      .rma_iov_count = 1,
      .context = &operation.notes,
      .data = write.immediate};
  operation.call = "fi_writemsg";
  const uint64_t data_flag = write.has_immediate ? FI_REMOTE_CQ_DATA : 0;
  const int64_t result =
      fi_writemsg(endpoint_.get(), &message, FI_COMPLETION | write.completion | data_flag);
  if (result == 0) {
    flying_to_[static_cast<size_t>(operation.rank)].fetch_add(1, std::memory_order_relaxed);
  }
  return result;
}

int64_t Queue::post(Operation& operation, const Message& message) {
  std::memcpy(room(operation), &message, sizeof message);
  const iovec source = {.iov_base = room(operation), .iov_len = sizeof message};
  void* descriptor = room_descriptor();
  const std::lock_guard lock(mutex_);
  const fi_msg envelope = {
      .msg_iov = &source,
      .desc = &descriptor,
      .iov_count = 1,
      .addr = target(operation),
      .context = &operation.notes,
      .data = 0};
  operation.call = "fi_sendmsg";
  const int64_t result =
      fi_sendmsg(endpoint_.get(), &envelope, FI_COMPLETION | FI_DELIVERY_COMPLETE);
  if (result == 0) {
    flying_to_[static_cast<size_t>(operation.rank)].fetch_add(1, std::memory_order_relaxed);
  }
  return result;
}

void Queue::abandon(Operation& operation) {
  const std::lock_guard lock(mutex_);
  give_back(operation);
}

void Queue::give_back(Operation& operation) {
  if (operation.has_room) {
    ring_.give_back(operation.block.ticket);
  }
  if (operation.pending != nullptr) {
    operation.pending->fetch_sub(1, std::memory_order_release);  // pairs with the owner's load
    operation.pending.reset();
  }
  idle_.push_back(&operation);
}

void Queue::finish(Operation& operation) {
  flying_to_[static_cast<size_t>(operation.rank)].fetch_sub(1, std::memory_order_relaxed);
  give_back(operation);
}

uint32_t Queue::num_flying_to(int rank) const {
  return flying_to_[static_cast<size_t>(rank)].load(std::memory_order_relaxed);
}

uint32_t Queue::num_flying() const {
  uint32_t sum = 0;
  for (const auto& count : flying_to_) {
    sum += count.load(std::memory_order_relaxed);
  }
  return sum;
}

// --- completions ---

size_t Queue::poll() {
  num_polls_.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  return read_completions();
}

size_t Queue::try_poll() {
  num_polls_.fetch_add(1, std::memory_order_relaxed);
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock.owns_lock() ? read_completions() : 0;
}

void Queue::break_off(const char* call, int error) {
  const std::lock_guard lock(mutex_);
  is_broken_ = true;
  events_.on_failure(-1, call, error);
  events_.on_batch_end();
}

size_t Queue::read_completions() {
  if (is_broken_) {
    return 0;
  }
  for (Receive* receive : std::exchange(unposted_, {})) {
    post_receive(*receive);
  }
  std::array<fi_cq_data_entry, kReadAtOnce> entries;
  const int64_t count = fi_cq_read(completions_.get(), entries.data(), entries.size());
  if (count == -FI_EAGAIN || count == 0) {
    return 0;
  }
  if (count == -FI_EAVAIL) {
    handle_error();
  } else if (count < 0) {
    is_broken_ = true;
    events_.on_failure(-1, "fi_cq_read", static_cast<int>(-count));
  }
  for (int64_t i = 0; i < count; ++i) {
    handle(entries[static_cast<size_t>(i)]);
  }
  events_.on_batch_end();
  return static_cast<size_t>(std::max<int64_t>(count, 1));
}

void Queue::handle(const fi_cq_data_entry& entry) {
  if (Operation* const operation = operation_at(entry.op_context)) {
    finish(*operation);
    return;
  }
  Receive* const receive = receive_at(entry.op_context);
  if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
    events_.on_put(entry.data);
  } else if (receive != nullptr && entry.len == sizeof(Message)) {
    Message message;
    std::memcpy(&message, receive->data, sizeof message);
    events_.on_message(message);
  }
  if (receive != nullptr) {  // data of a write may use one up too (FI_RX_CQ_DATA)
    post_receive(*receive);
  }
}

void Queue::handle_error() {
  fi_cq_err_entry error = {};
  if (fi_cq_readerr(completions_.get(), &error, 0) < 0) {
    return;
  }
  if (Operation* const operation = operation_at(error.op_context)) {
    const int rank = operation->rank;
    const char* call = operation->call;
    events_.on_failure(rank, call, error.err);  // before its owner can see it ended
    finish(*operation);
  } else if (Receive* const receive = receive_at(error.op_context)) {
    unposted_.push_back(receive);
  }
}

void Queue::post_receive(Receive& receive) {
  const int64_t result = fi_recv(
      endpoint_.get(),
      receive.data,
      kMessageBytes,
      space_->descriptor,
      FI_ADDR_UNSPEC,
      &receive.notes
  );
  if (result != 0) {
    unposted_.push_back(&receive);
  }
}

Queue::Operation* Queue::operation_at(void* context) {
  auto* const at = static_cast<Operation*>(context);
  return at >= operations_.data() && at < operations_.data() + operations_.size() ? at : nullptr;
}

Queue::Receive* Queue::receive_at(void* context) {
  auto* const at = static_cast<Receive*>(context);
  return at >= receives_.data() && at < receives_.data() + receives_.size() ? at : nullptr;
}

bool Queue::may_sleep() {
  const std::lock_guard lock(mutex_);
  fid* object = &completions_->fid;
  return unposted_.empty() && fi_trywait(fabric_->fabric(), &object, 1) == 0;
}

}  // namespace weft::ofi
