// SPDX-License-Identifier: Apache-2.0
// Which inputs of a mixture-of-experts layer can go right after the forward that reads them.
#pragma once

#include <cstdint>

#include "overlap/nodes.hpp"

namespace weft::overlap {

// Who moves the tokens. The last three hold on to buffers of their own.
enum class Dispatcher : uint8_t { kAllGather, kAllToAll, kDeepEp, kHybridEp, kNcclEp };

struct LayerKind {
  Dispatcher dispatcher = Dispatcher::kAllToAll;
  int num_local_experts = 1;
  bool low_precision = false;        // experts in FP8 or FP4 save a copy of their own
  bool preprocess_in_graph = false;  // the input of moe_dispatch is then static memory of the graph
};

// Sets free_input of every node of a mixture-of-experts layer. Dense layers free nothing early.
void set_early_release(LayerNodes& nodes, const LayerKind& kind);

}  // namespace weft::overlap
