// SPDX-License-Identifier: Apache-2.0
// The tensors of one call: those that Python gives, and those that it gets.
#pragma once

#include "memory_py.hpp"
#include "torch_tensor.hpp"

namespace weft::py {

// Options of one call, which reads those that concern it.
struct Options : PlanOptions, CallOptions {
  bool ignores_unknown = false;
  Quantise quantise = Quantise::kNone;
  ScaleRule scale_rule = ScaleRule::kExact;
  ScaleLayout scale_layout = ScaleLayout::kByRow;
  bool blocks = false;  // kExpertStrided: rows are [local experts, stride, any]
  CombineScale scale = CombineScale::kNone;
  RowMarks ready;  // but for the tensor
  Wire wire = Wire::kNone;
};

// Tensors in the order of the C++ structures; None where one is not given.

struct RoutingGiven {
  Given topk_idx;
  Given map;
  Given weights;
  Given map_indices;

  explicit RoutingGiven(const nb::tuple& tensors)
      : topk_idx(read("topk_idx", tensors[0])),
        map(read("routing_map", tensors[1])),
        weights(read("weights", tensors[2])),
        map_indices(read("topk_idx", tensors[3])) {}

  [[nodiscard]] Routing routing(const Options& options) const {
    return {
        topk_idx.tensor, map.tensor, weights.tensor, options.ignores_unknown, map_indices.tensor};
  }
};

struct SentGiven {
  Given x;
  Given weights;
  Given scales;
  Given sources;
  Given counts;
  Given count_sums;
  Given global_scale;
  bool has_experts;
  nb::object x_type;  // of torch, where the bytes that come must be told what they are
  nb::object scales_type;

  SentGiven(const nb::tuple& tensors, bool wants_experts)
      : x(read_needed("x", tensors[0])),
        weights(read("weights", tensors[1])),
        scales(read_bytes("scales", tensors[2])),
        sources(at_place("sources", tensors[3], read("sources", tensors[3]))),
        counts(at_place("counts", tensors[4], read_vector("counts", tensors[4]))),
        count_sums(at_place("count_sums", tensors[5], read_vector("count_sums", tensors[5]))),
        global_scale(read_vector("global_scale", tensors[6])),
        has_experts(wants_experts) {
    if (!x.type) {
      x_type = tensors[0].attr("dtype");
    }
    if (scales.tensor.is_given() && !scales.type) {
      scales_type = tensors[2].attr("dtype");
    }
  }

  [[nodiscard]] DispatchInput input(const Options& options) const {
    return {
        x.tensor,
        weights.tensor,
        scales.tensor,
        options.quantise,
        options.scale_rule,
        global_scale.tensor};
  }
};

// Shape of the rows that a rank gets, as a plan says or will say.
struct RowsShape {
  Layout layout = Layout::kExpertMajor;
  int64_t num_experts = 0;  // of this rank
  int64_t num_rows = 0;
  int64_t weight_cols = 1;
};

// Memory for what a dispatch writes of every row.
class Written {
 public:
  // pool: the id of a torch.cuda.MemPool for the rows, or None.
  Written(
      Calls& calls,
      const SentGiven& sent,
      const Options& options,
      const RowsShape& shape,
      nb::handle pool
  );

  // Returns, once, (rows, weights, scales, experts, sources, counts), None if not wanted or in the
  // caller's memory. num_rows: at most those there are.
  nb::tuple take(int64_t num_rows);

  DispatchOutput output;

 private:
  // The tensors that Python gets, in this order.
  Tensor add(int64_t rows, int64_t cols, ScalarType type);
  void add_scales(const SentGiven& sent, const Options& options, const RowsShape& shape);
  void add_tiles(ScalarType type, const RowsShape& shape, int64_t cols);
  void add_blocks(int64_t num_rows);
  void add_rows(Calls& calls, ScalarType type, nb::handle pool, int64_t rows, int64_t cols);

  struct Size {
    int64_t rows;
    int64_t cols;
  };

  NewTensors made_;
  std::vector<Size> sizes_;   // of what made_ has
  int64_t num_blocks_ = 0;    // 0: outputs are matrices
  bool has_sources_ = false;  // made here
  bool has_counts_ = false;
  nb::object rows_type_;  // of torch, where the bytes that come must be told what they are
  nb::object scales_type_;
};

}  // namespace weft::py
