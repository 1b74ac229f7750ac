// SPDX-License-Identifier: Apache-2.0
// Orders as tuples, for weft/overlap/executor.py and weft/overlap/pipeline.py.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "weft/overlap.hpp"

namespace weft::py {
namespace {

namespace nb = nanobind;
using namespace overlap;

using Stage = std::optional<std::pair<int, int>>;

Stage tuple_of(const std::optional<VirtualStage>& stage) {
  return stage ? Stage({stage->micro_batch, stage->chunk}) : std::nullopt;
}

}  // namespace

void bind_overlap(nb::module_& m) {
  m.def(
      "pair_order",
      [](std::optional<int> forward_layers, std::optional<int> backward_layers, bool early) {
        std::vector<std::tuple<bool, std::string_view, std::string_view, int>> steps;
        for (const PairStep& step : pair_order({forward_layers, backward_layers, early})) {
          const auto action = kActionNames[static_cast<size_t>(step.action)];
          steps.emplace_back(step.is_backward, action, node_name(step.node), step.layer);
        }
        return steps;
      },
      nb::arg("forward_layers").none(),
      nb::arg("backward_layers").none(),
      nb::arg("early_attention_release"),
      "The steps of two micro-batches: is_backward, action, node, layer (-1: of no layer)."
  );
  m.def(
      "pipeline_order",
      [](int rank, int num_ranks, int num_chunks, int num_micro_batches) {
        std::vector<std::pair<Stage, Stage>> pairs;
        for (const auto& [forward, backward] :
             pipeline_order({rank, num_ranks, num_chunks, num_micro_batches})) {
          pairs.emplace_back(tuple_of(forward), tuple_of(backward));
        }
        return pairs;
      },
      nb::arg("rank"),
      nb::arg("num_ranks"),
      nb::arg("num_chunks"),
      nb::arg("num_micro_batches"),
      "Pairs of a forward and a backward: micro-batch and chunk of each, or None."
  );
  nb::dict lanes;  // by node, in the order in which a micro-batch passes them
  for (size_t idx = 0; idx < kNodeNames.size(); ++idx) {
    lanes[nb::cast(kNodeNames[idx])] = lane_name(lane_of(static_cast<NodeKind>(idx)));
  }
  m.attr("NODE_LANES") = lanes;
  m.def(
      "overlapped_sms",
      &overlapped_sms,
      nb::arg("num_gpu_sms"),
      nb::arg("is_copied_dispatch"),
      "Multiprocessors of a call that shares its GPU with computation."
  );
  m.def(
      "overlapped_copies",
      &overlapped_copies,
      nb::arg("hidden"),
      nb::arg("num_ranks"),
      "Whether copy engines carry the rows of a call that shares its GPU with computation."
  );
}

}  // namespace weft::py
