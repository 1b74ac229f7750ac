// SPDX-License-Identifier: Apache-2.0
// The planner of replicas, for weft/planner.py, which makes the tensors.
#include <algorithm>
#include <nanobind/stl/vector.h>
#include <span>
#include <vector>

#include "plan/balance/balance.hpp"
#include "torch_tensor.hpp"
#include "weft/plan.hpp"

namespace weft::py {
namespace {

template <class T>
std::span<T> numbers_of(const Given& given) {
  auto* data = reinterpret_cast<T*>(given.tensor.data);
  return {data, static_cast<size_t>(given.tensor.rows * given.tensor.cols)};
}

// Copies to `out`, of equal size.
template <class T>
void copy_to(nb::handle out, const std::vector<T>& numbers) {
  std::ranges::copy(numbers, numbers_of<T>(read_needed("out", out)).begin());
}

}  // namespace

void bind_balance(nb::module_& m) {
  nb::class_<Balance>(m, "Balance", "Which experts have replicas, and how many routes go there.")
      .def(
          "replicas",
          [](const Balance& b, nb::handle out) { copy_to(out, b.replicas()); },
          nb::arg("out"),
          "Fills out, int32 [ranks, replicas]: the expert of each replica, -1 for none."
      )
      .def(
          "quotas",
          [](const Balance& b, nb::handle out) { copy_to(out, b.quotas); },
          nb::arg("out"),
          "Fills out, int64 [ranks, physical experts]: routes by source rank."
      )
      .def(
          "assign",
          [](const Balance& b, int source, nb::handle experts, nb::handle out) {
            const Given routes = read_needed("experts", experts);
            copy_to(out, assign_routes(b, source, numbers_of<const int32_t>(routes)));
          },
          nb::arg("source"),
          nb::arg("experts"),
          nb::arg("out"),
          "Fills out, int32 like experts: the physical expert of each route of a source."
      );
  m.attr("MOST_REPLICAS") = kMostReplicas;  // of a rank
  m.def(
      "plan_balance",
      [](nb::handle counts,
         int num_ranks,
         int replicas,
         int64_t min_rows,
         std::vector<int> domain_of,
         int64_t block_rows,
         int64_t replica_rows) {
        const Given given = read_needed("counts", counts);
        const BalanceOptions options = {
            replicas, min_rows, std::move(domain_of), block_rows, replica_rows};
        return plan_balance(numbers_of<const int32_t>(given), num_ranks, options);
      },
      nb::arg("counts"),
      nb::arg("num_ranks"),
      nb::arg("replicas"),
      nb::arg("min_rows"),
      nb::arg("domain_of"),
      nb::arg("block_rows"),
      nb::arg("replica_rows"),
      "counts: int32 [ranks, experts] on a CPU. domain_of: of each rank, or empty."
  );
}

}  // namespace weft::py
