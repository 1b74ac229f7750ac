// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/fabric/queue.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <utility>

#include "core/check.hpp"
#include "group/shared_memory.hpp"

namespace weft::ofi {
namespace {

constexpr size_t kReadAtOnce = 32;
// Provider "shm" names an endpoint after its process, and a killed process leaves the name behind:
// a later process of that number finds it taken. How many such names may lie there is a guess.
constexpr size_t kMostTakenNames = 16;
constexpr size_t kCompletionRoom = 16384;  // a guess; providers hold more back themselves

// Has memory of GPUs moved by cards or not at all. Providers that do not know the option are taken
// to have no other way. Returns 0 or libfabric's error.
int require_cards(fid_ep& endpoint) {
  const int wanted = FI_HMEM_P2P_REQUIRED;
  const int result =
      fi_setopt(&endpoint.fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &wanted, sizeof wanted);
  return result == -FI_ENOPROTOOPT || result == -FI_ENOSYS ? 0 : result;
}

// Returns the element that stands at this address; null: none does.
template <class Element>
Element* element_at(std::vector<Element>& elements, void* address) {
  auto* const at = static_cast<Element*>(address);
  return at >= elements.data() && at < elements.data() + elements.size() ? at : nullptr;
}

}  // namespace

// Takes the first gap that is large enough: memory used last is the likeliest to be in a cache.
std::optional<uint64_t> BounceRoom::take(uint64_t bytes) {
  const uint64_t rounded = (bytes + 63) / 64 * 64;
  uint64_t begin = 0;
  auto next = taken_.begin();
  for (; next != taken_.end() && next->first - begin < rounded; ++next) {
    begin = next->second;
  }
  if (next == taken_.end() && bytes_ - begin < rounded) {
    return std::nullopt;
  }
  taken_.emplace_hint(next, begin, begin + rounded);
  return begin;
}

// --- what a queue is made of ---

constexpr uint64_t kBounceBytes = uint64_t{4} << 20;  // copies in flight
constexpr size_t kMessageBytes = 64;  // a receive buffer, on a cache line of its own

// libfabric may keep its notes in the first member while the operation flies.
struct Queue::Operation {
  fi_context2 notes = {};
  int rank = 0;
  const char* call = "";
  std::optional<uint64_t> room;  // offset of the copy
  Pending pending;
};

struct Queue::Receive {
  fi_context2 notes = {};
  std::byte* data = nullptr;
};

struct Queue::Space {
  static constexpr uint64_t kBytes = kBounceBytes + kNumReceives * kMessageBytes;

  explicit Space(Fabric& fabric) : data(map_pages(-1, kBytes, ErrorCode::kOutOfMemory)) {
    if (fabric.needs_local()) {
      const uint64_t access = FI_SEND | FI_RECV | FI_WRITE;
      memory = fabric.add_memory({.data = data.get(), .bytes = kBytes}, access, nullptr);
      descriptor = fi_mr_desc(memory.get());
    }
  }

