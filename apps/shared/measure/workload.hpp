// SPDX-License-Identifier: Apache-2.0
// Made-up inputs for `weft check` and `weft bench`: the same on every rank for the same seed, so
// that each rank can know what the others hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/build.hpp"
#include "plan/random_routing.hpp"
#include "weft/routing.hpp"
#include "weft/tensor.hpp"

namespace weft::program {

// A matrix with its memory. Without columns it stands for "not given".
class Matrix {
 public:
  Matrix() = default;
  Matrix(DType dtype, int64_t rows, int64_t cols, std::byte fill = std::byte{0});
  [[nodiscard]] Tensor view();
  [[nodiscard]] ConstTensor view() const;
  [[nodiscard]] int64_t rows() const { return rows_; }
  [[nodiscard]] int64_t cols() const { return cols_; }

 private:
  DType dtype_ = DType::kFloat32;
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  std::vector<std::byte> bytes_;
};

struct Workload {
  std::vector<int64_t> num_tokens;  // by rank
  int64_t hidden = 0;
  DType dtype = DType::kBFloat16;
  RandomRouting routing = {};  // its num_tokens is not used
  bool from_map = false;
  int64_t scale_cols = 0;

  [[nodiscard]] int num_ranks() const { return static_cast<int>(num_tokens.size()); }
};

// Tensors that one rank brings to plan and dispatch.
struct RankInput {
  Matrix topk_idx;  // int64, or
  Matrix map;
  Matrix weights;  // fp32
  Matrix x;
  Matrix scales;  // fp32, if the workload has any

  [[nodiscard]] Routing routing() const;
};

// `version` tells apart several routings and rows of the same workload.
[[nodiscard]] RankInput make_input(const Workload& workload, int rank, uint64_t version = 0);
[[nodiscard]] Matrix make_rows(DType dtype, int64_t rows, int64_t cols, uint64_t seed);

// Every rank's routing, ready for the reference plans.
[[nodiscard]] std::vector<RouteTable> route_tables(
    const Workload& workload, const std::vector<RankInput>& inputs
);

// Rounded to nearest even; a byte holds whole numbers up to 255.
void store_element(DType dtype, float value, std::byte* place);

// A seed that follows from two numbers and from nothing else.
[[nodiscard]] uint64_t mix_seed(uint64_t a, uint64_t b);

}  // namespace weft::program
