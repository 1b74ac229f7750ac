// SPDX-License-Identifier: Apache-2.0
// The state of a training run in one file, the same whatever the number of ranks.
//
//   4096 B   "weft-moe-checkpoint 1 <checksum of the JSON>", newline, JSON (CheckpointHeader),
//            zeros
//   3 parts  values, then AdamW's means, then its squares: fp32 for each element of the model
//
// Each rank writes the elements it owns to the file's next version beside it
// (core/atomic_file.hpp), which takes the name when all of it is on the disk. So a crash leaves the
// old checkpoint whole.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "train/config.hpp"
#include "weft/group.hpp"

namespace weft::moe {

inline constexpr size_t kHeaderBytes = 4096;

struct CheckpointHeader {
  ModelConfig model;
  int64_t global_batch = 0;
  uint64_t seed = 0;
  DType dtype = DType::kFloat32;
  uint64_t text_bytes = 0;
  uint64_t text_checksum = 0;
  uint64_t num_elements = 0;  // of the model
  int64_t steps_done = 0;
};

// Elements that one rank owns, each with its optimizer state.
struct StatePiece {
  uint64_t model_begin = 0;               // number of the first in the model
  std::array<std::span<float>, 3> parts;  // values, means, squares
};

// Depends on the elements and their numbers, not on how they are cut: pieces add up.
[[nodiscard]] uint64_t checksum(std::span<const float> elements, uint64_t first);
[[nodiscard]] uint64_t checksum(std::span<const std::byte> bytes);

// Both are collective, throw Error (kFile) on every rank if one fails, and need a path that means
// the same file on every rank. The pieces of all ranks together are the model, once.
void write_checkpoint(
    const Group& group,
    const std::string& path,
    const CheckpointHeader& header,
    std::span<const StatePiece> pieces
);
// How many steps the checkpoint at `path` holds; nothing where no file is, or an empty one. Throws
// Error (kFile) for a file that is no checkpoint.
[[nodiscard]] std::optional<int64_t> checkpoint_steps(const std::string& path);
// Returns the file's steps_done. All other fields must be as in `expected`. Nothing is changed
// unless all ranks have read their part and the checksum is right.
[[nodiscard]] int64_t read_checkpoint(
    const Group& group,
    const std::string& path,
    const CheckpointHeader& expected,
    std::span<const StatePiece> pieces
);

}  // namespace weft::moe
