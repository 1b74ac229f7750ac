// SPDX-License-Identifier: Apache-2.0
// What weft/planned.py reads of a plan that exchange_py.cpp made.
#include <algorithm>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <sstream>

#include "bind.hpp"
#include "tensor_py.hpp"
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

// The plan's own numbers on a GPU; null on a CPU.
nb::object on_gpu(const Plan& plan, const void* data, DType dtype, size_t count, int device) {
  if (data == nullptr) {
    return nb::none();
  }
  Tensor tensor = {
      static_cast<std::byte*>(const_cast<void*>(data)),  // NOLINT: nobody writes it
      dtype,
      static_cast<int64_t>(count),
      1};
  tensor.device = {Device::Kind::kCuda, device};
  return array_of(tensor, std::make_shared<Plan>(plan), {count});
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<Plan>(m, "Plan", "Everything derived from routing before a byte of payload moves.")
      .def_prop_ro("rank", &Plan::rank)
      .def_prop_ro("num_ranks", &Plan::num_ranks)
      .def_prop_ro("num_experts", &Plan::num_experts)
      .def_prop_ro("num_local_experts", &Plan::num_local_experts)
      .def_prop_ro("num_tokens", &Plan::num_tokens)
      .def_prop_ro("topk", &Plan::topk)
      .def_prop_ro("layout", [](const Plan& p) { return std::string(layout_name(p.layout())); })
      .def_prop_ro("pad_multiple", &Plan::pad_multiple)
      .def_prop_ro("from_map", &Plan::from_map)
      .def_prop_ro("num_rows", &Plan::num_rows)
      .def_prop_ro("required_rows", &Plan::required_rows)
      .def_prop_ro("overflow", &Plan::overflow)
      .def_prop_ro("row_weight_cols", &Plan::row_weight_cols)
      .def_prop_ro("rows_per_expert", &ints_of<&Plan::rows_per_expert>)
      .def_prop_ro("padded_rows_per_expert", &ints_of<&Plan::padded_rows_per_expert>)
      .def_prop_ro("expert_begin", &ints_of<&Plan::expert_begin>)
      .def_prop_ro("global_routes_per_expert", &ints_of<&Plan::global_routes_per_expert>)
      .def_prop_ro("received_arrivals", &of_ranks<&Plan::received_arrivals>)
      .def_prop_ro("sent_arrivals", &of_ranks<&Plan::sent_arrivals>)
      .def("wire_bytes", &Plan::wire_bytes, nb::arg("row_bytes"))
      .def("crossing_bytes", &Plan::crossing_bytes, nb::arg("row_bytes"))
      .def("logical_bytes", &Plan::logical_bytes, nb::arg("row_bytes"))
      .def("to_json", &Plan::to_json)
      .def_static("from_json", &Plan::from_json, nb::arg("text"), nb::arg("name") = "text")
      .def(
          "on_device",
          [](const Plan& p, int device) {
            const Plan::OnDevice here = p.on_device();
            const auto local = static_cast<size_t>(p.num_local_experts());
            const auto numbers = [&](const void* data, size_t count) {
              return on_gpu(p, data, DType::kInt64, count, device);
            };
            nb::dict all;
            all["required_rows"] = numbers(here.required_rows, 1);
            all["overflow"] = on_gpu(p, here.overflow, DType::kInt32, 1, device);
            all["rows_per_expert"] = numbers(here.rows_per_expert, local);
            all["padded_rows_per_expert"] = numbers(here.padded_rows_per_expert, local);
            all["expert_begin"] = numbers(here.expert_begin, local);
            return all;
          },
          nb::arg("device"),
          "Tensors over the plan's own memory on GPU `device`; None each for a plan of the CPU."
      )
      .def("__eq__", [](const Plan& a, const Plan& b) { return a == b; })
      .def("__repr__", [](const Plan& p) {
        std::ostringstream out;
        out << p;
        return out.str();
      });
}

}  // namespace weft::py
