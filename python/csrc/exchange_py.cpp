// SPDX-License-Identifier: Apache-2.0
// From the matrices and options of weft/exchange.py to the arguments of plan, dispatch and combine,
// and memory that peers can write: as arrays, and as segments for a torch.cuda.MemPool.
#include <array>
#include <memory>
#include <mutex>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "core/interrupt.hpp"
#include "weft/exchange.hpp"

namespace weft::py {
namespace {

// Calls of this thread that all ranks make. What fails in Python before one has begun is refused.
thread_local int64_t num_begun = 0;
thread_local int64_t num_refused = 0;

// Signals are for the main thread: no other need ask, nor take the interpreter's lock for that.
bool is_main_thread() {
  static const auto main =
      nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident")
      );
  return PyThread_get_thread_ident() == main;
}

// Whether a handler of Python's has raised: KeyboardInterrupt, or what one for SIGTERM does.
bool has_signal() {
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// What Python's Exchange holds. Calls run without the interpreter's lock and one at a time: forward
// and backward may come from different threads.
class Calls {
 public:
  Calls(const Group& group, const ExchangeConfig& config) : exchange_(group, config) {}

  [[nodiscard]] const Exchange& exchange() const { return exchange_; }

  template <class Body>
  auto locked(const Body& body) {
    const InterruptScope scope(is_main_thread() ? &has_signal : nullptr);
    const nb::gil_scoped_release no_gil;
    return locked_here(body);
  }

  // For a call that all ranks make.
  template <class Body>
  auto begin(const Body& body) {
    ++num_begun;
    return locked(body);
  }

  // For a thread that does not hold the interpreter's lock, or keeps it.
  template <class Body>
  auto locked_here(const Body& body) {
    const std::scoped_lock lock(mutex_);
    return body(exchange_);
  }

 private:
  std::mutex mutex_;
  Exchange exchange_;
};

// Of one call, which reads those that concern it.
struct Options : PlanOptions, CallOptions {
  bool ignores_unknown = false;
  Quantise quantise = Quantise::kNone;
  ScaleRule scale_rule = ScaleRule::kExact;
  bool scales_by_column = false;
  CombineScale scale = CombineScale::kNone;
};

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

// A matrix without gaps: the tensor that keeps it alive, address, type, rows, columns, GPU or -1.
using Matrix = std::tuple<nb::handle, uintptr_t, int, int64_t, int64_t, int>;

template <size_t kCount>
using Matrices = std::array<std::optional<Matrix>, kCount>;

Tensor tensor_of(const std::optional<Matrix>& matrix) {
  if (!matrix) {
    return {};
  }
  const auto [tensor, address, dtype, rows, cols, gpu] = *matrix;
  auto* data = reinterpret_cast<std::byte*>(address);  // NOLINT: torch gave it as a number
  const Device device = gpu < 0 ? Device{} : Device{Device::Kind::kCuda, gpu};
  return {data, static_cast<DType>(dtype), rows, cols, -1, device};
}

// Numbers one after the other, which came as one column.
Tensor vector_of(const std::optional<Matrix>& matrix) {
  Tensor tensor = tensor_of(matrix);
  std::swap(tensor.rows, tensor.cols);
  return tensor;
}

Routing routing_of(const Matrices<3>& matrices, const Options& options) {
  const auto& [topk_idx, map, weights] = matrices;
  return {tensor_of(topk_idx), tensor_of(map), tensor_of(weights), options.ignores_unknown};
}

DispatchInput input_of(const Matrices<3>& matrices, const Options& options) {
  const auto& [x, weights, scales] = matrices;
  return {
      tensor_of(x), tensor_of(weights), tensor_of(scales), options.quantise, options.scale_rule};
}

DispatchOutput output_of(const Matrices<7>& matrices, const Options& options) {
  const auto& [rows, weights, scales, experts, sources, counts, count_sums] = matrices;
  return {
      tensor_of(rows),
      tensor_of(weights),
      tensor_of(scales),
      tensor_of(sources),
      tensor_of(experts),
      vector_of(counts),
      vector_of(count_sums),
      options.scales_by_column};
}

// matrices: topk_idx, per_rank, per_expert, is_token_in_rank, per_host, host_of_rank.
void count(const Matrices<6>& matrices, int num_experts, uintptr_t stream) {
  const auto& [topk_idx, per_rank, per_expert, is_token_in_rank, per_host, hosts] = matrices;
  const RoutingCounts counts = {
      vector_of(per_rank),
      vector_of(per_expert),
      tensor_of(is_token_in_rank),
      vector_of(per_host),
      vector_of(hosts)};
  // NOLINTNEXTLINE: torch gives streams as numbers
  count_routing(tensor_of(topk_idx), num_experts, counts, reinterpret_cast<void*>(stream));
}

Plan plan(Calls& calls, const Matrices<3>& routing, const Options& options) {
  return calls.begin([&](Exchange& exchange) {
    return exchange.plan(routing_of(routing, options), options, options);
  });
}

void dispatch(
    Calls& calls,
    const Plan& plan,
    const Matrices<3>& in,
    const Matrices<7>& out,
    const Options& options
) {
  calls.begin([&](Exchange& exchange) {
    exchange.dispatch(plan, input_of(in, options), output_of(out, options), options);
  });
}

// Whether memory that was taken before the number of rows was known holds them, and wastes little.
bool suits(const Tensor& rows, int64_t num_rows) {
  return rows.is_given() && num_rows <= rows.rows && rows.rows <= num_rows + num_rows / 8;
}

DispatchOutput first_rows(DispatchOutput out, int64_t num_rows) {
  for (Tensor* tensor : {&out.rows, &out.weights, &out.scales, &out.experts}) {
    if (tensor->is_given()) {
      tensor->rows = num_rows;
    }
  }
  return out;
}

// The plan, whether the rows are on their way (if not, the output was not given or does not suit),
// and what the dispatch threw: the plan was good then, and what that throws is thrown.
// is_one_call: all ranks make both by the call that does.
nb::tuple plan_and_dispatch(
    Calls& calls,
    const Matrices<3>& routing,
    const Matrices<3>& in,
    const Matrices<7>& out,
    const Options& options,
    bool is_one_call
) {
  const Routing routes = routing_of(routing, options);
  const DispatchInput input = input_of(in, options);
  const DispatchOutput output = output_of(out, options);
  std::optional<Plan> plan;
  std::optional<Error> problem;
  bool is_sent = is_one_call;
  calls.begin([&](Exchange& exchange) {
    if (is_one_call) {
      plan = exchange.dispatch(routes, options, input, output, options);
      return;
    }
    plan = exchange.plan(routes, options, options);
    const int64_t num_rows = plan->num_rows();
    if (suits(output.rows, num_rows)) {
      try {
        exchange.dispatch(*plan, input, first_rows(output, num_rows), options);
        is_sent = true;
      } catch (const Error& error) {
        if (error.code() == ErrorCode::kInterrupted) {
          throw;
        }
        problem = error;
      }
    }
  });
  return nb::make_tuple(*plan, is_sent, problem ? exception_of(*problem) : nb::none());
}

void combine(
    Calls& calls,
    const Plan& plan,
    const Matrices<4>& in,
    const Matrices<2>& out,
    const Options& options
) {
  const auto& [rows, row_weights, source_weights, source_idx] = in;
  const auto& [x, weights] = out;
  const CombineInput input = {
      tensor_of(rows),
      tensor_of(row_weights),
      tensor_of(source_weights),
      options.scale,
      tensor_of(source_idx)};
  const CombineOutput output = {tensor_of(x), tensor_of(weights)};
  calls.begin([&](Exchange& exchange) { exchange.combine(plan, input, output, options); });
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

// Rows where peers can write. They outlive the exchange if need be.
nb::object allocate(Calls& calls, int64_t rows, int64_t cols, int dtype) {
  auto buffer = std::make_shared<Buffer>(calls.locked([&](Exchange& exchange) {
    return exchange.allocate(rows, cols, static_cast<DType>(dtype));
  }));
  const Tensor tensor = buffer->tensor();
  return array_of(tensor, std::move(buffer));
}

// Segments for a torch.cuda.MemPool, of memory that peers can write. torch asks for them by two C
// functions that carry nothing of ours, so the thread says beforehand which exchange shall give.
thread_local std::shared_ptr<Calls> giver;

struct Segments {
  std::mutex mutex;
  std::unordered_map<void*, Buffer> held;  // by address

  // For as long as the process lives: torch frees its last segments when it ends.
  static Segments& all() {
    static auto* const segments = new Segments;  // NOLINT(cppcoreguidelines-owning-memory)
    return *segments;
  }
};

nb::dict stats(Calls& calls) {
  const ExchangeStats found = calls.locked([](Exchange& exchange) { return exchange.stats(); });
  nb::dict all;
  all["num_plans"] = found.num_plans;
  all["num_dispatches"] = found.num_dispatches;
  all["num_combines"] = found.num_combines;
  all["num_copied"] = found.num_copied;
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

void bind_config(nb::module_& m) {
  const auto set_timeout = [](ExchangeConfig& config, double seconds) {
    // What is no number, or too large for the bounds that the exchange knows, is refused by them.
    const double most = 1e12;
    config.timeout =
        std::chrono::milliseconds(seconds < most ? static_cast<int64_t>(seconds * 1e3) : INT64_MAX);
  };
  const auto set_gpu = [](ExchangeConfig& config, int index) {
    config.device = {Device::Kind::kCuda, index};
  };
  nb::class_<ExchangeConfig>(m, "ExchangeConfig", "Names are those of weft.Exchange's arguments.")
      .def(nb::init<>())
      .def_rw("hidden", &ExchangeConfig::hidden)
      .def_rw("max_tokens", &ExchangeConfig::max_tokens)
      .def_rw("num_experts", &ExchangeConfig::num_experts)
      .def_rw("max_topk", &ExchangeConfig::max_topk)
      .def_prop_rw("gpu", nullptr, set_gpu, "Of all tensors; not set: the CPU.")
      .def_rw("transport", &ExchangeConfig::transport)
      .def_rw("num_threads", &ExchangeConfig::num_threads)
      .def_rw("num_sms", &ExchangeConfig::num_sms)
      .def_rw("copy_engines", &ExchangeConfig::copy_engines)
      .def_prop_rw("timeout", nullptr, set_timeout);
}

// A setter of what Python gives by name.
template <class Part, class Choice>
auto by_name(const char* what, Choice Part::*member, const Names<Choice>& names) {
  return
      [=](Options& options, std::string_view name) { options.*member = choose(what, name, names); };
}

void bind_options(nb::module_& m) {
  const Names<Layout> layouts = {
      {"rank_major", Layout::kRankMajor},
      {"expert_major", Layout::kExpertMajor},
      {"expert_strided", Layout::kExpertStrided}};
  const Names<Overflow> overflows = {{"drop", Overflow::kDrop}, {"error", Overflow::kError}};
  const Names<Quantise> kinds = {
      {"none", Quantise::kNone}, {"e4m3", Quantise::kE4M3}, {"e5m2", Quantise::kE5M2}};
  const Names<ScaleRule> rules = {
      {"exact", ScaleRule::kExact},
      {"clamped", ScaleRule::kClamped},
      {"power_of_two", ScaleRule::kPowerOfTwo},
      {"ue8m0", ScaleRule::kUe8m0}};
  const Names<CombineScale> scales = {
      {"none", CombineScale::kNone},
      {"plan", CombineScale::kPlanWeights},
      {"source", CombineScale::kSourceWeights}};
  const auto set_stream = [](Options& options, uintptr_t stream) {
    options.stream =
        reinterpret_cast<void*>(stream);  // NOLINT: a cudaStream_t that torch gave as a number
  };
  nb::class_<Options>(m, "Options", "Of one call; names are those of weft.Exchange's arguments.")
      .def(nb::init<>())
      .def_prop_rw("layout", nullptr, by_name("layout", &Options::layout, layouts))
      .def_rw("pad_multiple", &Options::pad_multiple)
      .def_rw("expert_stride", &Options::expert_stride)
      .def_rw("row_budget", &Options::row_budget, nb::arg().none())
      .def_prop_rw("overflow", nullptr, by_name("overflow", &Options::overflow, overflows))
      .def_prop_rw("quantise", nullptr, by_name("quantise", &Options::quantise, kinds))
      .def_prop_rw("scale_rule", nullptr, by_name("scale_rule", &Options::scale_rule, rules))
      .def_rw("scales_by_column", &Options::scales_by_column)
      .def_rw("ignores_unknown", &Options::ignores_unknown)
      .def_prop_rw("scale", nullptr, by_name("scale", &Options::scale, scales))
      .def_prop_rw("stream", nullptr, set_stream)
      .def_rw("num_sms", &Options::num_sms)
      .def_rw("copy_engines", &Options::copy_engines)
      .def_rw("number", &Options::number);
}

}  // namespace

void bind_exchange(nb::module_& m) {
  using nb::arg;
  m.attr("QUANTISE_GROUP") = kQuantiseGroup;
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
  nb::class_<Calls>(m, "Exchange", "Moves tokens to their experts and back.")
      .def(nb::new_(make), arg("group"), arg("config"))
      .def("plan", &plan, arg("routing"), arg("options"))
      .def("dispatch", &dispatch, arg("plan"), arg("inputs"), arg("outputs"), arg("options"))
      .def(
          "plan_and_dispatch",
          &plan_and_dispatch,
          arg("routing"),
          arg("inputs"),
          arg("outputs"),
          arg("options"),
          arg("is_one_call")
      )
      .def("combine", &combine, arg("plan"), arg("inputs"), arg("outputs"), arg("options"))
      .def("refuse", &refuse, arg("verb"), arg("reason"), arg("options"))
      .def("allocate", &allocate, arg("rows"), arg("cols"), arg("dtype"))
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
  m.def(
      "count_routing",
      &count,
      arg("matrices"),
      arg("num_experts"),
      arg("stream"),
      "Local: what weft::count_routing writes; matrices: topk_idx, per_rank, per_expert, "
      "is_token_in_rank, per_host, host_of_rank."
  );
  m.def(
      "num_begun", [] { return num_begun; }, "Calls of this thread that all ranks make."
  );
  m.def(
      "num_told",
      [] { return num_begun + num_refused; },
      "The same, and those that this thread has refused in their place."
  );
  m.def(
      "give_segments",
      [](std::shared_ptr<Calls> calls) { giver = std::move(calls); },
      arg("exchange").none(),
      "The exchange that gives this thread's next segments; None: nobody."
  );
}

extern "C" {

// Null, which torch reports as out of memory, if there is no exchange or it has none to give.
__attribute__((visibility("default"))) void* weft_pool_malloc(
    ssize_t bytes, int /*device*/, void* /*stream*/
) {
  constexpr int64_t kRow = 16;
  if (giver == nullptr || bytes <= 0) {
    return nullptr;
  }
  try {
    Buffer buffer = giver->locked_here([&](Exchange& exchange) {
      return exchange.allocate((bytes + kRow - 1) / kRow, kRow, DType::kByte);
    });
    void* data = buffer.tensor().data;
    Segments& segments = Segments::all();
    const std::scoped_lock lock(segments.mutex);
    segments.held.insert_or_assign(data, std::move(buffer));
    return data;
  } catch (const std::exception&) {
    return nullptr;
  }
}

__attribute__((visibility("default"))) void weft_pool_free(
    void* data, ssize_t /*bytes*/, int /*device*/, void* /*stream*/
) {
  Segments& segments = Segments::all();
  std::unordered_map<void*, Buffer>::node_type freed;  // outside of the lock
  const std::scoped_lock lock(segments.mutex);
  freed = segments.held.extract(data);
}
}

}  // namespace weft::py
