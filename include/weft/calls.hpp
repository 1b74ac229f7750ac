// SPDX-License-Identifier: Apache-2.0
// Inputs and outputs of dispatch and combine. Previous: plan.hpp; next: exchange.hpp.
#pragma once

#include <cstdint>

#include "weft/tensor.hpp"

namespace weft {

// The collective operations. kPlanAndDispatch is the one call that makes both.
enum class Op : uint32_t { kNone, kPlan, kDispatch, kCombine, kPlanAndDispatch };

// Options of one call. All but `number` are for GPUs, a CPU exchange takes only their default.
struct CallOptions {
  // cudaStream_t. Null: the call takes the exchange's own and returns when it is done, as on a CPU.
  void* stream = nullptr;
  int num_sms = 0;  // of this call; 0: as configured
  // True if copy engines carry the rows of a dispatch or combine between GPUs; must be the same on
  // every rank. Multiprocessors then only pack rows before and store or add them after, so that
  // computation beside the call loses little but memory bandwidth. Needs
  // ExchangeConfig::copy_engines, whose room is for rows of 16 bits an element with 512 bytes of
  // scales. Multiprocessors carry all rows, as if this were false, where rows do not fit, where the
  // call is captured, and where combine is in fp32, by source weights or coded (Wire). The result
  // is the same; where the call fails, rows of this rank's own tokens may have been written.
  bool copy_engines = false;
  // True if the call only sends, without a wait for any peer, and Exchange::receive() does the
  // rest; GPUs of one domain only. Applies to a call without replicas that plans and dispatches in
  // one launch (Exchange::dispatch), where each rank may choose for itself, and to a combine by
  // source weights of a routing by topk_idx, where it must be the same on every rank, if
  // ExchangeConfig::max_tokens and max_topk leave room for a row of every route of a rank. Any
  // other call receives at once.
  bool receives_later = false;
  // The caller's own count of its collective calls, up to 2^28 - 1, after which it begins again.
  // Ranks whose calls are out of step, as one rank left a call out, throw instead of exchanging
  // rows of different calls. 0: not counted, on all ranks alike. A captured call keeps its number
  // in every replay.
  int64_t number = 0;
};

// Format that is stored instead of the bf16 rows that are given: small numbers, and a scale for
// each group of them. `out.rows` is then kByte [num_rows, bytes], `out.scales` [num_rows, groups],
// and no input scales are given.
//
// kE4M3, kE5M2: FP8 rows [num_rows, hidden] with one scale for every kQuantiseGroup elements, fp32
// or with ScaleRule::kUe8m0 kByte.
// kMxfp8: E4M3 rows [num_rows, hidden] with a kByte scale for every 32 elements: the exponent + 127
// of the least power of two, from 2^-127 to 2^127, that divides the largest magnitude to at most
// 448; 0 for a group of zeros, 254 where there is an infinity.
// kNvfp4: E2M1 rows [num_rows, hidden / 2], two elements in a byte and the first in its low half,
// with a kByte scale for every 16 elements: DispatchInput::global_scale times a sixth of the
// largest magnitude, as E4M3, or with ScaleRule::kUe8m0 rounded up to a power of two and stored as
// its exponent + 127. An element is about number * scale / global_scale. A group whose scale
// is stored as zero becomes zeros. The last two make the scale of a group that holds a NaN a NaN.
enum class Quantise : uint8_t { kNone, kE4M3, kE5M2, kMxfp8, kNvfp4 };
inline constexpr int kQuantiseGroup = 128;

// How the scale of a group of FP8 is made; kNvfp4 has kExact and kUe8m0, kMxfp8 has kExact only. An
// element is multiplied by the largest FP8 number divided by the largest magnitude (by one over the
// scale, if that is a power of two), rounded to fp32 both times, and then to FP8.
enum class ScaleRule : uint8_t {
  kExact,       // its largest magnitude, at least 2^-110, times one over the largest FP8 number,
                // rounded to fp32 both times; 1 for a group of zeros
  kClamped,     // the same, of a largest magnitude of at least 1e-4
  kPowerOfTwo,  // kClamped's, rounded up to a power of two
  kUe8m0,       // kPowerOfTwo's, as its exponent + 127 in a byte
};

struct DispatchInput {
  ConstTensor
      x;  // [num_tokens, hidden] of any float dtype, or kByte [num_tokens, bytes] (bytes % 16 == 0)
  ConstTensor weights = {};  // fp32, shaped like Routing::weights; travels untouched, NaN included
  ConstTensor scales = {};   // [num_tokens, any] of any dtype; travels with x as bytes
  Quantise quantise = Quantise::kNone;
  ScaleRule scale_rule = ScaleRule::kExact;  // with `quantise`
  // fp32 [1, 1], with kNvfp4 only; not given: 1. Usually 448 * 6 / the largest magnitude. Each rank
  // has its own, but between domains of GPUs it is the same on all ranks. A value not above 0, or
  // not finite, is refused; on GPUs all scales are NaNs then, and the rank's next call is refused.
  ConstTensor global_scale = {};
};

// How the scales of rows lie. The last two are for kExpertStrided, whose blocks have `stride` rows
// each, and for scales of a multiple of four bytes a row, which are words of four bytes here.
enum class ScaleLayout : uint8_t {
  kByRow,     // [num_rows] rows
  kByColumn,  // of each expert's block as [words, stride]; grouped matrix products want FP8's so
  // Each expert's block in tiles of 128 rows and one word of each, row after row of tiles, as
  // [ceil(stride / 128), words, 32, 4] words, where row r of a tile lies at [r % 32, r / 32]. The
  // output has [local experts * ceil(stride / 128) * 128] rows; those behind a block's last are
  // left as they were. Grouped matrix products want those of MXFP8 and NVFP4 so.
  kInTiles,
};

struct DispatchOutput {
  Tensor rows;  // [plan.num_rows(), cols of x], dtype of x; padding rows are zeroed, budget slack
                // is left as it was
  Tensor weights = {};  // fp32 [plan.num_rows(), plan.row_weight_cols()]; zero where no route
  Tensor scales = {};   // [plan.num_rows(), cols of scales]

