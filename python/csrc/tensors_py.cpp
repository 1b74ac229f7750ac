// SPDX-License-Identifier: Apache-2.0
#include "tensors_py.hpp"

#include <algorithm>
#include <bit>
#include <vector>

#include "call/quantise.hpp"
#include "call/scale_layout.hpp"

namespace weft::py {
namespace {

ScalarType row_type(const SentGiven& sent, const Options& options) {
  switch (options.quantise) {
    case Quantise::kE4M3:
    case Quantise::kMxfp8:
      return ScalarType::kFloat8E4M3;
    case Quantise::kNvfp4:
      return ScalarType::kUint8;
    case Quantise::kE5M2:
      return ScalarType::kFloat8E5M2;
    case Quantise::kNone:
      break;
  }
  return sent.x.type.value_or(ScalarType::kUint8);
}

// Returns the type of the scales that a call makes.
ScalarType scale_type(const Options& options) {
  if (stored_format(options.quantise, options.scale_rule).scale_bytes > 1) {
    return ScalarType::kFloat32;
  }
  const bool is_e4m3 =
      options.quantise == Quantise::kNvfp4 && options.scale_rule != ScaleRule::kUe8m0;
  return is_e4m3 ? ScalarType::kFloat8E4M3 : ScalarType::kUint8;
}

}  // namespace

Written::Written(
    Calls& calls,
    const SentGiven& sent,
    const Options& options,
    const RowsShape& shape,
    nb::handle pool
)
    : made_(sent.x.tensor.device), rows_type_(sent.x_type), scales_type_(sent.scales_type) {
  const int64_t num_rows = shape.num_rows;
  const int64_t weight_cols = shape.weight_cols;
  if (options.blocks) {
    num_blocks_ = shape.num_experts;
    if (shape.layout != Layout::kExpertStrided || num_rows % num_blocks_ != 0) {
      throw Error(
          ErrorCode::kInvalidArgument,
          "blocks are asked for, which only expert_strided has (with its expert_stride)",
          calls.exchange().rank(),
          ""
      );
    }
  }
  const StoredFormat format = stored_format(options.quantise, options.scale_rule);
  const int64_t cols = sent.x.tensor.cols / format.elements_per_byte;
  add_rows(calls, row_type(sent, options), pool, num_rows, cols);
  if (sent.weights.tensor.is_given()) {
    output.weights = add(num_rows, weight_cols, ScalarType::kFloat32);
  }
  add_scales(sent, options, shape);
  if (sent.has_experts) {
    output.experts = add(num_rows, weight_cols, ScalarType::kInt64);
  }
  output.sources = sent.sources.tensor;
  output.counts = sent.counts.tensor;
  output.count_sums = sent.count_sums.tensor;
  output.scale_layout = options.scale_layout;
  if (num_blocks_ > 0) {
    add_blocks(num_rows);
  }
}

void Written::add_scales(const SentGiven& sent, const Options& options, const RowsShape& shape) {
  const int64_t num_rows = shape.num_rows;
  const bool is_given = sent.scales.tensor.is_given();
  if (!is_given && options.quantise == Quantise::kNone) {
    return;
  }
  const StoredFormat format = stored_format(options.quantise, options.scale_rule);
  const ScalarType type =
      is_given ? sent.scales.type.value_or(ScalarType::kUint8) : scale_type(options);
  const int64_t bytes =
      is_given ? sent.scales.tensor.cols : sent.x.tensor.cols / format.group * format.scale_bytes;
  const int64_t cols = bytes / scalar_bytes(type);
  const bool is_in_tiles = options.scale_layout == ScaleLayout::kInTiles;
  const int64_t words = bytes / kScaleWord;
  if (is_in_tiles) {
    add_tiles(type, shape, cols);
  } else if (options.scale_layout == ScaleLayout::kByColumn && num_blocks_ > 0 && words > 0) {
    const int64_t stride = num_rows / num_blocks_;
    const Shape by_column = {3, {num_blocks_, stride, words}, {stride * words, 1, stride}};
    const bool is_float = type == ScalarType::kFloat32;
    sizes_.push_back({num_rows, cols});
    output.scales =
        made_.add(num_rows, words, is_float ? ScalarType::kFloat32 : ScalarType::kInt32, by_column);
  } else {
    output.scales = add(num_rows, cols, type);
  }
  output.scales.cols = is_given ? bytes : cols;
  output.scales.dtype = is_given ? DType::kByte : core_type(type);
}

// Adds scales in tiles: blocks have whole tiles, even for fewer rows.
void Written::add_tiles(ScalarType type, const RowsShape& shape, int64_t cols) {
  const int64_t num_blocks = shape.num_experts;
  const int64_t num_rows = shape.num_rows;
  const int64_t stride = num_rows / num_blocks;
  const int64_t tile_rows = num_scale_rows(ScaleLayout::kInTiles, stride, stride);
  sizes_.push_back({num_rows, cols});  // it is as large as it shall be
  if (num_blocks_ == 0) {
    output.scales = made_.add(num_blocks * tile_rows, cols, type);
    return;
  }
  const Shape tiles = {3, {num_blocks, tile_rows, cols}, {tile_rows * cols, cols, 1}};
  output.scales = made_.add(num_blocks * tile_rows, cols, type, tiles);
}

// Adds counts of each expert's rows, and the rows' sources.
void Written::add_blocks(int64_t num_rows) {
  const int64_t stride = num_rows / num_blocks_;
  const Part counts = {1, num_blocks_, {1, {num_blocks_}, {1}}};
  const Part sources = {num_rows, 2, {3, {num_blocks_, stride, 2}, {2 * stride, 2, 1}}};
  has_counts_ = !output.counts.is_given();
  has_sources_ = !output.sources.is_given();
  const auto add_part = [&](const Part& part) {
    return made_.add(part.rows, part.cols, ScalarType::kInt32, part.shape);
  };
  sizes_.resize(sizes_.size() + static_cast<size_t>(has_counts_ + has_sources_), {num_rows, 1});
  if (has_counts_ && has_sources_) {
    const auto [first, second] = made_.add_both(ScalarType::kInt32, counts, sources);
    output.counts = first;
    output.sources = second;
  } else if (has_counts_) {
    output.counts = add_part(counts);
  } else if (has_sources_) {
    output.sources = add_part(sources);
  }
}

nb::tuple Written::take(int64_t num_rows) {
  for (size_t i = 0; i < sizes_.size(); ++i) {
    if (sizes_[i].rows != num_rows) {
      made_.shorten(i, num_rows, sizes_[i].cols);
    }
  }
  std::vector<nb::object> tensors = made_.take();
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
  const nb::object experts = of(output.experts);
  const nb::object counts = has_counts_ ? tensors[next++] : nb::none();
  const nb::object sources = has_sources_ ? tensors[next++] : nb::none();
  return nb::make_tuple(rows, weights, scales, experts, sources, counts);
}

Tensor Written::add(int64_t rows, int64_t cols, ScalarType type) {
  sizes_.push_back({rows, cols});
  if (num_blocks_ == 0) {
    return made_.add(rows, cols, type);
  }
  const int64_t stride = rows / num_blocks_;
  Shape shape = {3, {num_blocks_, stride, cols}, {stride * cols, cols, 1}};
  if (cols == 1) {  // as weights have
    shape = {2, {num_blocks_, stride}, {stride, 1}};
  }
  return made_.add(rows, cols, type, shape);
}

// Takes memory that peers can write, so that rows are not staged. On a GPU up to a sixteenth more:
// numbers of rows that differ from call to call find what earlier calls left, where a new segment
// takes milliseconds and all ranks.
void Written::add_rows(Calls& calls, ScalarType type, nb::handle pool, int64_t rows, int64_t cols) {
  const Device device = calls.exchange().config().device;
  if (device.kind == Device::Kind::kCuda && !pool.is_none()) {
    const auto bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(rows)));
    const int64_t step = num_blocks_ > 0 ? 1 : int64_t{1} << std::max(bits - 5, 0);
    const int64_t roomy = (rows + step - 1) / step * step;
    const PoolScope scope(calls, device.index, pool);
    output.rows = add(roomy, cols, type);
    output.rows.rows = rows;
    return;
  }
  const bool is_float = type != ScalarType::kInt32 && type != ScalarType::kInt64;
  if (device.kind == Device::Kind::kCpu && is_float) {  // integers will be refused
    PeerMemory memory = allocate(calls, rows, cols * scalar_bytes(type));
    nb::object tensor = tensor_of_bytes(memory.array, rows, cols, type);
    if (num_blocks_ > 0) {
      tensor = tensor.attr("view")(num_blocks_, rows / num_blocks_, cols);
    }
    made_.add(std::move(tensor));
    sizes_.push_back({rows, cols});
    output.rows = memory.tensor;
    output.rows.cols = cols;
    output.rows.dtype = core_type(type);
    return;
  }
  output.rows = add(rows, cols, type);
}

}  // namespace weft::py
