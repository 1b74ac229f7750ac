// SPDX-License-Identifier: Apache-2.0
// Other forms of a routing by top-k, for weft/compat: local calls, which make the tensors that they
// return.
#include "checks_py.hpp"
#include "torch_tensor.hpp"
#include "weft/routing.hpp"

namespace weft::py {
namespace {

// [count] in torch, a row of a matrix in the core.
Part vector_of(int64_t count) {
  return {1, count, {1, {count}, {1}}};
}

nb::tuple count(
    nb::handle topk_idx,
    int num_experts,
    int64_t num_ranks,
    nb::handle host_of_rank,
    int64_t num_hosts,
    uintptr_t stream
) {
  const Given idx = read_needed("topk_idx", topk_idx);
  const Given hosts = read_vector("host_of_rank", host_of_rank);
  const bool has_hosts = hosts.tensor.is_given();
  NewTensors made(idx.tensor.device);
  RoutingCounts counts;
  const auto [per_rank, per_expert] =
      made.add_both(ScalarType::kInt32, vector_of(num_ranks), vector_of(num_experts));
  counts.per_rank = per_rank;
  counts.per_expert = per_expert;
  counts.is_token_in_rank = made.add(idx.tensor.rows, num_ranks, ScalarType::kBool);
  if (has_hosts) {
    counts.per_host = made.add(1, num_hosts, ScalarType::kInt32, vector_of(num_hosts).shape);
    counts.host_of_rank = hosts.tensor;
  }
  {
    const nb::gil_scoped_release no_gil;
    count_routing(idx.tensor, num_experts, counts, stream_of(stream));
  }
  const std::vector<nb::object> out = made.take();
  return nb::make_tuple(out[0], has_hosts ? out[3] : nb::none(), out[1], out[2]);
}

// Does get_dispatch_layout of deep_ep.Buffer among ranks of one host, and checks its arguments.
nb::tuple layout(nb::handle topk_idx, int num_experts, int64_t num_ranks, uintptr_t stream) {
  check_routing(topk_idx, nb::none(), size_of(topk_idx, 0));
  check_experts(num_experts, num_ranks);
  return count(topk_idx, num_experts, num_ranks, nb::none(), 1, stream);
}

}  // namespace

nb::tuple spread_routing(
    nb::handle topk_idx, nb::handle weights, int64_t num_experts, uintptr_t stream
) {
  const Given idx = read_needed("topk_idx", topk_idx);
  const Given given = read("weights", weights);
  const bool has_weights = !weights.is_none();
  NewTensors made(idx.tensor.device);
  SpreadRouting out;
  out.map = made.add(idx.tensor.rows, num_experts, ScalarType::kBool);
  if (has_weights) {
    out.weights = made.add(idx.tensor.rows, num_experts, ScalarType::kFloat32);
  }
  {
    const nb::gil_scoped_release no_gil;
    weft::spread_routing(idx.tensor, given.tensor, out, stream_of(stream));
  }
  const std::vector<nb::object> tensors = made.take();
  return nb::make_tuple(tensors[0], has_weights ? tensors[1] : nb::none());
}

void bind_routing(nb::module_& m) {
  using nb::arg;
  m.def(
      "count_routing",
      &count,
      arg("topk_idx"),
      arg("num_experts"),
      arg("num_ranks"),
      arg("host_of_rank").none(),
      arg("num_hosts"),
      arg("stream"),
      "Local: what weft::count_routing writes: per_rank int32 [R], per_host int32 [hosts] or None "
      "without host_of_rank int64 [R], per_expert int32 [E], is_token_in_rank bool [T, R]."
  );
  m.def(
      "dispatch_layout",
      &layout,
      arg("topk_idx").none(),
      arg("num_experts"),
      arg("num_ranks"),
      arg("stream"),
      "Local: count_routing for the ranks of one host, after check_routing and check_experts."
  );
  m.def(
      "spread_routing",
      &spread_routing,
      arg("topk_idx"),
      arg("weights").none(),
      arg("num_experts"),
      arg("stream"),
      "Local: what weft::spread_routing writes: the map bool [T, E], and the weights fp32 [T, E] "
      "or None."
  );
}

}  // namespace weft::py
