// SPDX-License-Identifier: Apache-2.0
// From the arrays and names of weft/exchange.py to the arguments of plan, dispatch and combine.
#include <exception>
#include <memory>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "calls_py.hpp"
#include "tensor_py.hpp"
#include "weft/exchange.hpp"

namespace weft::py {
namespace {

// Of one call, as Python says them; a call reads those that concern it. Names are looked up by the
// call, so that every rank refuses one that is unknown.
struct Options {
  std::string layout;
  int64_t pad_multiple = 1;
  int64_t expert_stride = 0;
  std::optional<int64_t> row_budget;
  std::string overflow;
  std::string quantise;
  std::string scale;
  uintptr_t stream = 0;
  int num_sms = 0;
  bool copy_engines = false;

  [[nodiscard]] CallOptions call() const {
    CallOptions call;
    call.stream =
        reinterpret_cast<void*>(stream);  // NOLINT: a cudaStream_t that torch gave as a number
    call.num_sms = num_sms;
    call.copy_engines = copy_engines;
    return call;
  }
};

// topk_idx, routing_map, weights.
using RoutingArrays = std::tuple<MaybeArray, MaybeArray, MaybeArray>;
// x, weights, scales; and of the rows that come.
using DispatchArrays = std::tuple<Array, MaybeArray, MaybeArray>;
using DispatchedArrays = std::tuple<MaybeArray, MaybeArray, MaybeArray>;
// rows, row_weights, source_weights; and x, weights.
using CombineArrays = std::tuple<Array, MaybeArray, MaybeArray>;
using CombinedArrays = std::tuple<Array, MaybeArray>;

template <class Choice>
using Names = std::vector<std::pair<std::string_view, Choice>>;

// `what`: the argument's name. Throws Error (kInvalidArgument) listing the names.
template <class Choice>
Choice choose(const char* what, std::string_view name, const Names<Choice>& names) {
  std::string known;
  for (const auto& [one, choice] : names) {
    if (one == name) {
      return choice;
    }
    known += (known.empty() ? "" : ", ") + std::string(one);
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      std::string(what) + " = '" + std::string(name) + "' is unknown (one of: " + known + ")",
      -1,
      ""
  );
}

struct PlanArguments {
  Routing routing;
  PlanOptions options;
};

PlanArguments plan_arguments(const RoutingArrays& routing, const Options& options) {
  const auto& [topk_idx, routing_map, weights] = routing;
  const Names<Layout> layouts = {
      {"rank_major", Layout::kRankMajor},
      {"expert_major", Layout::kExpertMajor},
      {"expert_strided", Layout::kExpertStrided}};
  const Names<Overflow> overflows = {{"drop", Overflow::kDrop}, {"error", Overflow::kError}};
  return {
      {.topk_idx = view_of(topk_idx, "topk_idx"),
       .map = view_of(routing_map, "routing_map"),
       .weights = view_of(weights, "weights")},
      {.layout = choose("layout", options.layout, layouts),
       .pad_multiple = options.pad_multiple,
       .expert_stride = options.expert_stride,
       .row_budget = options.row_budget,
       .overflow = choose("overflow", options.overflow, overflows)}};
}

Plan plan(Calls& calls, const RoutingArrays& routing, const Options& options) {
  const CallOptions call = options.call();
  return calls.call(
      Op::kPlan,
      call,
      [&] { return plan_arguments(routing, options); },
      [&](Exchange& exchange, const PlanArguments& a) {
        return exchange.plan(a.routing, a.options, call);
      }
  );
}

struct DispatchArguments {
  DispatchInput in;
  DispatchOutput out;
};

DispatchArguments dispatch_arguments(
    const DispatchArrays& in, const DispatchedArrays& out, const Options& options
) {
  const auto& [x, weights, scales] = in;
  const auto& [rows, row_weights, row_scales] = out;
  const Names<Quantise> kinds = {
      {"none", Quantise::kNone}, {"e4m3", Quantise::kE4M3}, {"e5m2", Quantise::kE5M2}};
  return {
      {.x = view_of(x, "x"),
       .weights = view_of(weights, "weights"),
       .scales = view_of(scales, "scales"),
       .quantise = choose("quantise", options.quantise, kinds)},
      {.rows = view_of(rows, "rows"),
       .weights = view_of(row_weights, "row_weights"),
       .scales = view_of(row_scales, "row_scales")}};
}

void dispatch(
    Calls& calls,
    const Plan& plan,
    const DispatchArrays& in,
    const DispatchedArrays& out,
    const Options& options
) {
  const CallOptions call = options.call();
  calls.call(
      Op::kDispatch,
      call,
      [&] { return dispatch_arguments(in, out, options); },
      [&](Exchange& exchange, const DispatchArguments& a) {
        exchange.dispatch(plan, a.in, a.out, call);
      }
  );
}

// Whether all ranks make both by the call that does: where no GPU has to tell the number of rows.
bool is_one_call(const Exchange& exchange, const Options& options) {
  const bool has_stride = options.layout == "expert_strided" && options.expert_stride > 0;
  return exchange.config().device.kind == Device::Kind::kCuda && options.overflow == "drop" &&
         (options.row_budget.has_value() || has_stride);
}

// What a rank refuses that cannot make both: where the plan is a call by itself, no rank comes to
// the dispatch.
Op plan_and_dispatch_op(const Exchange& exchange, const Options& options) {
  return is_one_call(exchange, options) ? Op::kPlanAndDispatch : Op::kPlan;
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

// What plan_and_dispatch returns. What the plan throws is thrown; what the dispatch throws is told
// when the result is taken, for the plan was good then.
struct PlannedDispatch {
  std::optional<Plan> plan;
  bool is_sent = false;  // false: the output was not given or does not suit
  std::exception_ptr problem;

  [[nodiscard]] std::pair<Plan, bool> take() const {
    if (problem) {
      std::rethrow_exception(problem);
    }
    return {plan.value(), is_sent};
  }

  template <class Send>
  void send(const Send& dispatch) {
    try {
      dispatch();
      is_sent = true;
    } catch (const Error&) {
      problem = std::current_exception();
    }
  }
};

PlannedDispatch plan_and_dispatch(
    Calls& calls,
    const RoutingArrays& routing,
    const DispatchArrays& in,
    const DispatchedArrays& out,
    const Options& options
) {
  const CallOptions call = options.call();
  PlannedDispatch made;
  DispatchArguments dispatch;
  std::string reason;
  try {
    dispatch = dispatch_arguments(in, out, options);
  } catch (const Error& error) {
    made.problem = std::current_exception();
    reason = error.what();
  }
  const Op op = plan_and_dispatch_op(calls.exchange(), options);
  calls.call(
      op,
      call,
      [&] { return plan_arguments(routing, options); },
      [&](Exchange& exchange, const PlanArguments& plan) {
        const bool is_one = op == Op::kPlanAndDispatch;
        if (!is_one) {
          made.plan = exchange.plan(plan.routing, plan.options, call);
        }
        if (made.problem) {  // refused where the others dispatch: they count the plan, too
          exchange.refuse(is_one ? op : Op::kDispatch, reason, call);
        } else if (is_one) {
          made.send([&] {
            made.plan =
                exchange.dispatch(plan.routing, plan.options, dispatch.in, dispatch.out, call);
          });
        } else if (const int64_t num_rows = made.plan->num_rows();
                   suits(dispatch.out.rows, num_rows)) {
          made.send([&] {
            exchange.dispatch(*made.plan, dispatch.in, first_rows(dispatch.out, num_rows), call);
          });
        }
      }
  );
  return made;
}

struct CombineArguments {
  CombineInput in;
  CombineOutput out;
};

CombineArguments combine_arguments(
    const CombineArrays& in, const CombinedArrays& out, const Options& options
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
       .scale = choose("scale", options.scale, scales)},
      {.x = view_of(x, "x"), .weights = view_of(weights, "weights")}};
}

void combine(
    Calls& calls,
    const Plan& plan,
    const CombineArrays& in,
    const CombinedArrays& out,
    const Options& options
) {
  const CallOptions call = options.call();
  calls.call(
      Op::kCombine,
      call,
      [&] { return combine_arguments(in, out, options); },
      [&](Exchange& exchange, const CombineArguments& a) {
        exchange.combine(plan, a.in, a.out, call);
      }
  );
}

void refuse(
    Calls& calls, const std::string& verb, const std::string& reason, const Options& options
) {
  const Names<Op> verbs = {
      {"plan", Op::kPlan},
      {"dispatch", Op::kDispatch},
      {"combine", Op::kCombine},
      {"plan_and_dispatch", plan_and_dispatch_op(calls.exchange(), options)}};
  const Op op = choose("verb", verb, verbs);
  calls.locked([&](Exchange& exchange) { exchange.refuse(op, reason, options.call()); });
}

std::shared_ptr<Calls> make(
    const Group& group,
    int64_t hidden,
    int64_t max_tokens,
    int num_experts,
    int max_topk,
    int device,
    const std::string& transport,
    int num_threads,
    int num_sms,
    bool copy_engines,
    double timeout
) {
  ExchangeConfig config;
  config.hidden = hidden;
  config.max_tokens = max_tokens;
  config.num_experts = num_experts;
  config.max_topk = max_topk;
  if (device >= 0) {
    config.device = {Device::Kind::kCuda, device};
  }
  config.transport = transport;
  config.num_threads = num_threads;
  config.num_sms = num_sms;
  config.copy_engines = copy_engines;
  // What is no number, or too large for the bounds that the exchange knows, is refused by them.
  const double most = 1e12;
  config.timeout =
      std::chrono::milliseconds(timeout < most ? static_cast<int64_t>(timeout * 1e3) : INT64_MAX);
  const nb::gil_scoped_release no_gil;
  return std::make_shared<Calls>(group, config);
}

// Rows where peers can write. They outlive the exchange if need be.
nb::object allocate(
    const std::shared_ptr<Calls>& calls, int64_t rows, int64_t cols, const Array& like
) {
  const DType dtype = view_of(like, "like").dtype;
  auto buffer = std::make_shared<Buffer>(calls->locked([&](Exchange& exchange) {
    return exchange.allocate(rows, cols, dtype);
  }));
  const Tensor tensor = buffer->tensor();
  return array_of(
      tensor, std::move(buffer), {static_cast<size_t>(rows), static_cast<size_t>(cols)}
  );
}

nb::dict stats(Calls& calls) {
  const ExchangeStats found = calls.locked([](Exchange& exchange) { return exchange.stats(); });
  nb::dict all;
  all["num_plans"] = found.num_plans;
  all["num_dispatches"] = found.num_dispatches;
  all["num_combines"] = found.num_combines;
  all["num_copied"] = found.num_copied;
  all["wait_seconds"] = found.wait_seconds;
  all["crossing_bytes"] = found.crossing_bytes;
  all["crossing_bytes_by_arrival"] = found.crossing_bytes_by_arrival;
  return all;
}

nb::dict footprint(Calls& calls) {
  const Footprint found = calls.locked([](Exchange& exchange) { return exchange.footprint(); });
  nb::dict all;
  all["control_bytes"] = found.control_bytes;
  all["staging_bytes"] = found.staging_bytes;
  all["buffer_bytes"] = found.buffer_bytes;
  all["pooled_bytes"] = found.pooled_bytes;
  return all;
}

void bind_options(nb::module_& m) {
  using nb::arg;
  m.attr("QUANTISE_GROUP") = kQuantiseGroup;
  nb::class_<Options>(m, "Options", "Of one call; names are those of weft.Exchange's arguments.")
      .def(
          nb::init<
              std::string,
              int64_t,
              int64_t,
              std::optional<int64_t>,
              std::string,
              std::string,
              std::string,
              uintptr_t,
              int,
              bool>(),
          nb::kw_only(),
          arg("layout") = "expert_major",
          arg("pad_multiple") = 1,
          arg("expert_stride") = 0,
          arg("row_budget") = nb::none(),
          arg("overflow") = "drop",
          arg("quantise") = "none",
          arg("scale") = "none",
          arg("stream") = 0,
          arg("num_sms") = 0,
          arg("copy_engines") = false
      );
  nb::class_<PlannedDispatch>(m, "PlannedDispatch", "What plan_and_dispatch returns.")
      .def(
          "take",
          &PlannedDispatch::take,
          "The plan, and whether the rows are on their way. Raises what the dispatch did."
      );
}

}  // namespace

