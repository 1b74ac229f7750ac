// SPDX-License-Identifier: Apache-2.0
// Dispatch on CPU threads. Previous in the data flow: dispatch_call.cpp; next: the caller's
// experts, then combine_call.cpp.
//
// Each worker takes turns: push a chunk to every receiver, hand on what has come from other domains
// and fan out what has arrived meanwhile. The last units zero the padding.
#include <atomic>
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

// Until one of the two has something to do or everything is claimed.
void wait(
    const CpuRank& rank,
    const CpuCall& call,
    const DispatchCarry& carry,
    const DispatchFanOut& fan_out
) {
  const auto ready = [&] {
    return carry.has_ready() || fan_out.has_ready() || (carry.is_claimed() && fan_out.is_claimed());
  };
  const auto missing = [&] {
    std::vector<Missing> late;
    carry.add_missing(late);
    fan_out.add_missing(late);
    return late;
  };
  rank.waiter.until({.op = "dispatch", .call = call.number, .what = "rows"}, ready, missing, [&] {
    return rank.workers.is_stopping();
  });
}

}  // namespace

void dispatch_cpu(
    const CpuRank& rank, const CpuCall& call, const DispatchInput& in, const DispatchOutput& out
) {
  const std::vector<RowStream> streams = streams_of(call, in, out);
  const RowWeights row_weights(call.plan, out.weights);
  const DispatchPush push(rank, call, streams, in.weights, row_weights);
  DispatchFanOut fan_out(rank, call, streams, row_weights);
  DispatchCarry carry(rank, call, streams);
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
  const int64_t num_units = num_push_units + static_cast<int64_t>(call.plan.padding.size());
  std::atomic<int64_t> next_unit = 0;
  rank.workers.run([&](int) {
    while (!rank.workers.is_stopping()) {
      const int64_t unit = next_unit.fetch_add(1, std::memory_order_relaxed);
      if (unit < num_push_units) {
        push.run(unit);
      } else if (unit < num_units) {
        zero(call.plan.padding[static_cast<size_t>(unit - num_push_units)]);
      }
      const bool has_carried = carry.run_ready();
      if (fan_out.run_ready() || has_carried || unit < num_units) {
        continue;
      }
      if (carry.is_claimed() && fan_out.is_claimed()) {
        return;
      }
      wait(rank, call, carry, fan_out);
    }
  });
  carry.settle();
  fan_out.settle();
}

}  // namespace weft
