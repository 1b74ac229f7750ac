// SPDX-License-Identifier: Apache-2.0
// Inputs of every rank to a case and the results it must get, by the reference plan and exchange.
// They are made once for all ranks; ranks only read them.
#pragma once

#include <vector>

#include "exchange/reference/reference_exchange.hpp"
#include "support/exchange_case.hpp"
#include "support/memory.hpp"

namespace weft::test {

struct RankRouting {
  Matrix topk_idx;
  Matrix map;
  Matrix weights;
  bool ignores_unknown = false;
  PlanOptions options;

  [[nodiscard]] Routing routing() const {
    return {topk_idx.view(), map.view(), weights.view(), ignores_unknown};
  }
};

// One rank's side of one dispatch or combine. In a combine `rows` and `row_weights` go in, `x` and
// `weights` come out; in a dispatch the other way round.
struct RankCall {
  Matrix x;
  Matrix weights;
  Matrix scales;
  Matrix global_scale;
  Matrix source_weights;
  Matrix source_idx;
  Matrix rows;
  Matrix row_weights;
  Matrix row_scales;
  // Beside the rows of a dispatch; its sums begin with the canary, a number like any other.
  Matrix sources;
  Matrix experts;
  Matrix counts;
  Matrix count_sums;
  ScaleLayout scale_layout = ScaleLayout::kByRow;

  [[nodiscard]] DispatchInput dispatch_input() const {
    return {x.view(), weights.view(), scales.view()};
  }
  [[nodiscard]] DispatchOutput dispatch_output() {
    return {
        rows.view(),
        row_weights.view(),
        row_scales.view(),
        sources.view(),
        experts.view(),
        counts.view(),
        count_sums.view(),
        scale_layout};
  }
  [[nodiscard]] CombineInput combine_input(CombineScale scale, Wire wire = Wire::kNone) const {
    return {
        rows.view(), row_weights.view(), source_weights.view(), scale, source_idx.view(), {}, wire};
  }
  [[nodiscard]] CombineOutput combine_output() { return {x.view(), weights.view()}; }
};

struct CaseData {
  ExchangeSetup setup;
  Case spec;
  std::vector<RankRouting> routing;          // [num_ranks]
  std::vector<Plan> plans;                   // [num_ranks] the reference plans
  std::vector<std::vector<RankCall>> calls;  // [calls][num_ranks]
};

[[nodiscard]] CaseData make_case_data(const ExchangeSetup& setup, const Case& spec);

}  // namespace weft::test
