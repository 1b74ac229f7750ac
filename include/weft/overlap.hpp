// SPDX-License-Identifier: Apache-2.0
// How the exchanges of one micro-batch hide under the computation of another: the order in which
// both are issued, and what an exchange takes of a GPU that computes at the same time. Nothing runs
// here. weft.overlap executes these orders over torch modules; any other engine may do the same.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace weft::overlap {

// Work on one lane runs in the order in which it was issued: a lane is a stream or a thread.
enum class Lane : uint8_t { kCompute, kExchange };

inline constexpr size_t kNumLanes = 2;
[[nodiscard]] constexpr size_t lane_idx(Lane lane) {
  return static_cast<size_t>(lane);
}
// "compute", "exchange"
[[nodiscard]] constexpr std::string_view lane_name(Lane lane) {
  return lane == Lane::kCompute ? "compute" : "exchange";
}

// A micro-batch passes these pieces of a model in this order, those of a layer once for each layer.
// A dense layer has neither moe_dispatch nor moe_combine; only a layer that predicts several tokens
// has mtp_post_process.
enum class NodeKind : uint8_t {
  kPreProcess,
  kPreDispatch,
  kMoeDispatch,
  kMlp,
  kMoeCombine,
  kMtpPostProcess,
  kPostProcess,
};
inline constexpr std::array<std::string_view, 7> kNodeNames = {
    "pre_process",
    "pre_dispatch_computation",
    "moe_dispatch",
    "mlp",
    "moe_combine",
    "mtp_post_process",
    "post_process"};
[[nodiscard]] constexpr std::string_view node_name(NodeKind node) {
  return kNodeNames[static_cast<size_t>(node)];
}
// moe_dispatch and moe_combine move tokens; all other nodes compute.
[[nodiscard]] constexpr Lane lane_of(NodeKind node) {
  const bool exchanges = node == NodeKind::kMoeDispatch || node == NodeKind::kMoeCombine;
  return exchanges ? Lane::kExchange : Lane::kCompute;
}

// Work of a step. Steps of one micro-batch wait for each other across lanes, with two exceptions:
// nothing waits for a weight gradient (it follows its backward on the same lane), nor for a send.
enum class Action : uint8_t {
  kForward,         // of a node
  kBackward,        // of a node
  kWeightGradient,  // of a node: the part of its backward that was left for later
  kPreForward,      // a pipeline receives the input here, on the compute lane,
  kPostForward,     // and sends the output, on the exchange lane,
  kPreBackward,     // receives the gradient of the output, on the compute lane,
  kPostBackward,    // and sends that of the input, on the compute lane
  kReleaseLayer,    // nothing needs the activations of this layer any more
  kJoin,            // the compute lane waits for the micro-batch
  kRelease,         // nothing needs the micro-batch any more
};
inline constexpr std::array<std::string_view, 10> kActionNames = {
    "forward",
    "backward",
    "backward_dw",
    "pre_forward",
    "post_forward",
    "pre_backward",
    "post_backward",
    "release_layer",
    "join",
    "release"};

// One step of two micro-batches, of which one runs forward and the other backward. A step of a node
// that the layer does not have is left out by whoever executes the order.
struct PairStep {
  bool is_backward = false;  // which of the two micro-batches it belongs to
  Action action = Action::kForward;
  NodeKind node = NodeKind::kPreProcess;  // for kForward, kBackward and kWeightGradient
  int layer = -1;                         // -1: of no layer
  bool operator==(const PairStep&) const = default;
};

struct PairShape {
  std::optional<int> forward_layers = {};  // none: no micro-batch runs forward
  std::optional<int> backward_layers = {};
  // True if the backward of the attention comes before the forward of the experts, not after: less
  // memory, less overlap.
  bool early_attention_release = false;
};

// Returns the steps of a pair: layer i of the forward with layer last - i of the backward, the
// surplus layers of one side alone. Each of the four exchanges of a pair of layers hides under work
// of the other micro-batch, and every rank issues combine-backward, dispatch-forward,
// dispatch-backward, combine-forward, so ranks cannot wait for each other in a circle.
[[nodiscard]] std::vector<PairStep> pair_order(const PairShape& shape);

// Chunk c of rank r holds stage c * num_ranks + r of the model.
struct PipelineShape {
  int rank = 0;
  int num_ranks = 1;
  int num_chunks = 1;         // of each rank
  int num_micro_batches = 1;  // a multiple of num_ranks
};

// One micro-batch in one chunk of this rank.
struct VirtualStage {
  int micro_batch = 0;
  int chunk = 0;
  bool operator==(const VirtualStage&) const = default;
};

// Forward and backward that are issued together, in the order of pair_order().
struct StagePair {
  std::optional<VirtualStage> forward = {};
  std::optional<VirtualStage> backward = {};
  bool operator==(const StagePair&) const = default;
};

// Returns a training step of a rank: forwards to warm up, pairs of a forward and a backward, the
// backwards that are left. Groups of num_ranks micro-batches pass one chunk after the other. There
// is one warm-up forward more than without overlap, so that the two of a pair need nothing of each
// other. The default shape with its number of micro-batches is a schedule without a pipeline.
// Throws Error (kInvalidArgument) for a bad shape.
[[nodiscard]] std::vector<StagePair> pipeline_order(const PipelineShape& shape);

// Returns how many of a GPU's multiprocessors a call takes that shares the GPU with computation.
// Alone, an exchange is fastest with all; beside matrix products it would wait until it gets them,
// and the products for it. A dispatch by copy engines needs more, for a shorter time, to pack its
// rows.
[[nodiscard]] int overlapped_sms(int num_gpu_sms, bool is_copied_dispatch);

// Returns whether copy engines carry the rows of a call that shares its GPU with computation. The
// environment variable WEFT_COPY_ENGINES says auto, never or always, the same on every rank. Throws
// Error (kInvalidArgument) for another value.
[[nodiscard]] bool overlapped_copies(int hidden, int num_ranks);

}  // namespace weft::overlap
