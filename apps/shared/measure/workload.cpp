// SPDX-License-Identifier: Apache-2.0
#include "measure/workload.hpp"

#include <cstring>
#include <limits>

#include "core/check.hpp"
#include "core/half.hpp"
#include "plan/random_routing.hpp"

namespace weft::program {
namespace {

Matrix topk_matrix(const RouteTable& routes) {
  Matrix idx(DType::kInt32, routes.num_tokens, routes.topk);
  std::memcpy(idx.view().data, routes.expert.data(), routes.expert.size() * sizeof(int32_t));
  return idx;
}

Matrix map_matrix(const RouteTable& routes, int num_experts) {
  Matrix map(DType::kBool, routes.num_tokens, num_experts);
  for (size_t i = 0; i < routes.expert.size(); ++i) {
    const auto token = static_cast<int64_t>(i) / routes.topk;
    if (routes.expert[i] >= 0) {
      map.view().data[token * num_experts + routes.expert[i]] = std::byte{1};
    }
  }
  return map;
}

}  // namespace

void store_element(DType dtype, float value, std::byte* place) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(place, &value, sizeof value);
      return;
    case DType::kByte:
      *place = static_cast<std::byte>(value);
      return;
    default:
      const auto to_half = dtype == DType::kBFloat16 ? float_to_bf16 : float_to_fp16;
      const uint16_t half = to_half(value);
      std::memcpy(place, &half, sizeof half);
  }
}

Matrix::Matrix(DType dtype, int64_t rows, int64_t cols, std::byte fill)
    : dtype_(dtype),
      rows_(rows),
      cols_(cols),
      bytes_(static_cast<size_t>(rows * cols * dtype_bytes(dtype)), fill) {}

Tensor Matrix::view() {
  return {bytes_.data(), dtype_, rows_, cols_};
}
ConstTensor Matrix::view() const {
  return {bytes_.data(), dtype_, rows_, cols_};
}

Routing RankInput::routing() const {
  return {.topk_idx = topk_idx.view(), .map = map.view(), .weights = weights.view()};
}

Matrix make_rows(DType dtype, int64_t rows, int64_t cols, uint64_t seed) {
  Matrix matrix(dtype, rows, cols);
  RandomSource random(seed);
  for (int64_t i = 0; i < rows * cols; ++i) {
    const float value =
        dtype == DType::kByte ? static_cast<float>(random.below(256)) : random.uniform() * 4 - 2;
    store_element(dtype, value, matrix.view().data + i * dtype_bytes(dtype));
  }
  return matrix;
}

RankInput make_input(const Workload& workload, int rank, uint64_t version) {
  RandomRouting spec = workload.routing;
  spec.num_tokens = workload.num_tokens[static_cast<size_t>(rank)];
  spec.with_weights = false;
  spec.seed = mix_seed(spec.seed, version);
  const RouteTable routes = random_routing(spec, rank);

  const uint64_t seed = mix_seed(spec.seed, static_cast<uint64_t>(rank));
  RankInput input;
  (workload.from_map ? input.map : input.topk_idx) =
      workload.from_map ? map_matrix(routes, spec.num_experts) : topk_matrix(routes);
  const int weight_cols = workload.from_map ? spec.num_experts : spec.topk;
  input.weights = make_rows(DType::kFloat32, spec.num_tokens, weight_cols, mix_seed(seed, 1));
  input.x = make_rows(workload.dtype, spec.num_tokens, workload.hidden, mix_seed(seed, 2));
  if (workload.scale_cols > 0) {
    input.scales =
        make_rows(DType::kFloat32, spec.num_tokens, workload.scale_cols, mix_seed(seed, 3));
  }
  return input;
}

std::vector<RouteTable> route_tables(
    const Workload& workload, const std::vector<RankInput>& inputs
) {
  std::vector<RouteTable> tables;
  for (const RankInput& input : inputs) {
    tables.push_back(read_routing(
        input.routing(),
        workload.routing.num_experts,
        workload.routing.topk,
        std::numeric_limits<int32_t>::max(),
        {}
    ));
  }
  return tables;
}

uint64_t mix_seed(uint64_t a, uint64_t b) {
  return RandomSource(a ^ RandomSource(b).next()).next();
}

}  // namespace weft::program