void bind_exchange(nb::module_& m) {
  using nb::arg;
  bind_options(m);
  nb::class_<Calls>(m, "Exchange", "Moves tokens to their experts and back.")
      .def(
          nb::new_(&make),
          arg("group"),
          nb::kw_only(),
          arg("hidden"),
          arg("max_tokens"),
          arg("num_experts"),
          arg("max_topk"),
          arg("device") = -1,
          arg("transport") = "auto",
          arg("num_threads") = 0,
          arg("num_sms") = 0,
          arg("copy_engines") = false,
          arg("timeout") = 30.0
      )
      .def("plan", &plan, arg("routing"), arg("options"))
      .def("dispatch", &dispatch, arg("plan"), arg("inputs"), arg("outputs"), arg("options"))
      .def(
          "plan_and_dispatch",
          &plan_and_dispatch,
          arg("routing"),
          arg("inputs"),
          arg("outputs"),
          arg("options")
      )
      .def("combine", &combine, arg("plan"), arg("inputs"), arg("outputs"), arg("options"))
      .def("refuse", &refuse, arg("verb"), arg("reason"), arg("options"))
      .def("allocate", &allocate, arg("rows"), arg("cols"), arg("like"))
      .def("check", [](Calls& calls) { calls.locked([](Exchange& e) { e.check(); }); })
      .def(
          "release_pooled",
          [](Calls& calls) { calls.locked([](Exchange& e) { e.release_pooled(); }); }
      )
      .def("stats", &stats)
      .def("footprint", &footprint)
      .def_prop_ro("transport", [](const Calls& calls) {
        return calls.exchange().config().transport;
      });
}

}  // namespace weft::py
