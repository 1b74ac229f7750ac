// SPDX-License-Identifier: Apache-2.0
#include "overlap/release_rules.hpp"

namespace weft::overlap {
namespace {

// Whether the rows that experts read lie where the exchange put them.
bool dispatches_in_place(Dispatcher dispatcher) {
  return dispatcher == Dispatcher::kHybridEp || dispatcher == Dispatcher::kNcclEp;
}

bool frees_mlp_input(const LayerKind& kind) {
  if (kind.low_precision) {
    return true;
  }
  // With one local expert, all-to-all has nothing to permute: the input is what experts save.
  const bool is_copied = kind.num_local_experts > 1 || kind.dispatcher != Dispatcher::kAllToAll;
  return is_copied && !dispatches_in_place(kind.dispatcher);
}

bool frees_dispatch_input(const LayerKind& kind) {
  const bool is_kept =
      kind.dispatcher == Dispatcher::kDeepEp || dispatches_in_place(kind.dispatcher);
  return !is_kept && !kind.preprocess_in_graph;
}

}  // namespace

void set_early_release(LayerNodes& nodes, const LayerKind& kind) {
  nodes.pre_dispatch.free_input = false;
  nodes.moe_dispatch.free_input = frees_dispatch_input(kind);
  nodes.mlp.free_input = frees_mlp_input(kind);
  nodes.moe_combine.free_input = true;
  nodes.mtp_post_process.free_input = false;
}

}  // namespace weft::overlap
