// SPDX-License-Identifier: Apache-2.0
// From arrays and names to the arguments of plan, dispatch and combine.
#include "calls_py.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include "choice_py.hpp"
#include "tensor_py.hpp"

namespace weft::py {
namespace {

CallOptions call_of(uintptr_t stream, int num_sms, bool copy_engines = false) {
  CallOptions call;
  call.stream =
      reinterpret_cast<void*>(stream);  // NOLINT: a cudaStream_t that torch gave as a number
  call.num_sms = num_sms;
  call.copy_engines = copy_engines;
  return call;
}

struct PlanArguments {
  Routing routing;
  PlanOptions options;
};

PlanArguments plan_arguments(
    const MaybeArray& topk_idx,
    const MaybeArray& routing_map,
    const MaybeArray& weights,
    std::string_view layout,
    int64_t pad_multiple,
    int64_t expert_stride,
    std::optional<int64_t> row_budget,
    std::string_view overflow
) {
  const Names<Layout> layouts = {
      {"rank_major", Layout::kRankMajor},
      {"expert_major", Layout::kExpertMajor},
      {"expert_strided", Layout::kExpertStrided}};
  const Names<Overflow> overflows = {{"drop", Overflow::kDrop}, {"error", Overflow::kError}};
  return {
      {.topk_idx = view_of(topk_idx, "topk_idx"),
       .map = view_of(routing_map, "routing_map"),
       .weights = view_of(weights, "weights")},
      {.layout = choose("layout", layout, layouts),
       .pad_multiple = pad_multiple,
       .expert_stride = expert_stride,
       .row_budget = row_budget,
       .overflow = choose("overflow", overflow, overflows)}};
}

Plan plan(
    Calls& calls,
    const MaybeArray& topk_idx,
    const MaybeArray& routing_map,
    const MaybeArray& weights,
    std::string_view layout,
    int64_t pad_multiple,
    int64_t expert_stride,
    std::optional<int64_t> row_budget,
    std::string_view overflow,
    uintptr_t stream,
    int num_sms
) {
  const CallOptions call = call_of(stream, num_sms);
  const auto build = [&] {
    return plan_arguments(
        topk_idx, routing_map, weights, layout, pad_multiple, expert_stride, row_budget, overflow
    );
  };
  return calls.call(
      build,
      [&](Exchange& exchange, const PlanArguments& a) {
        return exchange.plan(a.routing, a.options, call);
      },
      [&](Exchange& exchange) { static_cast<void>(exchange.plan({}, {}, call)); }
  );
}

struct DispatchArguments {
  DispatchInput in;
  DispatchOutput out;
};

DispatchArguments dispatch_arguments(
    const Array& x,
    const MaybeArray& weights,
    const MaybeArray& scales,
    const Array& rows,
    const MaybeArray& row_weights,
    const MaybeArray& row_scales,
    std::string_view quantise
) {
  const Names<Quantise> kinds = {
      {"none", Quantise::kNone}, {"e4m3", Quantise::kE4M3}, {"e5m2", Quantise::kE5M2}};
  return {
      {.x = view_of(x, "x"),
       .weights = view_of(weights, "weights"),
       .scales = view_of(scales, "scales"),
       .quantise = choose("quantise", quantise, kinds)},
      {.rows = view_of(rows, "rows"),
       .weights = view_of(row_weights, "row_weights"),
       .scales = view_of(row_scales, "row_scales")}};
}

void dispatch(
    Calls& calls,
    const Plan& plan,
    const Array& x,
    const MaybeArray& weights,
    const MaybeArray& scales,
    const Array& rows,
    const MaybeArray& row_weights,
    const MaybeArray& row_scales,
    std::string_view quantise,
    uintptr_t stream,
    int num_sms,
    bool copy_engines
) {
  const CallOptions call = call_of(stream, num_sms, copy_engines);
  calls.call(
      [&] {
        return dispatch_arguments(x, weights, scales, rows, row_weights, row_scales, quantise);
      },
      [&](Exchange& exchange, const DispatchArguments& a) {
        exchange.dispatch(plan, a.in, a.out, call);
      },
      [&](Exchange& exchange) { exchange.dispatch(plan, {}, {}, call); }
  );
}

struct RoutedArguments {
  PlanArguments plan;
  DispatchArguments dispatch;
};

Plan plan_and_dispatch(
    Calls& calls,
    const Array& topk_idx,
    const MaybeArray& plan_weights,
    std::string_view layout,
    int64_t pad_multiple,
    int64_t expert_stride,
    std::optional<int64_t> row_budget,
    const Array& x,
    const MaybeArray& weights,
    const MaybeArray& scales,
    const Array& rows,
    const MaybeArray& row_weights,
    const MaybeArray& row_scales,
    std::string_view quantise,
    uintptr_t stream,
    int num_sms
) {
  const CallOptions call = call_of(stream, num_sms);
  const auto build = [&]() -> RoutedArguments {
    return {
        plan_arguments(
            topk_idx, {}, plan_weights, layout, pad_multiple, expert_stride, row_budget, "drop"
        ),
        dispatch_arguments(x, weights, scales, rows, row_weights, row_scales, quantise)};
  };
  return calls.call(
      build,
      [&](Exchange& exchange, const RoutedArguments& a) {
        return exchange.dispatch(
            a.plan.routing, a.plan.options, a.dispatch.in, a.dispatch.out, call
        );
      },
      [&](Exchange& exchange) { static_cast<void>(exchange.plan({}, {}, call)); }
  );
}

struct CombineArguments {
  CombineInput in;
  CombineOutput out;
};

void combine(
    Calls& calls,
    const Plan& plan,
    const Array& rows,
    const MaybeArray& row_weights,
    const MaybeArray& source_weights,
    const Array& x,
    const MaybeArray& weights,
    std::string_view scale,
    uintptr_t stream,
    int num_sms,
    bool copy_engines
) {
  const CallOptions call = call_of(stream, num_sms, copy_engines);
  const auto build = [&]() -> CombineArguments {
    const Names<CombineScale> scales = {
        {"none", CombineScale::kNone},
        {"plan", CombineScale::kPlanWeights},
        {"source", CombineScale::kSourceWeights}};
    return {
        {.rows = view_of(rows, "rows"),
         .weights = view_of(row_weights, "row_weights"),
         .source_weights = view_of(source_weights, "source_weights"),
         .scale = choose("scale", scale, scales)},
        {.x = view_of(x, "x"), .weights = view_of(weights, "weights")}};
  };
  calls.call(
      build,
      [&](Exchange& exchange, const CombineArguments& a) {
        exchange.combine(plan, a.in, a.out, call);
      },
      [&](Exchange& exchange) { exchange.combine(plan, {}, {}, call); }
  );
}

}  // namespace

void bind_calls(nb::class_<Calls>& exchange) {
  using nb::arg;
  exchange
      .def(
          "plan",
          &plan,
          arg("topk_idx").none(),
          arg("routing_map").none(),
          arg("weights").none(),
          arg("layout"),
          arg("pad_multiple"),
          arg("expert_stride"),
          arg("row_budget").none(),
          arg("overflow"),
          arg("stream"),
          arg("num_sms")
      )
      .def(
          "dispatch",
          &dispatch,
          arg("plan"),
          arg("x"),
          arg("weights").none(),
          arg("scales").none(),
          arg("rows"),
          arg("row_weights").none(),
          arg("row_scales").none(),
          arg("quantise"),
          arg("stream"),
          arg("num_sms"),
          arg("copy_engines")
      )
      .def(
          "plan_and_dispatch",
          &plan_and_dispatch,
          arg("topk_idx"),
          arg("plan_weights").none(),
          arg("layout"),
          arg("pad_multiple"),
          arg("expert_stride"),
          arg("row_budget").none(),
          arg("x"),
          arg("weights").none(),
          arg("scales").none(),
          arg("rows"),
          arg("row_weights").none(),
          arg("row_scales").none(),
          arg("quantise"),
          arg("stream"),
          arg("num_sms")
      )
      .def(
          "combine",
          &combine,
          arg("plan"),
          arg("rows"),
          arg("row_weights").none(),
          arg("source_weights").none(),
          arg("x"),
          arg("weights").none(),
          arg("scale"),
          arg("stream"),
          arg("num_sms"),
          arg("copy_engines")
      );
}

}  // namespace weft::py
