// SPDX-License-Identifier: Apache-2.0
// From the tensors and options of weft/exchange.py to plan, dispatch and combine, and back: each is
// one call, which allocates what it returns and gives up the interpreter's lock.
#include "exchange_py.hpp"

#include <memory>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "call/payload.hpp"
#include "call/signature.hpp"
#include "checks_py.hpp"
#include "options_py.hpp"
#include "survival_py.hpp"
#include "tensors_py.hpp"
#include "weft/exchange.hpp"

namespace weft::py {
namespace {

Plan plan(Calls& calls, const nb::tuple& routing, const Options& options) {
  const RoutingGiven given(routing);
  return calls.begin([&](Exchange& exchange) {
    return exchange.plan(given.routing(options), options, options);
  });
}

}  // namespace

nb::tuple dispatch(
    Calls& calls,
    const Plan& plan,
    const nb::tuple& sent,
    bool has_experts,
    const Options& options,
    nb::handle pool
) {
  const SentGiven given(sent, has_experts);
  const int64_t num_rows = plan.num_rows();
  const RowsShape shape = {
      plan.layout(), plan.num_local_experts(), num_rows, plan.row_weight_cols()};
  Written written(calls, given, options, shape, pool);
  calls.begin([&](Exchange& exchange) {
    exchange.dispatch(plan, given.input(options), written.output, options);
  });
  return written.take(num_rows);
}

namespace {

// Returns whether memory taken ahead holds num_rows rows, and at most 1/8 more.
bool is_room_for(const Tensor& rows, int64_t num_rows) {
  return rows.is_given() && num_rows <= rows.rows && rows.rows <= num_rows + num_rows / 8;
}

DispatchOutput first_rows(DispatchOutput out, int64_t num_rows) {
  for (Tensor* tensor : {&out.rows, &out.weights, &out.scales, &out.experts}) {
    // Scales in tiles are made where the number of rows is known.
    const bool is_whole = tensor == &out.scales && out.scale_layout == ScaleLayout::kInTiles;
    if (tensor->is_given() && !is_whole) {
      tensor->rows = num_rows;
    }
  }
  return out;
}

// Takes the memory of a dispatch whose plan is yet to be made.
Written written_for(
    Calls& calls,
    const RoutingGiven& routing,
    const SentGiven& sent,
    const Options& options,
    nb::handle pool,
    int64_t num_rows
) {
  const Exchange& exchange = calls.exchange();
  RowsShape shape = {
      .layout = options.layout,
      .num_experts =
          exchange.config().num_experts / exchange.num_ranks() + options.balance.replicas,
      .num_rows = num_rows};
  if (options.layout == Layout::kRankMajor) {
    const Tensor& topk_idx = routing.topk_idx.tensor;
    shape.weight_cols = topk_idx.is_given() ? topk_idx.cols : exchange.config().max_topk;
  }
  return {calls, sent, options, shape, pool};
}

// Takes a dispatch's memory so early that a GPU that has counted waits for little more than the
// launch. If the number of rows was not given, takes the last such call's, and a little more where
// it changes; none without a last call or enough memory.
std::optional<Written> written_ahead(
    Calls& calls,
    const RoutingGiven& routing,
    const SentGiven& sent,
    const Options& options,
    nb::handle pool,
    std::optional<int64_t> given_rows
) {
  const int64_t last = calls.last_rows;
  const bool has_one_size = options.blocks || options.scale_layout == ScaleLayout::kInTiles;
  if (!given_rows && (last < 0 || has_one_size)) {
    return std::nullopt;
  }
  try {
    const int64_t num_rows = given_rows.value_or(last + calls.spare_rows);
    return written_for(calls, routing, sent, options, pool, num_rows);
  } catch (const Error&) {
    if (given_rows) {
      throw;
    }
  } catch (nb::python_error& error) {
    if (given_rows || !error.matches(PyExc_RuntimeError)) {  // torch.OutOfMemoryError is one
      throw;
    }
  }
  return std::nullopt;
}

}  // namespace

nb::tuple plan_and_dispatch(
    Calls& calls,
    const RoutingGiven& routes,
    const SentGiven& given,
    const Options& options,
    const Routed& how
) {
  const std::optional<int64_t> given_rows = how.given_rows;
  nb::object pool = nb::none();
  const bool is_alone = calls.exchange().writes_alone(
      routes.routing(options), options, given.input(options), options
  );
  // One call makes both, too, where the number of rows was not given but there is one launch; what
  // it has no room for is placed by another.
  const bool is_one_call = how.is_one_call || (!given_rows && is_alone);
  if (!how.pool_of.is_none() && !is_alone) {
    pool = how.pool_of(nb::find(calls));
  }
  std::optional<Written> written = written_ahead(calls, routes, given, options, pool, given_rows);
  if (!written && is_one_call) {
    written.emplace(written_for(calls, routes, given, options, pool, 0));
  }
  const DispatchOutput output = written ? written->output : DispatchOutput{};
  std::optional<Plan> plan;
  std::optional<Error> problem;
  bool is_sent = is_one_call;
  calls.begin([&](Exchange& exchange) {
    if (is_one_call) {
      plan = exchange.dispatch(
          routes.routing(options), options, given.input(options), output, options
      );
      return;
    }
    plan = exchange.plan(routes.routing(options), options, options);
    const int64_t num_rows = plan->num_rows();
    if (is_room_for(output.rows, num_rows)) {
      try {
        exchange.dispatch(*plan, given.input(options), first_rows(output, num_rows), options);
        is_sent = true;
      } catch (const Error& error) {
        if (error.code() == ErrorCode::kInterrupted) {
          throw;
        }
        problem = error;
      }
    }
  });
  if (!given_rows) {
    const int64_t num_rows = plan->num_rows();
    calls.spare_rows = num_rows == calls.last_rows ? 0 : num_rows / (is_alone ? 16 : 64);
    calls.last_rows = num_rows;
    if (is_alone && num_rows > output.rows.rows) {
      written.reset();
      written.emplace(written_for(calls, routes, given, options, pool, num_rows));
      calls.locked([&](Exchange& exchange) {
        exchange.place_rows(*plan, given.input(options), written->output, options);
      });
    }
  }
  const nb::object told = problem ? exception_of(*problem) : nb::none();
  return nb::make_tuple(
      *plan, told, is_sent ? nb::object(written->take(plan->num_rows())) : nb::none()
  );
}

namespace {

// Returns how many collective calls plan_and_dispatch() of these arguments counts as, and its
// results beside the plan, with undefined contents.
nb::tuple skipped_dispatch(
    Calls& calls,
    const nb::tuple& routing,
    const nb::tuple& sent,
    bool has_experts,
    const Options& options,
    int64_t given_rows
) {
  const RoutingGiven routes(routing);
  const SentGiven given(sent, has_experts);
  std::optional<Written> written =
      written_ahead(calls, routes, given, options, nb::none(), given_rows);
  const bool is_one = calls.exchange().writes_alone(
      routes.routing(options), options, given.input(options), options
  );
  return nb::make_tuple(is_one ? 1 : 2, written->take(given_rows));
}

// Does a common low_latency_dispatch (weft/compat): check_block_dispatch and plan_and_dispatch.
// Returns None, with nothing begun, if the exchange lacks these sizes, or if the statistics of
// counts have gaps.
nb::object dispatch_blocks(
    Calls& calls,
    const nb::tuple& tensors,
    int64_t num_max,
    int64_t num_experts,
    int64_t num_ranks,
    const nb::tuple& formats,
    uintptr_t stream,
    nb::handle pool_of,
    bool is_one_call,
    bool receives_later
) {
  BlockDispatch call = check_block_dispatch(tensors, {num_max, num_experts, num_ranks}, formats);
  const nb::object none = nb::none();
  const nb::handle stats = tensors[3];
  if (!stats.is_none() && !read_vector("count_sums", stats).owner.is(stats)) {
    return nb::none();
  }
  const RoutingGiven routes(nb::make_tuple(tensors[1], none, none, none));
  const SentGiven given(
      nb::make_tuple(tensors[0], tensors[2], none, none, none, stats, tensors[5]), false
  );
  const ExchangeConfig& config = calls.exchange().config();
  const int64_t num_local = num_experts / num_ranks;
  const bool is_for_it = call.hidden == config.hidden && given.x.tensor.device == config.device &&
                         num_local * calls.exchange().num_ranks() == config.num_experts &&
                         num_max <= config.max_tokens && call.topk <= config.max_topk;
  if (!is_for_it) {
    return nb::none();
  }
  call.options.stream = stream_of(stream);
  call.options.receives_later = receives_later;
  const int64_t num_rows = call.options.expert_stride * num_local;
  return plan_and_dispatch(calls, routes, given, call.options, {pool_of, num_rows, is_one_call});
}

// Ends a call with `receives_later`.
void receive(Calls& calls, const Plan& plan, const Options& options) {
  calls.locked([&](Exchange& exchange) { exchange.receive(plan, options); });
}

bool is_open(Calls& calls, const Plan& plan) {
  return calls.asked([&](Exchange& exchange) { return exchange.is_open(plan); });
}

}  // namespace

nb::tuple combine(
    Calls& calls, const Plan& plan, const nb::tuple& brought, nb::handle out, const Options& options
) {
  const Given rows =
      options.blocks ? read_blocks("rows", brought[0]) : read_needed("rows", brought[0]);
  const Given row_weights = read("row_weights", brought[1]);
  const Given source_weights = read("source_weights", brought[2]);
  const Given source_idx = read("source_idx", brought[3]);
  const Given marks = at_place("marks", brought[4], read_vector("marks", brought[4]), false);
  const Given given_out = at_place("out", out, read("out", out));
  NewTensors made(rows.tensor.device);
  CombineOutput output = {given_out.tensor};
  const ScalarType type = rows.type.value_or(ScalarType::kUint8);
  if (out.is_none()) {
    output.x = made.add(plan.num_tokens(), rows.tensor.cols, type);
  }
  if (row_weights.tensor.is_given()) {
    const int64_t cols = plan.from_map() ? plan.num_experts() : plan.topk();
    output.weights = made.add(plan.num_tokens(), cols, ScalarType::kFloat32);
  }
  CombineInput input = {
      rows.tensor,
      row_weights.tensor,
      source_weights.tensor,
      options.scale,
      source_idx.tensor,
      options.ready,
      options.wire};
  input.ready.marks = marks.tensor;
  calls.begin([&](Exchange& exchange) { exchange.combine(plan, input, output, options); });
  std::vector<nb::object> tensors = made.take();
  const nb::object x = out.is_none() ? tensors.front() : nb::borrow(out);
  const bool has_weights = row_weights.tensor.is_given();
  return nb::make_tuple(x, has_weights ? tensors.back() : nb::none());
}

namespace {

// Does a common low_latency_combine (weft/compat): check_block_combine and combine. Returns None,
// with nothing begun, if `out` (the fourth of the tensors) has gaps.
nb::object combine_blocks(
    Calls& calls,
    const nb::tuple& tensors,
    const Plan& plan,
    int64_t stride,
    int64_t hidden,
    uintptr_t stream,
    bool receives_later
) {
  check_block_combine(tensors, plan, stride, hidden);
  const nb::object out = tensors[3];
  if (!out.is_none() && !read("out", out).owner.is(out)) {
    return nb::none();
  }
  Options options;
  options.scale = CombineScale::kSourceWeights;
  options.blocks = true;
  options.stream = stream_of(stream);
  options.receives_later = receives_later;
  const nb::object none = nb::none();
  const nb::tuple brought = nb::make_tuple(tensors[0], none, tensors[2], tensors[1], none);
  return combine(calls, plan, brought, out, options)[0];
}

void refuse(
    Calls& calls, std::string_view verb, const std::string& reason, const Options& options
) {
  const Names<Op> verbs = {
      {"plan", Op::kPlan},
      {"dispatch", Op::kDispatch},
      {"combine", Op::kCombine},
      {"plan_and_dispatch", Op::kPlanAndDispatch}};
  const Op op = choose("verb", verb, verbs);
  ++num_refused;
  calls.locked([&](Exchange& exchange) { exchange.refuse(op, reason, options); });
}

void add_waits(Calls& calls, nb::handle sums, int64_t times, uintptr_t stream) {
  const Given given = at_place("sums", sums, read_vector("sums", sums));
  calls.locked([&](Exchange& exchange) {
    exchange.add_waits(given.tensor, times, stream_of(stream));
  });
}

nb::dict stats(Calls& calls) {
  const ExchangeStats found = calls.asked([](Exchange& exchange) { return exchange.stats(); });
  nb::dict all;
  all["num_plans"] = found.num_plans;
  all["num_dispatches"] = found.num_dispatches;
  all["num_combines"] = found.num_combines;
  all["num_copied"] = found.num_copied;
  all["num_captured"] = found.num_captured;
  all["wait_seconds"] = found.wait_seconds;
  all["host_wait_seconds"] = found.host_wait_seconds;
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

}  // namespace

void bind_exchange(nb::module_& m) {
  using nb::arg;
  m.attr("QUANTISE_GROUP") = kQuantiseGroup;
  m.attr("ANNOUNCEMENT") = kAnnouncement;
  nb::dict dtypes;  // by their names
  for (int dtype = 0; dtype <= static_cast<int>(DType::kInt64); ++dtype) {
    dtypes[nb::cast(dtype_name(static_cast<DType>(dtype)))] = dtype;
  }
  m.attr("DTYPES") = dtypes;
  bind_config(m);
  bind_options(m);
  const auto make = [](const Group& group, const ExchangeConfig& config) {
    const InterruptScope scope(is_main_thread() ? &has_signal : nullptr);
    const nb::gil_scoped_release no_gil;
    return std::make_shared<Calls>(group, config);
  };
  nb::class_<Calls> exchange(m, "Exchange", "Moves tokens to their experts and back.");
  exchange.def(nb::new_(make), arg("group"), arg("config"))
      .def("plan", &plan, arg("routing"), arg("options"))
      .def(
          "dispatch",
          &dispatch,
          arg("plan"),
          arg("sent"),
          arg("has_experts"),
          arg("options"),
          arg("pool").none()
      )
      .def(
          "plan_and_dispatch",
          [](Calls& calls,
             const nb::tuple& routing,
             const nb::tuple& sent,
             bool has_experts,
             const Options& options,
             nb::handle pool_of,
             std::optional<int64_t> given_rows,
             bool is_one_call) {
            const RoutingGiven routes(routing);
            const SentGiven given(sent, has_experts);
            const Routed how = {pool_of, given_rows, is_one_call};
            return plan_and_dispatch(calls, routes, given, options, how);
          },
          arg("routing"),
          arg("sent"),
          arg("has_experts"),
          arg("options"),
          arg("pool_of").none(),
          arg("given_rows").none(),
          arg("is_one_call")
      )
      .def(
          "skipped_dispatch",
          &skipped_dispatch,
          arg("routing"),
          arg("sent"),
          arg("has_experts"),
          arg("options"),
          arg("given_rows"),
          "Local: how many calls plan_and_dispatch of the same arguments makes in one, and what it "
          "returns at last, of whatever contents."
      )
      .def(
          "dispatch_blocks",
          &dispatch_blocks,
          arg("tensors"),
          arg("num_max"),
          arg("num_experts"),
          arg("num_ranks"),
          arg("formats"),
          arg("stream"),
          arg("pool_of").none(),
          arg("is_one_call"),
          arg("receives_later"),
          "check_block_dispatch of the same arguments, and plan_and_dispatch by it; None if the "
          "exchange has other sizes, or the statistics of counts have gaps."
      )
      .def("receive", &receive, arg("plan"), arg("options"))
      .def("is_open", &is_open, arg("plan"))
      .def("combine", &combine, arg("plan"), arg("brought"), arg("out").none(), arg("options"))
      .def(
          "combine_blocks",
          &combine_blocks,
          arg("tensors"),
          arg("plan"),
          arg("stride"),
          arg("hidden"),
          arg("stream"),
          arg("receives_later"),
          "check_block_combine of the same arguments, and combine by it: the tokens; None if `out` "
          "has gaps."
      )
      .def("refuse", &refuse, arg("verb"), arg("reason"), arg("options"))
      .def(
          "is_outgrown",
          [](Calls& calls) { return calls.locked([](Exchange& e) { return e.is_outgrown(); }); }
      )
      .def("check", [](Calls& calls) { calls.locked([](Exchange& e) { e.check(); }); })
      .def(
          "release_pooled",
          [](Calls& calls) { calls.locked([](Exchange& e) { e.release_pooled(); }); }
      )
      .def("report", &report, "What CallReport of weft/exchange_state.py has.")
      .def("mask", &mask, arg("ranks"))
      .def("invitation", &invitation)
      .def("readmit", &readmit, arg("ranks"))
      .def("grow", &grow, arg("max_tokens"), arg("max_topk"))
      .def("add_waits", &add_waits, arg("sums"), arg("times"), arg("stream"))
      .def("stats", &stats)
      .def("footprint", &footprint)
      .def_prop_ro(
          "transport", [](const Calls& calls) { return calls.exchange().config().transport; }
      )
      .def_prop_ro(
          "max_tokens", [](const Calls& calls) { return calls.exchange().config().max_tokens; }
      )
      .def_prop_ro("max_topk", [](const Calls& calls) {
        return calls.exchange().config().max_topk;
      });
  bind_at_once(exchange);
  m.def(
      "wire_row_bytes",
      [](std::string_view wire, int64_t hidden) {
        return wire_row_bytes(wire_by_name(wire), hidden);
      },
      arg("wire"),
      arg("hidden"),
      "The bytes of a bf16 row, or a sum of some, on its way in a combine."
  );
  m.def(
      "suits",
      nb::overload_cast<nb::handle, uint64_t, nb::handle>(&suits),
      arg("tensor").none(),
      arg("dtypes"),
      arg("shape"),
      "Whether it is a tensor of these sizes (of any, where there is a name) and of one of these "
      "dtypes (bits by torch's numbers), on a CPU or a GPU. False also where only Python can tell."
  );
  m.def(
      "give_segments", &give_segments, arg("exchange").none(), "To this thread; None: nobody does."
  );
  m.def(
      "num_begun", [] { return num_begun; }, "Calls of this thread that all ranks make."
  );
  m.def(
      "num_told",
      [] { return num_begun + num_refused; },
      "The same, and those that this thread has refused in their place."
  );
}

}  // namespace weft::py
