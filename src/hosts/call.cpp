// SPDX-License-Identifier: Apache-2.0
// How a call between domains of GPUs begins, keeps its streams in order, leaves the network to a
// thread, and ends or fails.
#include "hosts/call.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "core/gpu/driver.hpp"
#include "core/interrupt.hpp"
#include "core/log.hpp"

namespace weft {

void HostsExchange::check_stopped() const {
  WEFT_CHECK(
      context(),
      !is_stopped_.load(std::memory_order_relaxed),
      ErrorCode::kPeerFailed,
      "exchange: ranks were lost while this rank was in its call"
  );
}

// Sets the mark first: a call whose kernels have been cut short shall not return.
void HostsExchange::stop() {
  is_stopped_.store(true);
  node_->stop();
}

void HostsExchange::set_failed() {
  std::atomic_ref(*has_failed_.get()).store(1, std::memory_order_release);
}

std::optional<uint64_t> HostsExchange::num_whole_rounds() const {
  const CudaDeviceGuard guard(settings_.device.index);
  const bool is_busy = thread_->is_running() ||
                       cudaStreamQuery(copies_.get()) == cudaErrorNotReady ||
                       cudaStreamQuery(own_stream_.get()) == cudaErrorNotReady;
  static_cast<void>(cudaGetLastError());
  const auto calls = is_busy ? std::nullopt : node_->ended_calls();
  if (!calls) {
    return std::nullopt;
  }
  return std::min({num_rounds_, calls->first_void - 1 - first_round_, num_whole_.load()});
}

void HostsExchange::begin_call(Op op, cudaStream_t stream) {
  node_->check();
  WEFT_CHECK(
      context(),
      !is_capturing(stream, context()),
      ErrorCode::kUnsupported,
      "{}: a call between domains cannot be captured in a graph",
      op_name(op)
  );
  wait_for(copies_.get());
}

void HostsExchange::wait_for(cudaStream_t stream) {
  try {
    node_->wait_for(stream);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInterrupted) {
      network_->break_off(last_op_, error);
    }
    throw;
  }
}

void HostsExchange::end_call(const CallOptions& call, cudaStream_t stream) {
  WEFT_CUDA(context(), cudaEventRecord(last_use_.get(), stream));
  if (call.stream != nullptr) {
    if (waits_on_host_) {
      settle();
    }
    return;
  }
  const std::exception_ptr failure = refusal_of([&] { settle(); });
  const std::exception_ptr fault = refusal_of([&] {
    wait_for(stream);
    node_->check();
    check_stopped();
  });
  rethrow(failure);  // nothing runs any more
  rethrow(fault);
}

// Makes the job own what it needs, as the call's plan and tensors may be gone.
void HostsExchange::start_transfer(Op op, Transfer transfer) {
  const auto one = std::make_shared<const Transfer>(std::move(transfer));
  const auto look = [this, op, call = network_->call_number()] {
    WEFT_CHECK(
        context(),
        !is_interrupted_,
        ErrorCode::kInterrupted,
        "{}: interrupted while it waited for other domains (call {})",
        op_name(op),
        call
    );
    check_stopped();
    WEFT_CHECK(
        context(),
        !node_->has_fault(),
        ErrorCode::kInternal,
        "exchange: the GPU's part of a call between domains has failed"
    );
  };
  const auto run = [this, op, one, look, call = network_->call_number()] {
    const CpuRank rank = network_->parts();
    const MessageTransfer::Owner owner = {
        rank.transport, rank.waiter, rank.settled, context(), settings_.timeout};
    const auto take = [&](size_t i, int64_t c) {
      message_counts_->set(place_of(one->number, i), one->before[i] + static_cast<uint32_t>(c) + 1);
    };
    MessageTransfer(owner, one->format, {op_name(op), call, one->what})
        .run(one->sends, one->receives, take, look);
  };
  const auto give_up = [this, one, before = num_rounds_] {
    num_whole_ = std::min(num_whole_.load(), before);
    set_failed();  // before the GPU goes on
    for (size_t i = 0; i < one->receives.size(); ++i) {
      const int64_t count = one->format.num_chunks(one->receives[i].count);
      message_counts_->set(place_of(one->number, i), one->before[i] + static_cast<uint32_t>(count));
    }
  };
  thread_->start({run, give_up});
}

void HostsExchange::settle() {
  try {
    thread_->wait([&] { is_interrupted_ = is_interrupted_ || InterruptScope::is_interrupted(); });
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInterrupted) {
      node_->interrupt();
      network_->break_off(last_op_, error);
    }
    const std::exception_ptr fault = refusal_of([&] { node_->check_faults(); });  // says more
    network_->fail(fault ? fault : network_->cause_of(last_op_, error));
  } catch (...) {
    network_->fail(std::current_exception());
  }
}

bool HostsExchange::refuse(Op op, const Refusal& reason, const CallOptions& call) {
  settle();
  return network_->refuse(op, reason, call);
}

HostsCall::HostsCall(Op op, const HostsCallSite& site)
    : owner_(site.owner),
      op_(op),
      network_(*owner_.network_),
      device_(site.device),
      plan_(device_.on_host()),
      traffic_(*plan_.between),
      stream_(site.stream),
      options_(site.options),
      work_(owner_.work_.tensor().data) {
  options_.stream = stream_;
}

