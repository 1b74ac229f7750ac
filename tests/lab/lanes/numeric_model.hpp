// SPDX-License-Identifier: Apache-2.0
// A small model whose every value lives in a cell that can be empty: reading one that was freed, or
// is not there yet, throws.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "train/lanes/schedule.hpp"

namespace weft::overlap::test {

using Row = std::vector<float>;

class Cell {
 public:
  void put(Row row);
  [[nodiscard]] const Row& get() const;
  void drop() { row_.reset(); }
  [[nodiscard]] bool is_empty() const { return !row_; }

 private:
  std::optional<Row> row_;
};

struct NumericOptions {
  int num_layers = 2;
  int num_micro_batches = 4;
  bool defer_weight_gradients = false;
};

// Callbacks refer to the model; it outlives its schedules. One model is one run.
class NumericModel {
 public:
  explicit NumericModel(const NumericOptions& options);

  [[nodiscard]] ChunkNodes nodes(int micro_batch);
  // Losses by micro-batch.
  [[nodiscard]] const Row& losses() const { return losses_; }
  // Returns the gradients of all weights, summed over the micro-batches.
  [[nodiscard]] Row gradients() const;
  [[nodiscard]] int num_live_cells() const;

 private:
  struct Weights {
    Row value;
    Row gradient;
  };
  // Cells of one node.
  struct Cells {
    Cell input;
    Cell saved;
    Cell gradient;  // of the output
  };
  struct MicroBatch {
    std::deque<Cells> cells;    // pre_process, the layers', post_process
    std::deque<Cell> residual;  // by layer
    std::deque<Cell> residual_gradient;
    Cell output;
  };

  [[nodiscard]] Node linear(MicroBatch& batch, size_t place, size_t weights);
  [[nodiscard]] Node rotation(MicroBatch& batch, size_t place, size_t by);
  void add_residual(ChunkNodes& nodes, MicroBatch& batch, size_t layer_idx);
  [[nodiscard]] Node pre_process(MicroBatch& batch, int micro_batch);
  [[nodiscard]] Node post_process(MicroBatch& batch, int micro_batch);

  NumericOptions options_;
  std::vector<Weights> weights_;  // two for each layer
  std::deque<MicroBatch> batches_;
  Row losses_;
};

}  // namespace weft::overlap::test