  Pages data;
  Owned<fid_mr> memory;
  void* descriptor = nullptr;
};

// --- set-up: its endpoint and whom it can reach ---

Queue::Queue(std::shared_ptr<Fabric> fabric, QueueEvents& events, int num_ranks)
    : fabric_(std::move(fabric)),
      events_(events),
      targets_(static_cast<size_t>(num_ranks), FI_ADDR_NOTAVAIL),
      flying_to_(static_cast<size_t>(num_ranks)),
      bounce_(kBounceBytes),
      operations_(std::clamp<size_t>(fabric_->info()->tx_attr->size, 1, kMaxFlying)),
      receives_(std::clamp<size_t>(fabric_->info()->rx_attr->size, 1, kNumReceives)) {
  open();
  space_ = std::make_unique<Space>(*fabric_);
  for (Operation& operation : operations_) {
    idle_.push_back(&operation);
  }
  for (size_t i = 0; i < receives_.size(); ++i) {
    receives_[i].data = space_->data.get() + kBounceBytes + i * kMessageBytes;
    post_receive(receives_[i]);
  }
}

Queue::~Queue() = default;

void Queue::open() {
  fi_av_attr av_attr = {};
  av_attr.type = fabric_->info()->domain_attr->av_type;
  av_attr.count = targets_.size();
  fid_av* av = nullptr;
  fabric_->check("fi_av_open", fi_av_open(fabric_->domain(), &av_attr, &av, nullptr));
  addresses_.reset(av);

  fi_cq_attr cq_attr = {};
  cq_attr.size = kCompletionRoom;
  cq_attr.format = FI_CQ_FORMAT_DATA;
  cq_attr.wait_obj = FI_WAIT_FD;
  fid_cq* cq = nullptr;
  if (fi_cq_open(fabric_->domain(), &cq_attr, &cq, nullptr) == 0) {
    completions_.reset(cq);
    fabric_->check("fi_control(FI_GETWAIT)", fi_control(&cq->fid, FI_GETWAIT, &descriptor_));
  } else {
    cq_attr.wait_obj = FI_WAIT_NONE;
    fabric_->check("fi_cq_open", fi_cq_open(fabric_->domain(), &cq_attr, &cq, nullptr));
    completions_.reset(cq);
  }

  const KeptHandlers kept;
  std::vector<Owned<fid_ep>> taken;
  int result = open_endpoint();
  while (result == -FI_EBUSY && taken.size() < kMostTakenNames) {
    taken.push_back(std::move(endpoint_));  // as long as it is there, the next has another name
    result = open_endpoint();
  }
  fabric_->check("fi_enable", result);
}

int Queue::open_endpoint() {
  fid_ep* ep = nullptr;
  fabric_->check("fi_endpoint", fi_endpoint(fabric_->domain(), fabric_->info(), &ep, nullptr));
  endpoint_.reset(ep);
  fabric_->check("fi_ep_bind(av)", fi_ep_bind(ep, &addresses_->fid, 0));
  const uint64_t both = FI_TRANSMIT | FI_RECV;
  fabric_->check("fi_ep_bind(cq)", fi_ep_bind(ep, &completions_->fid, both));
  if (fabric_->gpu_memory_obstacle().empty() && fabric_->provider().reaches_gpus) {
    if (const int refusal = require_cards(*ep); refusal != 0) {
      fabric_->refuse_gpu_memory(fmt::format("fi_setopt(FI_HMEM_P2P): {}", error_text(refusal)));
    }
  }
  return fi_enable(ep);
}

Bytes Queue::address() const {
  Bytes name(256);
  size_t bytes = name.size();
  fabric_->check("fi_getname", fi_getname(&endpoint_->fid, name.data(), &bytes));
  name.resize(bytes);
  return name;
}

void Queue::connect(int rank, const Bytes& address) {
  fi_addr_t& at = targets_[static_cast<size_t>(rank)];
  const int inserted = fi_av_insert(addresses_.get(), address.data(), 1, &at, 0, nullptr);
  fabric_->check(
      fmt::format("fi_av_insert of the address of rank {}", rank),
      inserted == 1 ? 0 : (inserted < 0 ? inserted : -FI_EADDRNOTAVAIL)
  );
}

// --- operations ---

Queue::Operation* Queue::start(int rank, uint64_t bytes, Pending pending) {
  const std::lock_guard lock(mutex_);
  return take(rank, bytes, std::move(pending));
}

Queue::Operation* Queue::take(int rank, uint64_t bytes, Pending pending) {
  if (idle_.empty()) {
    return nullptr;
  }
  Operation* const operation = idle_.back();
  operation->room = bytes > 0 ? bounce_.take(bytes) : std::nullopt;
  if (bytes > 0 && !operation->room) {
    return nullptr;
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
  return space_->data.get() + *operation.room;
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
      .addr = targets_[static_cast<size_t>(operation.rank)],
      .rma_iov = &place,
      .rma_iov_count = 1,
      .context = &operation.notes,
      .data = write.immediate};
  const uint64_t data_flag = write.has_immediate ? FI_REMOTE_CQ_DATA : 0;
  const uint64_t flags = FI_COMPLETION | write.completion | data_flag;
  return note_posted(operation, "fi_writemsg", fi_writemsg(endpoint_.get(), &message, flags));
}

int64_t Queue::send(int rank, const Message& message, Pending pending) {
  const std::lock_guard lock(mutex_);
  Operation* const operation = take(rank, sizeof message, std::move(pending));
  if (operation == nullptr) {
    return kNoRoom;
  }
  std::memcpy(room(*operation), &message, sizeof message);
  const iovec source = {.iov_base = room(*operation), .iov_len = sizeof message};
  void* descriptor = room_descriptor();
  const fi_msg envelope = {
      .msg_iov = &source,
      .desc = &descriptor,
      .iov_count = 1,
      .addr = targets_[static_cast<size_t>(rank)],
      .context = &operation->notes,
      .data = 0};
  const uint64_t flags = FI_COMPLETION | FI_DELIVERY_COMPLETE;
  const int64_t result = fi_sendmsg(endpoint_.get(), &envelope, flags);
  if (note_posted(*operation, "fi_sendmsg", result) != 0) {
    give_back(*operation);
  }
  return result;
}

int64_t Queue::note_posted(Operation& operation, const char* call, int64_t result) {
  operation.call = call;
  flying_to_[static_cast<size_t>(operation.rank)] += result == 0 ? 1 : 0;
  return result;
}

void Queue::abandon(Operation& operation) {
  const std::lock_guard lock(mutex_);
  give_back(operation);
}

void Queue::give_back(Operation& operation) {
  if (operation.room) {
    bounce_.give_back(*operation.room);
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
  if (Operation* const operation = element_at(operations_, entry.op_context)) {
    finish(*operation);
    return;
  }
  Receive* const receive = element_at(receives_, entry.op_context);
  // A plain message can carry data too, from any process that connects; a write needs the key of a
  // region.
  const uint64_t write_with_data = FI_REMOTE_CQ_DATA | FI_REMOTE_WRITE;
  if ((entry.flags & write_with_data) == write_with_data) {
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
  if (Operation* const operation = element_at(operations_, error.op_context)) {
    const int rank = operation->rank;
    const char* call = operation->call;
    events_.on_failure(rank, call, error.err);  // before its owner can see it ended
    finish(*operation);
  } else if (Receive* const receive = element_at(receives_, error.op_context)) {
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

bool Queue::may_sleep() {
  const std::lock_guard lock(mutex_);
  fid* object = &completions_->fid;
  return unposted_.empty() && fi_trywait(fabric_->fabric(), &object, 1) == 0;
}

}  // namespace weft::ofi
