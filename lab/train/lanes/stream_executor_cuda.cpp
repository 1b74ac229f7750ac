// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <vector>

#include "core/gpu/check.hpp"
#include "train/lanes/schedule.hpp"

namespace weft::overlap {
namespace {

// Takes the time; nobody waits for it on the host.
class TimedEvent {
 public:
  TimedEvent() { WEFT_CUDA(Context{}, cudaEventCreate(&event_)); }
  ~TimedEvent() { static_cast<void>(cudaEventDestroy(event_)); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;

  void record(cudaStream_t stream) const { WEFT_CUDA(Context{}, cudaEventRecord(event_, stream)); }
  void make_wait(cudaStream_t stream) const {
    WEFT_CUDA(Context{}, cudaStreamWaitEvent(stream, event_));
  }
  [[nodiscard]] int64_t ns_after(const TimedEvent& start) const {
    float ms = 0;
    WEFT_CUDA(Context{}, cudaEventElapsedTime(&ms, start.event_, event_));
    return static_cast<int64_t>(static_cast<double>(ms) * 1e6);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// One run of one schedule.
class StreamRun {
 public:
  StreamRun(const Schedule& schedule, cudaStream_t compute, cudaStream_t exchange)
      : schedule_(schedule),
        streams_{compute, exchange},
        releases_(schedule),
        begin_(schedule.steps().size()),
        end_(schedule.steps().size()) {}

  Trace run() {
    try {
      start_.record(stream_of(Lane::kCompute));
      start_.make_wait(stream_of(Lane::kExchange));
      for (size_t idx = 0; idx < schedule_.steps().size(); ++idx) {
        enqueue(idx);
      }
      synchronize();
      return trace();
    } catch (...) {
      stopping_.store(true, std::memory_order_relaxed);
      for (const cudaStream_t stream :
           streams_) {  // what is enqueued may still use what is released
        static_cast<void>(cudaStreamSynchronize(stream));
      }
      releases_.call_rest(context_of(Lane::kCompute));
      throw;
    }
  }

 private:
  [[nodiscard]] cudaStream_t stream_of(Lane lane) const { return streams_[lane_idx(lane)]; }
  [[nodiscard]] LaneContext context_of(Lane lane) const {
    return {lane, stream_of(lane), &stopping_};
  }

  void enqueue(size_t idx) {
    const Step& step = schedule_.steps()[idx];
    const cudaStream_t stream = stream_of(step.lane);
    for (const int wait : step.waits) {
      const auto before = static_cast<size_t>(wait);
      if (schedule_.steps()[before].lane != step.lane) {
        end_[before].make_wait(stream);
      }
    }
    begin_[idx].record(stream);
    if (step.work) {
      step.work(context_of(step.lane));
    }
    end_[idx].record(stream);
    releases_.call(idx, context_of(step.lane));
  }

  void synchronize() const {
    for (const cudaStream_t stream : streams_) {
      WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
    }
  }

  [[nodiscard]] Trace trace() const {
    Trace trace;
    for (size_t idx = 0; idx < schedule_.steps().size(); ++idx) {
      const Step& step = schedule_.steps()[idx];
      trace.spans.push_back(
          {static_cast<int>(idx),
           step.name,
           step.lane,
           step.micro_batch,
           begin_[idx].ns_after(start_),
           end_[idx].ns_after(start_)}
      );
    }
    sort_spans(trace);
    return trace;
  }

  const Schedule& schedule_;
  const std::array<cudaStream_t, kNumLanes> streams_;  // by lane
  Releases releases_;
  std::atomic<bool> stopping_ = false;
  TimedEvent start_;
  std::vector<TimedEvent> begin_;  // by step
  std::vector<TimedEvent> end_;
};

}  // namespace

Trace run_on_streams(const Schedule& schedule, cudaStream_t compute, cudaStream_t exchange) {
  return StreamRun(schedule, compute, exchange).run();
}

}  // namespace weft::overlap
