// SPDX-License-Identifier: Apache-2.0
// The callbacks of a model's nodes (train/step_model.hpp), as steps in the order of
// weft/overlap.hpp with the steps that each waits for, and two ways to run them: on threads
// (thread_executor.cpp) and on CUDA streams (stream_executor_cuda.cpp). A run leaves a trace
// (trace.hpp).
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "train/lanes/trace.hpp"
#include "weft/overlap.hpp"

struct CUstream_st;  // what a cudaStream_t points to

namespace weft::overlap {

// What a callback is told about the lane that it runs on.
struct LaneContext {
  Lane lane = Lane::kCompute;
  // What the work is to be enqueued on; null where the callback does the work itself.
  void* stream = nullptr;
  const std::atomic<bool>* stopping = nullptr;

  // Another callback has thrown: long work may end early, its result will not be used.
  [[nodiscard]] bool is_stopping() const {
    return stopping != nullptr && stopping->load(std::memory_order_relaxed);
  }
};

// A callback. What it throws stops the schedule on both lanes and reaches the caller of the run.
using Work = std::function<void(const LaneContext&)>;

// A node without callbacks takes no step.
struct Node {
  Work forward = {};
  Work backward = {};
  // Only for pre_dispatch and mlp, when weight gradients are deferred: runs after the backward,
  // which then makes only the gradient of the input.
  Work weight_gradient = {};
  // Drops what the forward and the backward were given and what they keep. Called once: after the
  // last step of the node, or when the run has failed, whether or not there is anything to drop.
  Work release = {};
};

struct LayerNodes {
  Node pre_dispatch = {};
  Node moe_dispatch = {};
  Node mlp = {};
  Node moe_combine = {};
};

// What the caller gives for one micro-batch.
struct ChunkNodes {
  Node pre_process = {};
  std::vector<LayerNodes> layers = {};
  Node post_process = {};
};

struct Step {
  std::string name;
  Lane lane = Lane::kCompute;
  int micro_batch = -1;
  Work work = {};               // empty: the step only waits
  std::vector<int> waits = {};  // earlier steps, by their index in the schedule
  Work release = {};            // called on this lane when the work is done
};

class Schedule {
 public:
  // Returns its index. A step may wait only for earlier ones, so that lanes cannot wait for each
  // other in a circle: throws Error (kInvalidArgument).
  int add_step(Step step);

  [[nodiscard]] const std::vector<Step>& steps() const { return steps_; }

 private:
  std::vector<Step> steps_;
};

struct MicroBatches {
  int num = 1;
  // The callbacks of one micro-batch; called once for each, in order, before anything runs.
  std::function<ChunkNodes(int micro_batch)> nodes = {};
};

// Steps are named "m<micro-batch>.L<layer>.<node>.<fwd, bwd or backward_dw>". `pairs`: the order of
// the micro-batches, all of them in one chunk.
[[nodiscard]] Schedule make_schedule(
    const MicroBatches& batches,
    const std::vector<StagePair>& pairs,
    bool early_attention_release = false
);

// In the order of a pipeline of one rank: F0, each backward with the next forward, the last
// backward. Throws Error (kInvalidArgument) without micro-batches.
[[nodiscard]] Schedule schedule_overlapped(const MicroBatches& batches);

// The releases of one run. Lanes may call it at the same time for different steps.
class Releases {
 public:
  explicit Releases(const Schedule& schedule)
      : steps_(schedule.steps()), is_due_(steps_.size(), 1) {}

  // That of a step whose work is done.
  void call(size_t step, const LaneContext& context);
  // After a failure, once no step runs any more: the rest, the newest first. What a release throws
  // is dropped, as the run already has an error to report.
  void call_rest(const LaneContext& context) noexcept;

 private:
  const std::vector<Step>& steps_;
  std::vector<char> is_due_;  // not bool: lanes write neighbours
};

// Both run every step once: those of a lane in the order of the schedule, none before those it
// waits for. They return what ran when, once all have ended. If a callback throws, no step begins
// any more, every release that is left is called (LaneContext::lane is kCompute then), and the
// first exception is thrown on.

// Each lane is a thread, and callbacks do their work themselves: the compute lane is the caller's
// thread, the exchange lane a new one. A callback that is running when another throws is waited
// for; it may look at LaneContext::is_stopping().
Trace run_on_threads(const Schedule& schedule);

// Each lane is a CUDA stream of one GPU, and callbacks enqueue their work on LaneContext::stream.
// An exchange stream of higher priority gets free multiprocessors first. Calls every callback from
// this thread, in the order of issue; waits between the lanes become events of the streams. A
// release is called when its step has been enqueued: memory must go back in the order of the lane's
// stream. Returns when both streams are through, with the times of the GPU. Throws Error (kCuda).
Trace run_on_streams(const Schedule& schedule, CUstream_st* compute, CUstream_st* exchange);

}  // namespace weft::overlap
