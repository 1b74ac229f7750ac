// SPDX-License-Identifier: Apache-2.0
// Dispatch on CPU threads. Previous in the data flow: dispatch/call.cpp; next: the caller's
// experts, then combine/call.cpp.
//
// Each worker takes turns: push a chunk to every receiver, forward what has come from other domains
// and fan out what has arrived meanwhile. The last units zero the padding.
#include <cstring>

#include "cpu/dispatch/fan_out.hpp"
#include "cpu/dispatch/forward.hpp"
#include "cpu/dispatch/push.hpp"

namespace weft {
namespace {

std::vector<RowStream> streams_of(
    const CpuCall& call, const DispatchInput& in, const DispatchOutput& out
) {
  const CallWord& own = call.words[static_cast<size_t>(call.plan.shape.rank)];
  std::vector<RowStream> streams = {
      {.source = in.x.data,
       .out = out.rows.data,
       .row_bytes = static_cast<size_t>(in.x.row_bytes()),
       .target = &CallWord::rows,
       .place = own.rows.place,
       .staged = &call.staging.rows,
       .crossed = &call.staging.crossing_rows}};
  if (in.scales.is_given()) {
    streams.push_back(
        {.source = in.scales.data,
         .out = out.scales.data,
         .row_bytes = static_cast<size_t>(in.scales.row_bytes()),
         .target = &CallWord::scales,
         .place = own.scales.place,
         .staged = &call.staging.scales,
         .crossed = &call.staging.crossing_scales}
    );
  }
  for (RowStream& stream : streams) {
    stream.is_streamed =
        prefers_streaming(static_cast<uint64_t>(call.plan.num_rows) * stream.row_bytes);
  }
  return streams;
}

}  // namespace

void dispatch_cpu(
    const CpuRank& rank, const CpuCall& call, const DispatchInput& in, const DispatchOutput& out
) {
  const std::vector<RowStream> streams = streams_of(call, in, out);
  const RowWeights row_weights(call.plan, out.weights);
  const DispatchPush push(rank, call, streams, in.weights, row_weights);
  DispatchFanOut fan_out(rank, call, streams, row_weights);
  DispatchForward forward(rank, call, streams);
  const auto zero = [&](const std::pair<int64_t, int64_t>& range) {
    for (const RowStream& stream : streams) {
      const auto count = static_cast<size_t>(range.second - range.first);
      std::memset(stream.row(static_cast<int32_t>(range.first)), 0, count * stream.row_bytes);
    }
    if (row_weights.is_given()) {
      row_weights.zero(range.first, range.second);
    }
  };

  const int64_t num_push_units = push.num_units();
  const auto num_units = num_push_units + static_cast<int64_t>(call.plan.padding.size());
  const WaitReason reason = {.op = "dispatch", .call = call.number, .what = "rows"};
  const auto run_unit = [&](int64_t unit, int /*worker*/) {
    if (unit < num_push_units) {
      push.run(unit);
    } else {
      zero(call.plan.padding[static_cast<size_t>(unit - num_push_units)]);
    }
  };
  take_turns(rank, reason, num_units, run_unit, forward, fan_out);
  forward.settle();
  fan_out.settle();
}

}  // namespace weft
