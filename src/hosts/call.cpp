// SPDX-License-Identifier: Apache-2.0
// How a call between domains of GPUs begins, keeps its streams in order, leaves the network to a
// thread, and ends or fails.
#include "core/log.hpp"
#include "hosts/exchange.hpp"

namespace weft {

cudaStream_t DomainsCudaExchange::stream_of(const CallOptions& call) const {
  return call.stream == nullptr ? own_stream.get() : static_cast<cudaStream_t>(call.stream);
}

void DomainsCudaExchange::begin_call(std::string_view op, cudaStream_t stream) {
  near->check();
  WEFT_CHECK(
      network->context(),
      !near->is_capturing(stream),
      ErrorCode::kUnsupported,
      "{}: a call between domains cannot be captured in a graph",
      op
  );
  WEFT_CUDA(network->context(), cudaStreamSynchronize(copies.get()));
}

void DomainsCudaExchange::let_copies_follow(cudaStream_t stream) {
  WEFT_CUDA(network->context(), cudaEventRecord(caller_event.get(), stream));
  WEFT_CUDA(network->context(), cudaStreamWaitEvent(copies.get(), caller_event.get()));
}

void DomainsCudaExchange::let_follow_copies(cudaStream_t stream) {
  WEFT_CUDA(network->context(), cudaEventRecord(copy_event.get(), copies.get()));
  WEFT_CUDA(network->context(), cudaStreamWaitEvent(stream, copy_event.get()));
}

void DomainsCudaExchange::end_call(const CallOptions& call, cudaStream_t stream) {
  WEFT_CUDA(network->context(), cudaEventRecord(last_use.get(), stream));
  if (call.stream != nullptr) {
    if (waits_on_host) {
      settle();
    }
    return;
  }
  const std::exception_ptr failure = refusal_of([&] { settle(); });
  const std::exception_ptr fault = refusal_of([&] { near->finish(stream); });
  rethrow(failure);  // nothing runs any more
  rethrow(fault);
}

// The job owns what it needs: the call's plan and tensors may be gone.
void DomainsCudaExchange::start_transfer(std::string_view op, Transfer transfer) {
  const auto one = std::make_shared<const Transfer>(std::move(transfer));
  const auto look = [this] {
    WEFT_CHECK(
        network->context(),
        !near->has_fault(),
        ErrorCode::kInternal,
        "exchange: the GPU's part of a call between domains has failed"
    );
  };
  const auto run = [this, op, one, look, call = network->call_number()] {
    const CpuRank rank = network->parts();
    const CrossingTransfer::Owner owner = {
        rank.transport, rank.waiter, rank.settled, network->context(), settings.timeout};
    const auto take = [&](size_t i, int64_t c) {
      message_counts->set(place_of(one->number, i), one->before[i] + static_cast<uint32_t>(c) + 1);
    };
    CrossingTransfer(owner, one->chunk, {op, call, one->what})
        .run(one->sends, one->receives, take, look);
  };
  const auto give_up = [this, one] {
    for (size_t i = 0; i < one->receives.size(); ++i) {
      const int64_t count = one->chunk.num_chunks(one->receives[i].count);
      message_counts->set(place_of(one->number, i), one->before[i] + static_cast<uint32_t>(count));
    }
  };
  thread->start({run, give_up});
}

void DomainsCudaExchange::settle() {
  try {
    thread->wait();
  } catch (const Error& error) {
    const std::exception_ptr fault = refusal_of([&] { near->check(); });  // says more
    network->fail(fault ? fault : network->cause_of(last_op, error));
  } catch (...) {
    network->fail(std::current_exception());
  }
}

bool DomainsCudaExchange::refuse(Op op, std::string_view reason, const CallOptions& call) {
  settle();
  return network->refuse(op, reason, call);
}

void DomainsCudaExchange::refuse_rounds(
    Op op, size_t first, size_t last, std::string_view reason, cudaStream_t stream
) {
  for (size_t round = first; round < last; ++round) {
    try {
      near->refuse(op, reason, {.stream = stream});
    } catch (const Error& error) {  // the error that led here is what matters
      log(LogLevel::kDebug, "exchange: {}", error.what());
    }
  }
}

}  // namespace weft
