// SPDX-License-Identifier: Apache-2.0
// What dispatch and combine take and give. Previous: plan.hpp; next: exchange.hpp.
#pragma once

#include <cstdint>

#include "weft/tensor.hpp"

namespace weft {

// The collective operations. kPlanAndDispatch is the one call that makes both.
enum class Op : uint32_t { kNone, kPlan, kDispatch, kCombine, kPlanAndDispatch };

// Options of one call. All but `number` are for GPUs, a CPU exchange takes only their default.
struct CallOptions {
  // cudaStream_t. Null: one of the exchange's own, and the call returns when it is done, as on a
  // CPU.
  void* stream = nullptr;
  int num_sms = 0;  // of this call; 0: as configured
  // Of all ranks or none. dispatch, combine: copy engines carry the rows between GPUs, and
  // multiprocessors only pack them before and store or add them after, so that little is taken from
  // computation beside it but memory bandwidth. Needs ExchangeConfig::copy_engines, whose room is
  // for rows of 16 bits an element with 256 bytes of scales; what does not fit, a captured call,
  // and combine in fp32 or by source weights, go as usual. The result is the same; where the call
  // fails, rows of this rank's own tokens may have been written.
  bool copy_engines = false;
  // The caller's own count of its collective calls, up to 2^28 - 1, after which it begins again.
  // Ranks whose calls have come out of step, because one of them left a call out, then throw and
  // do not exchange rows of different calls. 0: not counted, on all ranks alike. A captured call
  // keeps its number in every replay.
  int64_t number = 0;
};

// What is stored instead of the bf16 rows that are given: FP8 rows with one fp32 scale for every
// kQuantiseGroup elements (the largest magnitude divided by the largest FP8 number, 1 for a group
// of zeros). `out.rows` is then kByte [num_rows, hidden], `out.scales` fp32 [num_rows, hidden /
// kQuantiseGroup], and no input scales are given.
enum class Quantise : uint8_t { kNone, kE4M3, kE5M2 };
inline constexpr int kQuantiseGroup = 128;

struct DispatchInput {
  ConstTensor
      x;  // [num_tokens, hidden] of any float dtype, or kByte [num_tokens, bytes] (bytes % 16 == 0)
  ConstTensor weights = {};  // fp32, shaped like Routing::weights; travels untouched, NaN included
  ConstTensor scales = {};   // [num_tokens, any] of any dtype; travels with x as bytes
  Quantise quantise = Quantise::kNone;
};

struct DispatchOutput {
  Tensor rows;  // [plan.num_rows(), cols of x], dtype of x; padding rows are zeroed, budget slack
                // is left as it was
  Tensor weights = {};  // fp32 [plan.num_rows(), plan.row_weight_cols()]; zero where no route
  Tensor scales = {};   // [plan.num_rows(), cols of scales]
};

enum class CombineScale : uint8_t {
  kNone,           // plain sum
  kPlanWeights,    // each row times its route's weight in Routing::weights
  kSourceWeights,  // each row times CombineInput::source_weights
};

struct CombineInput {
  ConstTensor rows;          // [plan.num_rows(), hidden] bf16, fp16 or fp32
  ConstTensor weights = {};  // fp32 gradients, shaped like DispatchOutput::weights
  ConstTensor source_weights =
      {};  // fp32, shaped like Routing::weights; kSourceWeights only, not with kRankMajor
  CombineScale scale = CombineScale::kNone;
};

struct CombineOutput {
  Tensor x;             // [num_tokens, hidden], dtype of rows; a token without routes gets zeros
  Tensor weights = {};  // fp32, shaped like Routing::weights; zero where no route
};

}  // namespace weft
