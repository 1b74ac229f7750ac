// SPDX-License-Identifier: Apache-2.0
// dispatch: each receiver says where it wants its rows, then the executor moves them. Previous in
// the data flow: plan_call.cpp; next: dispatch_cpu.cpp.
#include <optional>

#include "call/validate.hpp"
#include "cpu/exchange.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {
namespace {

// What this rank has for its output: regions that peers reach, where it lies in some, and staging.
struct Ready {
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

}  // namespace

void CpuExchange::dispatch(
    const Plan& handle,
    const DispatchInput& in,
    const DispatchOutput& out,
    const CallOptions& /*call*/
) {
  const PlanData& plan = contents_of(handle);
  const auto prepare = [&] {
    Validator{context_, settings_, id_}.dispatch(plan, in, out);
    const auto region_of = [&](const Tensor& tensor) {
      return pool_->find(tensor.data, static_cast<uint64_t>(tensor.num_bytes()));
    };
    Ready ready = {.rows = region_of(out.rows), .scales = region_of(out.scales), .staging = {}};
    ready.staging = dispatch_staging(
        plan,
        {.rows = staged_bytes(in.x, ready.rows.has_value()),
         .scales = staged_bytes(in.scales, ready.scales.has_value()),
         .weights = in.weights.is_given() ? sizeof(float) : 0,
         .crossing_rows = static_cast<uint64_t>(in.x.row_bytes()),
         .crossing_scales = staged_bytes(in.scales, false)}
    );
    reserve_staging(ready.staging.num_bytes);
    return ready;
  };
  run_call(Op::kDispatch, prepare, [&](const Ready& ready) {
    const PayloadFormat payload = payload_of(in, out, plan.shape.topk);
    const CallWord word = new_word(
        {.op = Op::kDispatch, .plan_number = static_cast<int64_t>(plan.call), .payload = payload}
    );
    const Place direct = may_touch_peers() ? Place::kEverySlot : Place::kPrimarySlot;
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
    const CpuCall cpu_call = {call_number_, plan, words, to, ready.staging, staging_.data};
    dispatch_cpu(cpu_rank(), cpu_call, in, out);
    ++counters_.num_dispatches;
    count_crossings(count_sent(plan), payload.row_bytes + payload.scale_bytes);
  });
}

}  // namespace weft
