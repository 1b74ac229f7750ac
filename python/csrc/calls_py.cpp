// SPDX-License-Identifier: Apache-2.0
// From tuples of arrays and names to the arguments of plan, dispatch and combine.
#include "calls_py.hpp"

#include <exception>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <tuple>

#include "choice_py.hpp"
#include "tensor_py.hpp"

namespace weft::py {
namespace {

// topk_idx, routing_map, weights.
using RoutingArrays = std::tuple<MaybeArray, MaybeArray, MaybeArray>;
// layout, pad_multiple, expert_stride, row_budget, overflow.
using PlanChoices =
    std::tuple<std::string_view, int64_t, int64_t, std::optional<int64_t>, std::string_view>;
// x, weights, scales; and of the rows that come.
using DispatchArrays = std::tuple<Array, MaybeArray, MaybeArray>;
using DispatchedArrays = std::tuple<MaybeArray, MaybeArray, MaybeArray>;
// rows, row_weights, source_weights; and x, weights.
using CombineArrays = std::tuple<Array, MaybeArray, MaybeArray>;
using CombinedArrays = std::tuple<Array, MaybeArray>;
// stream, num_sms, copy_engines.
using How = std::tuple<uintptr_t, int, bool>;

CallOptions call_of(const How& how) {
  const auto [stream, num_sms, copy_engines] = how;
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

PlanArguments plan_arguments(const RoutingArrays& routing, const PlanChoices& choices) {
  const auto& [topk_idx, routing_map, weights] = routing;
  const auto& [layout, pad_multiple, expert_stride, row_budget, overflow] = choices;
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

Plan plan(Calls& calls, const RoutingArrays& routing, const PlanChoices& choices, const How& how) {
  const CallOptions call = call_of(how);
  return calls.call(
      [&] { return plan_arguments(routing, choices); },
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
    const DispatchArrays& in, const DispatchedArrays& out, std::string_view quantise
) {
  const auto& [x, weights, scales] = in;
  const auto& [rows, row_weights, row_scales] = out;
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
    const DispatchArrays& in,
    const DispatchedArrays& out,
    std::string_view quantise,
    const How& how
) {
  const CallOptions call = call_of(how);
  calls.call(
      [&] { return dispatch_arguments(in, out, quantise); },
      [&](Exchange& exchange, const DispatchArguments& a) {
        exchange.dispatch(plan, a.in, a.out, call);
      },
      [&](Exchange& exchange) { exchange.dispatch(plan, {}, {}, call); }
  );
}

// Whether all ranks make both by the call that does: where no GPU has to tell the number of rows.
bool is_one_call(const Exchange& exchange, const PlanChoices& choices) {
  const auto& [layout, pad_multiple, expert_stride, row_budget, overflow] = choices;
  const bool has_rows = row_budget.has_value() || (layout == "expert_strided" && expert_stride > 0);
  return exchange.config().device.kind == Device::Kind::kCuda && has_rows && overflow == "drop";
}

// Whether memory that was taken before the number of rows was known holds them, and wastes little.
bool suits(const Tensor& rows, int64_t num_rows) {
  return rows.is_given() && num_rows <= rows.rows && rows.rows <= num_rows + num_rows / 8;
}

DispatchOutput first_rows(DispatchOutput out, int64_t num_rows) {
  for (Tensor* tensor : {&out.rows, &out.weights, &out.scales}) {
    if (tensor->is_given()) {
      tensor->rows = num_rows;
    }
  }
  return out;
}

// What a dispatch is given, or why that cannot even be viewed.
struct MaybeDispatch {
  DispatchArguments arguments;
  std::exception_ptr problem;
  bool is_due = false;  // what throws is not the plan alone
};

// The plan, and whether the dispatch is on its way: not if its output is not given or does not
// suit. What cannot be viewed is refused where the others dispatch: they count the plan as a call,
// too.
std::pair<Plan, bool> plan_then_dispatch(
    Exchange& exchange, const PlanArguments& plan, MaybeDispatch& dispatch, const CallOptions& call
) {
  const auto& [in, out] = dispatch.arguments;
  Plan found = exchange.plan(plan.routing, plan.options, call);
  if (!dispatch.problem && !suits(out.rows, found.num_rows())) {
    return {std::move(found), false};
  }
  dispatch.is_due = true;
  exchange.dispatch(found, in, first_rows(out, found.num_rows()), call);
  return {std::move(found), true};
}

// `failed` gets an element if it was the dispatch that raised.
std::pair<Plan, bool> plan_and_dispatch(
    Calls& calls,
    const RoutingArrays& routing,
    const PlanChoices& choices,
    const DispatchArrays& in,
    const DispatchedArrays& out,
    std::string_view quantise,
    const How& how,
    nb::list failed
) {
  const CallOptions call = call_of(how);
  MaybeDispatch dispatch;
  try {
    dispatch.arguments = dispatch_arguments(in, out, quantise);
  } catch (const Error&) {
    dispatch.problem = std::current_exception();
  }
  try {
    return calls.call(
        [&] { return plan_arguments(routing, choices); },
        [&](Exchange& exchange, const PlanArguments& plan) -> std::pair<Plan, bool> {
          if (!is_one_call(exchange, choices)) {
            return plan_then_dispatch(exchange, plan, dispatch, call);
          }
          const DispatchArguments& a = dispatch.arguments;
          dispatch.is_due = true;
          return {exchange.dispatch(plan.routing, plan.options, a.in, a.out, call), true};
        },
        [&](Exchange& exchange) {
          is_one_call(exchange, choices)
              ? static_cast<void>(exchange.dispatch({}, {}, {}, {}, call))
              : static_cast<void>(exchange.plan({}, {}, call));
        }
    );
  } catch (const Error&) {
    if (dispatch.is_due) {
      failed.append(true);
    }
    if (dispatch.is_due && dispatch.problem) {
      std::rethrow_exception(dispatch.problem);
    }
    throw;
  }
}

struct CombineArguments {
  CombineInput in;
  CombineOutput out;
};

CombineArguments combine_arguments(
    const CombineArrays& in, const CombinedArrays& out, std::string_view scale
) {
  const auto& [rows, row_weights, source_weights] = in;
  const auto& [x, weights] = out;
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
}

void combine(
    Calls& calls,
    const Plan& plan,
    const CombineArrays& in,
    const CombinedArrays& out,
    std::string_view scale,
    const How& how
) {
  const CallOptions call = call_of(how);
  calls.call(
      [&] { return combine_arguments(in, out, scale); },
      [&](Exchange& exchange, const CombineArguments& a) {
        exchange.combine(plan, a.in, a.out, call);
      },
      [&](Exchange& exchange) { exchange.combine(plan, {}, {}, call); }
  );
}

}  // namespace

void bind_calls(nb::class_<Calls>& exchange) {
  using nb::arg;
  exchange.def("plan", &plan, arg("routing"), arg("choices"), arg("how"))
      .def(
          "dispatch",
          &dispatch,
          arg("plan"),
          arg("inputs"),
          arg("outputs"),
          arg("quantise"),
          arg("how")
      )
      .def(
          "plan_and_dispatch",
          &plan_and_dispatch,
          arg("routing"),
          arg("choices"),
          arg("inputs"),
          arg("outputs"),
          arg("quantise"),
          arg("how"),
          arg("failed")
      )
      .def(
          "combine", &combine, arg("plan"), arg("inputs"), arg("outputs"), arg("scale"), arg("how")
      );
}

}  // namespace weft::py
