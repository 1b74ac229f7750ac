// SPDX-License-Identifier: Apache-2.0
// The pieces of a model as the nodes of a schedule, on the host or on a GPU.
#pragma once

#include <utility>

#include "train/config.hpp"
#include "train/lanes/schedule.hpp"

namespace weft::moe {

// One forward and backward of the micro-batch that `model` has loaded; it must outlive the
// schedule. A model has the pieces of Model, and pause(lane), which ends the phase that a piece
// has begun: what lies between the nodes is nobody's time. Nothing is released; the caller may add
// that.
template <class AnyModel>
[[nodiscard]] overlap::ChunkNodes chunk_nodes(AnyModel& model, const OverlapConfig& config) {
  const auto piece = [&model](auto work) {
    return [&model, work = std::move(work)](const overlap::LaneContext& lane) {
      work();
      model.pause(lane.lane);
    };
  };
  const auto node = [&](auto forward, auto backward) {
    overlap::Node made;
    made.forward = piece(std::move(forward));
    made.backward = piece(std::move(backward));
    return made;
  };

  overlap::ChunkNodes nodes;
  nodes.pre_process =
      node([&model] { model.pre_process(); }, [&model] { model.pre_process_backward(); });
  for (auto& block : model.blocks()) {
    auto& x = model.x();
    overlap::LayerNodes& layer = nodes.layers.emplace_back();
    layer.pre_dispatch = node(
        [&block, &x] { block.pre_dispatch(x); }, [&block, &x] { block.pre_dispatch_backward(x); }
    );
    layer.moe_dispatch =
        node([&block] { block.moe_dispatch(); }, [&block] { block.moe_dispatch_backward(); });
    layer.mlp = node(
        [&block] { block.mlp(); },
        [&block, delays = config.delays_weight_gradients] {
          block.mlp_backward();
          if (!delays) {
            block.mlp_weight_gradient();
          }
        }
    );
    if (config.delays_weight_gradients) {
      layer.mlp.weight_gradient = piece([&block] { block.mlp_weight_gradient(); });
    }
    layer.moe_combine = node(
        [&block, &x] { block.moe_combine(x); }, [&block, &x] { block.moe_combine_backward(x); }
    );
  }
  nodes.post_process =
      node([&model] { model.post_process(); }, [&model] { model.post_process_backward(); });
  return nodes;
}

}  // namespace weft::moe