  // Optional outputs beside these; each rank chooses its own.
  // int32 [plan.num_rows(), 2]: the rank that a row comes from, and its token there. Entries of
  // rows without a token stay as they were.
  Tensor sources = {};
  // int64 [plan.num_rows(), K], only with kRankMajor: this rank's expert, from 0, that choice k of
  // the row's token goes to; -1 where it goes elsewhere or nowhere, and in rows without a token.
  Tensor experts = {};
  // int32 [1, local experts], not with kRankMajor: `counts` gets the plan's rows_per_expert, which
  // are added to `count_sums`.
  Tensor counts = {};
  Tensor count_sums = {};
  ScaleLayout scale_layout = ScaleLayout::kByRow;
};

enum class CombineScale : uint8_t {
  kNone,           // plain sum
  kPlanWeights,    // each row times its route's weight in Routing::weights
  kSourceWeights,  // each row times CombineInput::source_weights
};

// Marks that tell combine which rows are whole, where they are still being written when it begins.
// A block of an expert's rows is whole when its mark equals `wanted`: the writer of the rows stores
// that after them, with release semantics.
struct RowMarks {
  // kInt32 [1, local experts * blocks of an expert's expert_stride rows], by expert, then block.
  ConstTensor marks = {};
  uint32_t wanted = 0;
  int64_t block_rows = 0;  // of a block; 0: an expert has one mark, for all its rows

  [[nodiscard]] constexpr int64_t num_blocks(int64_t expert_stride) const {
    return block_rows == 0 ? 1 : (expert_stride + block_rows - 1) / block_rows;
  }
};

// How a rank's sum for a token travels in combine, of bf16 rows whose hidden size is a multiple of
// kQuantiseGroup, with SumOrder::kRank. Except with kNone, every sum of a token's rows on a rank,
// also on the token's own, is coded from fp32, not rounded to bf16 before; the sums that the codes
// stand for are added in fp32, by rank, and rounded once. In a group of several domains a domain's
// sum is coded once more, also in the token's own domain. docs/wire.md has the layouts and the
// bounds of their errors.
enum class Wire : uint8_t {
  kNone,      // bf16
  kFp8,       // E4M3, with an fp32 scale for every kQuantiseGroup elements
  kLogFmt10,  // a sign and 9 bits of a logarithm, between the least and the largest of those
};

// Returns the bytes of a row or sum that travels, a multiple of 16: coded 0.52 or 0.64 of bf16.
[[nodiscard]] constexpr int64_t wire_row_bytes(Wire wire, int64_t hidden) {
  constexpr int64_t kHeadBytes = 4;  // of a group
  if (wire == Wire::kNone) {
    return 2 * hidden;
  }
  const int64_t codes = wire == Wire::kFp8 ? hidden : hidden + hidden / 4;
  return (codes + hidden / kQuantiseGroup * kHeadBytes + 15) / 16 * 16;
}

struct CombineInput {
  ConstTensor rows;          // [plan.num_rows(), hidden] bf16, fp16 or fp32
  ConstTensor weights = {};  // fp32 gradients, shaped like DispatchOutput::weights
  ConstTensor source_weights =
      {};  // fp32, shaped like Routing::weights; kSourceWeights only, not with kRankMajor
  CombineScale scale = CombineScale::kNone;
  // int64 or int32, shaped like source_weights of a routing by topk_idx: a weight counts as zero
  // where this names no expert. Where it names another expert than the plan's, CPUs refuse the
  // call; on GPUs the sum is NaN, and the rank's next call is refused. Not between domains of GPUs.
  ConstTensor source_idx = {};
  // Marks of the rows, kExpertStrided only, not between domains of GPUs; if any rank gives them,
  // every rank must. A GPU waits for them on CallOptions::num_sms multiprocessors, block by block
  // where the call could be received later.
  RowMarks ready = {};
  Wire wire = Wire::kNone;
};

struct CombineOutput {
  // [num_tokens, hidden], dtype of rows; a token without routes gets zeros. With a Wire it may be
  // kByte [num_tokens, wire_row_bytes()] instead: sums that are coded once more, to travel on.
  Tensor x;
  Tensor weights = {};  // fp32, shaped like Routing::weights; zero where no route
};

}  // namespace weft
