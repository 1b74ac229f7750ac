// SPDX-License-Identifier: Apache-2.0
// The callbacks of a model's nodes (train/step_model.hpp), as steps in the order of
// weft/overlap.hpp with the steps that each waits for, and how threads run them
// (thread_executor.cpp). A run leaves a trace (trace.cpp): a file of it that chrome://tracing and
// ui.perfetto.dev show, and how much of the exchange nothing hid.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "weft/overlap.hpp"

namespace weft::overlap {

// Facts that a callback is told about the lane that it runs on.
struct LaneContext {
  Lane lane = Lane::kCompute;
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
};

// Nodes that the caller gives for one micro-batch, by layer; -1 for those of none.
struct ChunkNodes {
  int num_layers = 0;
  std::map<std::pair<int, NodeKind>, Node> nodes = {};

  [[nodiscard]] Node& at(NodeKind kind, int layer = -1) { return nodes[{layer, kind}]; }
};

struct Step {
  std::string name;
  Lane lane = Lane::kCompute;
  int micro_batch = -1;
  Work work = {};               // empty: the step only waits
  std::vector<int> waits = {};  // earlier steps, by their index in the schedule
};

// A step waits only for earlier ones, so that lanes cannot wait for each other in a circle.
using Schedule = std::vector<Step>;

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

// Returns the schedule in the order of a pipeline of one rank: F0, each backward with the next
// forward, the last backward. Throws Error (kInvalidArgument) without micro-batches.
[[nodiscard]] Schedule schedule_overlapped(const MicroBatches& batches);

// Runs one micro-batch after the other on this thread, forward and backward.
void run_in_turn(const MicroBatches& batches);

// Time in which a step ran.
struct Span {
  int step = -1;  // in the schedule
  std::string name;
  Lane lane = Lane::kCompute;
  int micro_batch = -1;
  int64_t begin_ns = 0;  // since the run began
  int64_t end_ns = 0;
};

struct Trace {
  std::vector<Span> spans;  // by begin, then by step
};

// Sorts the spans into the order that Trace promises.
void sort_spans(Trace& trace);

// Chrome's trace format: one process with a row for each lane.
[[nodiscard]] std::string trace_json(const Trace& trace);

// Throws Error (kFile) naming the path.
void write_trace(const std::string& path, const Trace& trace);

struct LaneTimes {
  int64_t wall_ns = 0;                          // from the first begin to the last end
  std::array<int64_t, kNumLanes> busy_ns = {};  // by lane; waiting for the other lane is not in it
  int64_t exposed_ns = 0;                       // the exchange lane was busy, the compute lane not
};

[[nodiscard]] LaneTimes lane_times(const Trace& trace);

// Runs every step once: those of a lane in the order of the schedule, none before those it waits
// for. The compute lane is the caller's thread, the exchange lane a new one. Returns what ran when,
// once all have ended. If a callback throws, no step begins any more, one that is running is waited
// for, and the first exception is thrown on.
Trace run_on_threads(const Schedule& schedule);

}  // namespace weft::overlap