void HostsCall::check_room(const CallRoom& call) const {
  const CallRoom& room = owner_.room_;
  WEFT_CHECK(
      network_.context(),
      room.holds(call),
      ErrorCode::kInternal,
      "{}: {} B of staging, {} B and {} messages, {} B on the GPU (there are {}, {}, {} and {})",
      op_name(op_),
      call.staging,
      call.messages,
      call.num_messages,
      call.work,
      room.staging,
      room.messages,
      room.num_messages,
      room.work
  );
}

void HostsCall::let_copies_begin() const {
  let_copies_follow();
  WEFT_CUDA(network_.context(), cudaStreamWaitEvent(owner_.copies_.get(), owner_.last_use_.get()));
}

void HostsCall::let_copies_follow() const {
  const cudaEvent_t event = owner_.caller_event_.get();
  WEFT_CUDA(network_.context(), cudaEventRecord(event, stream_));
  WEFT_CUDA(network_.context(), cudaStreamWaitEvent(owner_.copies_.get(), event));
}

void HostsCall::follow_copies() const {
  const cudaEvent_t event = owner_.copy_event_.get();
  WEFT_CUDA(network_.context(), cudaEventRecord(event, owner_.copies_.get()));
  WEFT_CUDA(network_.context(), cudaStreamWaitEvent(stream_, event));
  if (has_receives_) {
    launch_stop({.has_failed = owner_.has_failed_.get(), .local = node().local_state()}, stream_);
  }
}

MessageSend HostsCall::pack(
    PackLaunch launch, const MessageArea& area, size_t to, const Target& target, uint32_t signal
) const {
  launch.messages = owner_.messages_.data + area.offset;
  launch.done = owner_.done_->get() + area.first;
  launch.number = ++owner_.number_;
  launch.stopped = &node().local_state()->stopped;
  launch_pack(launch, owner_.copies_.get());
  return {
      .to = static_cast<int>(to),
      .count = launch.count,
      .target = target,
      .first_signal = signal,
      .messages = launch.messages,
      .done = launch.done,
      .number = launch.number};
}

PackLaunch HostsCall::weights_launch(const ConstTensor& weights) const {
  PackLaunch launch;
  launch.weights = reinterpret_cast<const float*>(weights.data);
  launch.weight_column = device_.index().weight_column;
  launch.topk = plan_.shape.topk;
  launch.weight_cols = static_cast<int32_t>(weights.cols);
  return launch;
}

ConstTensor HostsCall::weights_by_k(const ConstTensor& weights, uint64_t area) const {
  if (!plan_.shape.from_map || !weights.is_given()) {
    return weights;
  }
  const int64_t num_tokens = plan_.shape.num_tokens;
  PackLaunch launch = weights_launch(weights);
  launch.format = {
      .weight_bytes = plan_.shape.topk * kWeightBytes, .rows = std::max<int64_t>(num_tokens, 1)};
  launch.count = num_tokens;
  launch.messages = work_ + area;
  launch_pack(launch, stream_);
  return view(area, DType::kFloat32, num_tokens, plan_.shape.topk);
}

size_t HostsCall::start(Transfer transfer) {
  transfer.number = before_.size();
  for (size_t i = 0; i < transfer.receives.size(); ++i) {
    const size_t place = owner_.place_of(transfer.number, i);
    const int64_t count = transfer.format.num_chunks(transfer.receives[i].count);
    transfer.before.push_back(owner_.message_counts_->expect(place, count));
  }
  before_.push_back(transfer.before);
  has_receives_ = has_receives_ || !transfer.receives.empty();
  owner_.start_transfer(op_, std::move(transfer));
  return before_.size() - 1;
}

void HostsCall::let_copies_await(size_t transfer, size_t i, int64_t c) const {
  const size_t place = owner_.place_of(transfer, i);
  const uint32_t count = before_[transfer][i] + static_cast<uint32_t>(c) + 1;
  if (!owner_.waits_on_host_) {
    wait_for_word(
        owner_.copies_.get(),
        owner_.message_counts_->word(place),
        count,
        owner_.direct_staging_.is_lent() ? owner_.remote_writes_ : RemoteWrites::kInOrder,
        network_.context()
    );
    return;
  }
  while (!owner_.message_counts_->has_reached(place, count)) {
    std::this_thread::yield();
  }
}

void HostsCall::copy_in(uint64_t area, const std::byte* from, int64_t bytes) const {
  if (bytes > 0) {
    const auto size = static_cast<size_t>(bytes);
    const cudaStream_t copies = owner_.copies_.get();
    const Context& context = network_.context();
    WEFT_CUDA(context, cudaMemcpyAsync(work_ + area, from, size, cudaMemcpyDefault, copies));
  }
}

void HostsCall::refuse_rounds(size_t first, std::string_view reason) const {
  for (size_t round = first; round < device_.rounds().size() && !owner_.is_stopped_; ++round) {
    try {
      node().refuse(op_, reason, {.stream = stream_});
    } catch (const Error& error) {  // the error that led here is what matters
      log(LogLevel::kDebug, "exchange: {}", error.what());
    }
  }
}

}  // namespace weft
