// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "calls_py.hpp"
#include "tensor_py.hpp"
#include "weft/exchange.hpp"

namespace weft::py {
namespace {

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

}  // namespace

void bind_exchange(nb::module_& m) {
  using nb::arg;
  nb::class_<Calls> exchange(m, "Exchange", "Moves tokens to their experts and back.");
  exchange
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
  bind_calls(exchange);
}

}  // namespace weft::py
