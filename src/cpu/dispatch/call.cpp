// SPDX-License-Identifier: Apache-2.0
// dispatch: each receiver says where it wants its rows, then workers move them. Previous in the
// data flow: plan/call.cpp; next: the caller's experts, then combine/call.cpp.
#include <cstring>
#include <optional>

#include "call/validate.hpp"
#include "cpu/dispatch/beside.hpp"
#include "cpu/dispatch/fan_out.hpp"
#include "cpu/dispatch/forward.hpp"
#include "cpu/dispatch/push.hpp"
#include "cpu/dispatch/quantise.hpp"
#include "cpu/exchange.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {
namespace {

// Input that this rank sends, its output, the regions of it that peers reach, if any, and staging.
struct Ready {
  StoredInput in;
  DispatchOutput out;                 // as rows arrive
  std::vector<std::byte> scale_rows;  // of `out`, if they are not to lie by row
  std::optional<Region> rows;
  std::optional<Region> scales;
  Staging staging;
};

uint64_t staged_bytes(const ConstTensor& tensor, bool is_direct) {
  return tensor.is_given() && !is_direct ? static_cast<uint64_t>(tensor.row_bytes()) : 0;
}

Target place_of(
    const std::optional<Region>& region, const Tensor& tensor, Place direct, const Target& staged
) {
  if (!region) {
    return staged;
  }
  const auto begin = static_cast<uint64_t>(tensor.data - region->data);
  return {.region = region->ref, .offset = begin, .place = direct};
}

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

// Prepares all but staging. region_of(tensor): where peers reach its memory, if they do.
template <class RegionOf>
Ready ready_for(
    const DispatchInput& in,
    const DispatchOutput& out,
    WorkerPool& workers,
    const RegionOf& region_of
) {
  Ready ready = {
      .in = StoredInput(in, workers),
      .out = out,
      .scale_rows = {},
      .rows = region_of(out.rows),
      .scales = {},
      .staging = {}};
  if (out.scale_layout != ScaleLayout::kByRow) {
    ready.scale_rows.resize(static_cast<size_t>(out.scales.num_bytes()));
    ready.out.scales.data = ready.scale_rows.data();
  } else {
    ready.scales = region_of(out.scales);
  }
  return ready;
}

// Has workers take turns: push a chunk to every receiver, forward rows from other domains and fan
// out what has arrived meanwhile. The last units zero the padding.
void run(const CpuCall& call, const DispatchInput& in, const DispatchOutput& out) {
  const std::vector<RowStream> streams = streams_of(call, in, out);
  const RowWeights row_weights(call.plan, out.weights);
  const DispatchPush push(call, streams, in.weights, row_weights);
  DispatchFanOut fan_out(call, streams, row_weights);
  DispatchForward forward(call, streams);
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
  take_turns(call.rank, reason, num_units, run_unit, forward, fan_out);
}

}  // namespace

void CpuExchange::dispatch(
    const Plan& handle, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
) {
  const auto prepare = [&] {
    const PlanData& plan = surviving(handle);
    Validator{context_, settings_, id_}.dispatch(plan, in, out);
    Ready ready = ready_for(in, out, *workers_, [&](const Tensor& tensor) {
      return pool_->find(tensor.data, static_cast<uint64_t>(tensor.num_bytes()));
    });
    const DispatchInput& stored = ready.in.get();
    ready.staging = dispatch_staging(
        plan,
        {.rows = staged_bytes(stored.x, ready.rows.has_value()),
         .scales = staged_bytes(stored.scales, ready.scales.has_value()),
         .weights = stored.weights.is_given() ? sizeof(float) : 0,
         .crossing_rows = static_cast<uint64_t>(stored.x.row_bytes()),
         .crossing_scales = staged_bytes(stored.scales, false)}
    );
    reserve_staging(ready.staging.num_bytes);
    return ready;
  };
  run_call(Op::kDispatch, prepare, [&](const Ready& ready) {
    const PlanData& plan = surviving(handle);
    const PayloadFormat payload = payload_of(in, out, plan.shape.topk);
    const CallWord word = new_word(
        {.op = Op::kDispatch,
         .number = call.number,
         .plan_number = static_cast<int64_t>(plan.call),
         .payload = payload}
    );
    const Place direct = may_touch_peers(plan) ? Place::kEverySlot : Place::kPrimarySlot;
    std::vector<CallWord> to(static_cast<size_t>(context_.num_ranks), word);
    for (size_t source = 0; source < to.size(); ++source) {
      const bool is_self = source == static_cast<size_t>(context_.rank);
      // A source that writes nothing must not look for the memory: this rank may be past the call
      // by then, and have released it.
      if (rows_from(plan, source) > 0 || is_self) {
        const Staging& staged = ready.staging;
        to[source].rows = place_of(ready.rows, out.rows, direct, staging_at(staged.rows[source]));
        to[source].scales =
            place_of(ready.scales, out.scales, direct, staging_at(staged.scales[source]));
      } else if (crossings_from(plan, source) > 0) {
        to[source].rows = staging_at(ready.staging.crossing_rows[source]);
        to[source].scales = staging_at(ready.staging.crossing_scales[source]);
      }
      if (in.weights.is_given() && plan.received[source].size() > 0) {
        to[source].weights = staging_at(ready.staging.weights[source]);
      }
    }
    const std::vector<CallWord> words = board_->swap(to, {});
    import_targets(words);
    run({cpu_rank(), call_number_, plan, words, to, ready.staging, staging_.data},
        ready.in.get(),
        ready.out);
    write_beside(plan, ready.scale_rows.data(), out);
    ++counters_.num_dispatches;
    count_crossings(count_sent(plan), payload.out_row_bytes() + payload.scale_bytes);
  });
  tell_rows(contents_of(handle), out);
}

}  // namespace weft
