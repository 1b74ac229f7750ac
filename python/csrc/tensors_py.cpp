// SPDX-License-Identifier: Apache-2.0
#include "tensors_py.hpp"

#include <algorithm>
#include <bit>
#include <vector>

namespace weft::py {
namespace {

ScalarType row_type(const SentGiven& sent, const Options& options) {
  switch (options.quantise) {
    case Quantise::kE4M3:
      return ScalarType::kFloat8E4M3;
    case Quantise::kE5M2:
      return ScalarType::kFloat8E5M2;
    case Quantise::kNone:
      break;
  }
  return sent.x.type.value_or(ScalarType::kUint8);
}

}  // namespace

Written::Written(
    Calls& calls,
    const SentGiven& sent,
    const Options& options,
    nb::handle pool,
    int64_t num_rows,
    int64_t weight_cols
)
    : made_(sent.x.tensor.device), rows_type_(sent.x_type), scales_type_(sent.scales_type) {
  const int64_t cols = sent.x.tensor.cols;
  add_rows(calls, row_type(sent, options), pool, num_rows, cols);
  if (sent.weights.tensor.is_given()) {
    output.weights = add(num_rows, weight_cols, ScalarType::kFloat32);
  }
  if (sent.scales.tensor.is_given()) {
    const ScalarType type = sent.scales.type.value_or(ScalarType::kUint8);
    output.scales = add(num_rows, sent.scales.tensor.cols / scalar_bytes(type), type);
    output.scales.cols = sent.scales.tensor.cols;
    output.scales.dtype = DType::kByte;
  } else if (options.quantise != Quantise::kNone) {
    const bool is_byte = options.scale_rule == ScaleRule::kUe8m0;
    const ScalarType type = is_byte ? ScalarType::kUint8 : ScalarType::kFloat32;
    output.scales = add(num_rows, cols / kQuantiseGroup, type);
  }
  if (sent.has_experts) {
    output.experts = add(num_rows, weight_cols, ScalarType::kInt64);
  }
  output.sources = sent.sources.tensor;
  output.counts = sent.counts.tensor;
  output.count_sums = sent.count_sums.tensor;
  output.scales_by_column = options.scales_by_column;
}

nb::tuple Written::take(int64_t num_rows) {
  std::vector<nb::object> tensors = made_.take();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (rows_[i] != num_rows) {
      tensors[i].attr("resize_")(num_rows, cols_[i]);
    }
  }
  size_t next = 0;
  const auto of = [&](const Tensor& tensor) {
    return tensor.is_given() && next < tensors.size() ? tensors[next++] : nb::none();
  };
  const auto as = [](nb::object tensor, const nb::object& type) {
    return type.is_valid() ? nb::object(tensor.attr("view")(type)) : tensor;
  };
  const nb::object rows = as(of(output.rows), rows_type_);
  const nb::object weights = of(output.weights);
  const nb::object scales = as(of(output.scales), scales_type_);
  return nb::make_tuple(rows, weights, scales, of(output.experts));
}

Tensor Written::add(int64_t rows, int64_t cols, ScalarType type) {
  rows_.push_back(rows);
  cols_.push_back(cols);
  return made_.add(rows, cols, type);
}

// In memory that peers can write, so that rows are not staged. On a GPU up to a sixteenth more:
// numbers of rows that differ from call to call find what earlier calls left, where a new
// segment takes milliseconds and all ranks.
void Written::add_rows(Calls& calls, ScalarType type, nb::handle pool, int64_t rows, int64_t cols) {
  const Device device = calls.exchange().config().device;
  if (device.kind == Device::Kind::kCuda && !pool.is_none()) {
    const auto bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(rows)));
    const int64_t step = int64_t{1} << std::max(bits - 5, 0);
    const int64_t roomy = (rows + step - 1) / step * step;
    const PoolScope scope(calls, device.index, pool);
    output.rows = add(roomy, cols, type);
    output.rows.rows = rows;
    return;
  }
  const bool is_float = type != ScalarType::kInt32 && type != ScalarType::kInt64;
  if (device.kind == Device::Kind::kCpu && is_float) {  // integers will be refused
    PeerMemory memory = allocate(calls, rows, cols * scalar_bytes(type));
    made_.add(tensor_of_bytes(memory.array, rows, cols, type));
    rows_.push_back(rows);
    cols_.push_back(cols);
    output.rows = memory.tensor;
    output.rows.cols = cols;
    output.rows.dtype = core_type(type);
    return;
  }
  output.rows = add(rows, cols, type);
}

}  // namespace weft::py
