// SPDX-License-Identifier: Apache-2.0
#include "lab/lanes/numeric_model.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <utility>

namespace weft::overlap::test {
namespace {

constexpr size_t kWidth = 24;
constexpr size_t kNodesPerLayer = 4;

// Irregular numbers, so that another order of adding gives other bits.
float number(size_t seed) {
  return static_cast<float>(std::sin(static_cast<double>(seed) * 12.9898));
}

Row plus(const Row& a, const Row& b) {
  Row sum(a.size());
  std::transform(a.begin(), a.end(), b.begin(), sum.begin(), std::plus<>());
  return sum;
}

Row rotated(Row row, size_t by) {
  std::rotate(row.begin(), row.begin() + static_cast<std::ptrdiff_t>(by), row.end());
  return row;
}

// A layer is f(W x) with f(h) = h / (1 + |h|).
Row forward_product(const Row& weights, const Row& x) {
  Row h(kWidth, 0.0F);
  for (size_t i = 0; i < kWidth; ++i) {
    for (size_t j = 0; j < kWidth; ++j) {
      h[i] += weights[i * kWidth + j] * x[j];
    }
  }
  return h;
}

Row backward_product(const Row& weights, const Row& gradient) {
  Row x(kWidth, 0.0F);
  for (size_t i = 0; i < kWidth; ++i) {
    for (size_t j = 0; j < kWidth; ++j) {
      x[j] += weights[i * kWidth + j] * gradient[i];
    }
  }
  return x;
}

// Behind the last step of a node nothing of it is there any more.
void drop_behind(Node& node, std::vector<Cell*> cells) {
  Work& last = node.weight_gradient ? node.weight_gradient : node.backward;
  last = [inner = last, cells = std::move(cells)](const LaneContext& context) {
    inner(context);
    std::ranges::for_each(cells, &Cell::drop);
  };
}

}  // namespace

void Cell::put(Row row) {
  if (row_) {
    throw std::logic_error("a cell is written twice");
  }
  row_ = std::move(row);
}

const Row& Cell::get() const {
  if (!row_) {
    throw std::logic_error("an empty cell is read");
  }
  return *row_;
}

NumericModel::NumericModel(const NumericOptions& options) : options_(options) {
  const auto num_layers = static_cast<size_t>(options.num_layers);
  for (size_t idx = 0; idx < 2 * num_layers; ++idx) {
    Row value(kWidth * kWidth);
    for (size_t i = 0; i < value.size(); ++i) {
      value[i] = number(idx * value.size() + i + 1) / 4;
    }
    weights_.push_back({std::move(value), Row(kWidth * kWidth, 0.0F)});
  }
  losses_.resize(static_cast<size_t>(options.num_micro_batches));
  for (size_t idx = 0; idx < losses_.size(); ++idx) {
    MicroBatch& batch = batches_.emplace_back();
    batch.cells.resize(kNodesPerLayer * num_layers + 2);
    batch.residual.resize(num_layers);
    batch.residual_gradient.resize(num_layers);
  }
}

Node NumericModel::linear(MicroBatch& batch, size_t place, size_t weights) {
  Cells& cells = batch.cells[place];
  Cell& output = batch.cells[place + 1].input;
  Cell& input_gradient = batch.cells[place - 1].gradient;
  Weights& own = weights_[weights];
  Node node;
  node.forward = [&](const LaneContext&) {
    Row h = forward_product(own.value, cells.input.get());
    Row y = h;
    for (float& v : y) {
      v /= 1 + std::abs(v);
    }
    cells.saved.put(std::move(h));
    output.put(std::move(y));
  };
  const auto gradient_of_h = [&cells] {
    Row gradient = cells.gradient.get();
    for (size_t i = 0; i < kWidth; ++i) {
      const float scale = 1 + std::abs(cells.saved.get()[i]);
      gradient[i] /= scale * scale;
    }
    return gradient;
  };
  const Work add_weight_gradient = [&, gradient_of_h](const LaneContext&) {
    const Row gradient = gradient_of_h();
    const Row& x = cells.input.get();
    for (size_t i = 0; i < kWidth * kWidth; ++i) {
      own.gradient[i] += gradient[i / kWidth] * x[i % kWidth];
    }
  };
  const bool defer = options_.defer_weight_gradients;
  node.backward = [&, defer, gradient_of_h, add_weight_gradient](const LaneContext& context) {
    input_gradient.put(backward_product(own.value, gradient_of_h()));
    if (!defer) {
      add_weight_gradient(context);
    }
  };
  if (defer) {
    node.weight_gradient = add_weight_gradient;
  }
  drop_behind(node, {&cells.input, &cells.saved, &cells.gradient});
  return node;
}

// The exchange: values change their places.
Node NumericModel::rotation(MicroBatch& batch, size_t place, size_t by) {
  Cells& cells = batch.cells[place];
  Cell& output = batch.cells[place + 1].input;
  Cell& input_gradient = batch.cells[place - 1].gradient;
  Node node;
  node.forward = [&, by](const LaneContext&) { output.put(rotated(cells.input.get(), by)); };
  node.backward = [&, by](const LaneContext&) {
    input_gradient.put(rotated(cells.gradient.get(), kWidth - by));
  };
  drop_behind(node, {&cells.input, &cells.gradient});
  return node;
}

// From pre_dispatch past the experts to moe_combine, as the residual goes.
void NumericModel::add_residual(ChunkNodes& nodes, MicroBatch& batch, size_t layer_idx) {
  const auto layer = static_cast<int>(layer_idx);
  Node& pre_dispatch = nodes.at(NodeKind::kPreDispatch, layer);
  Node& moe_combine = nodes.at(NodeKind::kMoeCombine, layer);
  const size_t first = 1 + kNodesPerLayer * layer_idx;
  Cell& residual = batch.residual[layer_idx];
  Cell& residual_gradient = batch.residual_gradient[layer_idx];
  Cell& layer_input = batch.cells[first].input;
  Cell& layer_output = batch.cells[first + kNodesPerLayer].input;
  Cell& output_gradient = batch.cells[first + kNodesPerLayer - 1].gradient;
  Cell& input_gradient = batch.cells[first - 1].gradient;
  const auto add = [](Cell& to, Cell& from) {
    Row sum = plus(to.get(), from.get());
    to.drop();
    from.drop();
    to.put(std::move(sum));
  };
  pre_dispatch.forward = [&, inner = pre_dispatch.forward](const LaneContext& context) {
    inner(context);
    residual.put(layer_input.get());
  };
  moe_combine.forward = [&, add, inner = moe_combine.forward](const LaneContext& context) {
    inner(context);
    add(layer_output, residual);
  };
  moe_combine.backward = [&, inner = moe_combine.backward](const LaneContext& context) {
    residual_gradient.put(output_gradient.get());
    inner(context);
  };
  pre_dispatch.backward = [&, add, inner = pre_dispatch.backward](const LaneContext& context) {
    inner(context);
    add(input_gradient, residual_gradient);
  };
}

Node NumericModel::pre_process(MicroBatch& batch, int micro_batch) {
  Node node;
  node.forward = [&, micro_batch](const LaneContext&) {
    Row row(kWidth);
    for (size_t i = 0; i < kWidth; ++i) {
      row[i] = number(1000 + static_cast<size_t>(micro_batch) * kWidth + i);
    }
    batch.cells[1].input.put(std::move(row));
  };
  node.backward = [&](const LaneContext&) { static_cast<void>(batch.cells[0].gradient.get()); };
  drop_behind(node, {&batch.cells[0].gradient});
  return node;
}

Node NumericModel::post_process(MicroBatch& batch, int micro_batch) {
  Cells& last = batch.cells.back();
  Cell& input_gradient = batch.cells[batch.cells.size() - 2].gradient;
  float& loss = losses_[static_cast<size_t>(micro_batch)];
  Node node;
  node.forward = [&](const LaneContext&) {
    for (const float v : last.input.get()) {
      loss += v * v;
    }
    batch.output.put({loss});
  };
  node.backward = [&](const LaneContext&) {
    Row gradient = last.input.get();
    for (float& v : gradient) {
      v *= 2;
    }
    input_gradient.put(std::move(gradient));
  };
  drop_behind(node, {&last.input, &batch.output});
  return node;
}

ChunkNodes NumericModel::nodes(int micro_batch) {
  MicroBatch& batch = batches_[static_cast<size_t>(micro_batch)];
  ChunkNodes nodes = {options_.num_layers};
  nodes.at(NodeKind::kPreProcess) = pre_process(batch, micro_batch);
  for (size_t idx = 0; idx < static_cast<size_t>(options_.num_layers); ++idx) {
    const size_t first = 1 + kNodesPerLayer * idx;
    const auto layer = static_cast<int>(idx);
    nodes.at(NodeKind::kPreDispatch, layer) = linear(batch, first, 2 * idx);
    nodes.at(NodeKind::kMoeDispatch, layer) = rotation(batch, first + 1, 5 + idx);
    nodes.at(NodeKind::kMlp, layer) = linear(batch, first + 2, 2 * idx + 1);
    nodes.at(NodeKind::kMoeCombine, layer) = rotation(batch, first + 3, 7 + idx);
    add_residual(nodes, batch, idx);
  }
  nodes.at(NodeKind::kPostProcess) = post_process(batch, micro_batch);
  return nodes;
}

Row NumericModel::gradients() const {
  Row all;
  for (const Weights& weights : weights_) {
    all.insert(all.end(), weights.gradient.begin(), weights.gradient.end());
  }
  return all;
}

int NumericModel::num_live_cells() const {
  int num = 0;
  const auto count = [&](const Cell& cell) { num += cell.is_empty() ? 0 : 1; };
  for (const MicroBatch& batch : batches_) {
    for (const Cells& cells : batch.cells) {
      count(cells.input);
      count(cells.saved);
      count(cells.gradient);
    }
    std::for_each(batch.residual.begin(), batch.residual.end(), count);
    std::for_each(batch.residual_gradient.begin(), batch.residual_gradient.end(), count);
    count(batch.output);
  }
  return num;
}

}  // namespace weft::overlap::test
