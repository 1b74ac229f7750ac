// SPDX-License-Identifier: Apache-2.0
// Properties that weft/outputs.py reads of a plan that exchange_py.cpp made.
#include <algorithm>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <sstream>

#include "exchange_py.hpp"
#include "plan/plan_data.hpp"
#include "torch_tensor.hpp"
#include "weft/plan.hpp"

namespace weft::py {
namespace {

using Ints = std::vector<int64_t>;

template <auto kValues>
Ints ints_of(const Plan& plan) {
  const std::span<const int64_t> values = (plan.*kValues)();
  return {values.begin(), values.end()};
}

template <auto kCount>
Ints of_ranks(const Plan& plan) {
  Ints counts;
  for (int rank = 0; rank < plan.num_ranks(); ++rank) {
    counts.push_back((plan.*kCount)(rank));
  }
  return counts;
}

template <auto kValues>
nb::object on_host(const Plan& plan, nb::handle made) {
  return tensor_of((plan.*kValues)(), made);
}

}  // namespace

nb::object tensor_of(std::span<const int64_t> values, nb::handle made) {
  const auto count = static_cast<int64_t>(values.size());
  if (!made.is_none()) {
    const Given given = read_needed("counts", made);
    std::ranges::copy(values, reinterpret_cast<int64_t*>(given.tensor.data));
    return nb::borrow(made);
  }
  NewTensors fresh{Device{}};
  const Tensor tensor = fresh.add(1, count, ScalarType::kInt64, {1, {count}, {1}});
  std::ranges::copy(values, reinterpret_cast<int64_t*>(tensor.data));
  return fresh.take().front();
}

void bind_plan(nb::module_& m) {
  nb::class_<Plan>(m, "Plan", "Everything derived from routing before a byte of payload moves.")
      .def_prop_ro("num_experts", &Plan::num_experts)
      .def_prop_ro("num_local_experts", &Plan::num_local_experts)
      .def_prop_ro("num_physical_experts", &Plan::num_physical_experts)
      .def_prop_ro("num_replicas", &Plan::num_replicas)
      .def_prop_ro(
          "placement",
          [](const Plan& p) { return std::vector(p.placement().begin(), p.placement().end()); }
      )
      .def_prop_ro("routes_per_expert", &Plan::routes_per_expert)
      .def_prop_ro(
          "route_ranks", &Plan::route_ranks, "The rank of each route, by token and choice, or -1."
      )
      .def_prop_ro(
          "load",
          [](const Plan& p) {
            const Plan::Load load = p.load();
            return nb::make_tuple(load.busiest, load.unbalanced, load.mean, load.if_free);
          },
          "Routes of the busiest rank, what it would have without replicas, and the mean rank's."
      )
      .def_prop_ro("num_tokens", &Plan::num_tokens)
      .def_prop_ro("topk", &Plan::topk)
      .def_prop_ro("layout", [](const Plan& p) { return std::string(layout_name(p.layout())); })
      .def_prop_ro("order", [](const Plan& p) { return std::string(order_name(p.order())); })
      .def_prop_ro("pad_multiple", &Plan::pad_multiple)
      .def_prop_ro("from_map", &Plan::from_map)
      .def_prop_ro("num_rows", &Plan::num_rows)
      .def_prop_ro("required_rows", &Plan::required_rows)
      .def_prop_ro(
          "may_have_slack",
          [](const Plan& p) {
            const PlanOptions& options = contents_of(p).shape.options;
            return options.layout == Layout::kExpertStrided || options.row_budget.has_value();
          }
      )
      .def_prop_ro("overflow", &Plan::overflow)
      .def_prop_ro("row_weight_cols", &Plan::row_weight_cols)
      .def_prop_ro("rows_per_expert", &ints_of<&Plan::rows_per_expert>)
      .def_prop_ro("padded_rows_per_expert", &ints_of<&Plan::padded_rows_per_expert>)
      .def(
          "rows_on_host",
          &on_host<&Plan::rows_per_expert>,
          nb::arg("counts").none() = nb::none(),
          "int64 [El] on the CPU: a copy of rows_per_expert, in `counts` if that is given."
      )
      .def(
          "padded_rows_on_host",
          &on_host<&Plan::padded_rows_per_expert>,
          nb::arg("counts").none() = nb::none(),
          "int64 [El] on the CPU: a copy of padded_rows_per_expert, in `counts` if that is "
          "given."
      )
      .def_prop_ro("expert_begin", &ints_of<&Plan::expert_begin>)
      .def_prop_ro("received_arrivals", &of_ranks<&Plan::received_arrivals>)
      .def_prop_ro("sent_arrivals", &of_ranks<&Plan::sent_arrivals>)
      .def("wire_bytes", &Plan::wire_bytes, nb::arg("row_bytes"))
      .def("returned_bytes", &Plan::returned_bytes, nb::arg("row_bytes"))
      .def("crossing_bytes", &Plan::crossing_bytes, nb::arg("row_bytes"))
      .def("to_json", &Plan::to_json)
      .def_static("from_json", &Plan::from_json, nb::arg("text"), nb::arg("name") = "text")
      .def(
          "on_device",
          [](const Plan& p, int device) {
            const Plan::OnDevice here = p.on_device();
            // Returns numbers as bytes; None on a CPU.
            const auto numbers = [&](const void* data, DType dtype, int64_t count) -> nb::object {
              if (data == nullptr) {
                return nb::none();
              }
              auto* bytes = static_cast<std::byte*>(const_cast<void*>(data));  // NOLINT: read only
              const Device gpu = {Device::Kind::kCuda, device};
              return array_of({bytes, dtype, count, 1, -1, gpu}, std::make_shared<Plan>(p));
            };
            const int local = p.num_local_experts();
            nb::dict all;
            all["required_rows"] = numbers(here.required_rows, DType::kInt64, 1);
            all["overflow"] = numbers(here.overflow, DType::kInt32, 1);
            all["rows_per_expert"] = numbers(here.rows_per_expert, DType::kInt64, local);
            all["padded_rows_per_expert"] =
                numbers(here.padded_rows_per_expert, DType::kInt64, local);
            all["expert_begin"] = numbers(here.expert_begin, DType::kInt64, local);
            return all;
          },
          nb::arg("device"),
          "The bytes of the plan's numbers on GPU `device`; None each for a plan of the CPU."
      )
      .def("__eq__", [](const Plan& a, const Plan& b) { return a == b; })
      .def("__repr__", [](const Plan& p) {
        std::ostringstream out;
        out << p;
        return out.str();
      });
}

}  // namespace weft::py
