// SPDX-License-Identifier: Apache-2.0
// Work of a GPU for inter-node tokens: it packs rows into messages, adds up what other domains send
// back, and writes facts about rows. Launches allocate nothing; each throws Error (kCuda).
// message_rows.cu has the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/layout/control.hpp"
#include "hosts/message_format.hpp"
#include "weft/calls.hpp"
#include "weft/tensor.hpp"

namespace weft {

// Blocks that pack. The number is a guess; few blocks suffice to fill the link to the host.
inline constexpr int kPackBlocks = 16;

// Packs rows `index` [count] of up to three arrays into messages of the format.
struct PackLaunch {
  MessageFormat format;
  const std::byte* rows = nullptr;    // of format.row_bytes
  const float* weights = nullptr;     // [., weight_cols]; null: none
  const std::byte* scales = nullptr;  // of format.scale_bytes
  const int32_t* index = nullptr;     // null: 0, 1, ...
  // [., topk] the column of each weight, -1 = none (0 is packed); null: column k.
  const int32_t* weight_column = nullptr;
  int32_t topk = 0;
  int32_t weight_cols = 0;
  int64_t count = 0;
  std::byte* messages = nullptr;  // chunk c at c * format.stride()
  uint32_t* done = nullptr;       // [num chunks] gets `number` when a chunk is there; null: unused
  uint32_t number = 0;
  // State of the kernels that made the rows; `done` gets nothing unless it is kRunning. Null: no
  // kernels did.
  const StopState* stopped = nullptr;
};

void launch_pack(const PackLaunch& call, cudaStream_t stream);

// Sets out[t] to the sum of parts[row[i]] for i in begin[t] .. begin[t + 1]: in fp32, the first
// term first, rounded once; zero without terms. The parts of bf16 rows may be coded.
struct SumPartsLaunch {
  DType dtype = DType::kBFloat16;
  Wire wire = Wire::kNone;
  const std::byte* parts = nullptr;
  const int32_t* begin = nullptr;  // [num_tokens + 1]
  const int32_t* row = nullptr;
  std::byte* out = nullptr;
  int64_t row_bytes = 0;
  int64_t part_bytes = 0;
  int64_t num_tokens = 0;
  // Weights: out_weights[t, column of k] = part_weights[weight_row[t, k], k], zero where that is
  // -1.
  const float* part_weights = nullptr;  // [., topk]; null: none
  const int32_t* weight_row = nullptr;  // [num_tokens, topk]
  const int32_t* weight_column = nullptr;
  float* out_weights = nullptr;  // [num_tokens, weight_cols]
  int32_t topk = 0;
  int32_t weight_cols = 0;
};

void launch_sum_parts(const SumPartsLaunch& call, cudaStream_t stream);

// Writes facts about a dispatch's rows, from lists.
struct TellRowsLaunch {
  int64_t count = 0;              // rows with a token
  const int32_t* list = nullptr;  // [count, 3] row, source rank, token there
  int32_t* sources = nullptr;     // [., 2] gets source rank and token; null: not wanted
  // rank_major, whose rows with a token come first:
  const int32_t* row_experts = nullptr;  // [count, topk]
  int64_t* experts = nullptr;  // [num_rows, topk], gets -1 in the other rows; null: not wanted
  int64_t num_rows = 0;
  int32_t topk = 0;
};

void launch_tell_rows(const TellRowsLaunch& call, cudaStream_t stream);

// Makes the kernels behind it in the stream end at once, and tell their peers so, if a transfer of
// what they are about to read has failed.
struct StopLaunch {
  const uint32_t* has_failed = nullptr;  // memory of the host; 0: all has come
  LocalState* local = nullptr;           // of these kernels
};

void launch_stop(const StopLaunch& call, cudaStream_t stream);

// Prepares the kernels; once per device.
void prepare_message_rows();

}  // namespace weft
