// SPDX-License-Identifier: Apache-2.0
// combine, the adjoint of dispatch/call.cpp: each token's rank says where it wants its partial
// sums, then workers make and add them. Previous in the data flow: the caller's experts.
#include <atomic>
#include <chrono>

#include "call/validate.hpp"
#include "core/clock.hpp"
#include "cpu/combine/forward.hpp"
#include "cpu/combine/reduce.hpp"
#include "cpu/combine/sum.hpp"
#include "cpu/combine/topk.hpp"
#include "cpu/exchange.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {
namespace {

// Returns whether `peer` reads this rank's rows, if it can, for its own tokens or for those that it
// forwards. Source weights of the latter are with this rank. Where codes travel, no rank reads
// another's rows.
bool reads_rows(const PlanData& plan, size_t peer, const CombineInput& in) {
  if (!is_near(plan, peer) || in.wire != Wire::kNone) {
    return false;
  }
  return plan.received[peer].size() > 0 || (in.scale != CombineScale::kSourceWeights &&
                                            forwards_sums(plan) && rows_from(plan, peer) > 0);
}

// Returns the expert that `source_idx` names for a route, -1: none.
int64_t named_expert(const ConstTensor& source_idx, size_t route, const PlanShape& shape) {
  const int64_t given = source_idx.dtype == DType::kInt64
                            ? reinterpret_cast<const int64_t*>(source_idx.data)[route]
                            : reinterpret_cast<const int32_t*>(source_idx.data)[route];
  return given < shape.num_chosen_experts() ? std::max<int64_t>(given, -1) : -1;
}

// Checks that the named experts are those of the plan, whose rows come back.
void check_choices(const PlanData& plan, const ConstTensor& source_idx, const Context& context) {
  const auto topk = static_cast<size_t>(source_idx.cols);
  for (size_t route = 0; route < plan.route_expert.size(); ++route) {
    const int64_t named = named_expert(source_idx, route, plan.shape);
    const int32_t physical = plan.route_expert[route];
    const int32_t chosen = physical < 0 ? -1 : expert_of(plan.shape, physical);
    const bool is_lost = chosen < 0 && !plan.shape.lost.empty();  // perhaps; it has no rows
    WEFT_CHECK_ARG(
        context,
        named < 0 || named == chosen || is_lost,
        "combine: source_idx[{}, {}] = {} (the plan was made of {} there)",
        route / topk,
        route % topk,
        named,
        chosen
    );
  }
}

// Combine's input with the weights that scale its rows: as given, or a copy without those that do
// not count, which lives as long as this object.
class CountedWeights {
 public:
  CountedWeights(const PlanData& plan, const CombineInput& in) : in_(in) {
    if (!in.source_idx.is_given()) {
      return;
    }
    const auto* given = reinterpret_cast<const float*>(in.source_weights.data);
    kept_.assign(given, given + in.source_weights.rows * in.source_weights.cols);
    for (size_t i = 0; i < kept_.size(); ++i) {
      kept_[i] = named_expert(in.source_idx, i, plan.shape) < 0 ? 0.0F : kept_[i];
    }
    in_.source_weights = matrix(kept_.data(), in.source_weights.rows, in.source_weights.cols);
  }

  CountedWeights(CountedWeights&&) = default;  // a copy would name the weights of this one
  CountedWeights& operator=(CountedWeights&&) = default;

  [[nodiscard]] const CombineInput& get() const { return in_; }

 private:
  CombineInput in_;
  std::vector<float> kept_;
};

// Waits until the marks say that all rows are whole, before any rank may read them. Marks are not
// signals of a rank, so the wait has its own deadline, a little before the waiter's.
void await_marks(
    const CpuRank& rank,
    uint64_t number,
    const PlanData& plan,
    const RowMarks& ready,
    std::chrono::milliseconds timeout,
    const Context& context
) {
  const auto* marks = reinterpret_cast<const uint32_t*>(ready.marks.data);
  const int64_t experts = plan.shape.num_local_experts();
  const int64_t blocks = ready.num_blocks(plan.num_rows / experts);
  int64_t next = 0;  // earlier marks have been seen
  const auto mark = [&] {
    return std::atomic_ref(const_cast<uint32_t&>(marks[next])).load(std::memory_order_acquire);
  };
  const auto is_whole = [&] {
    while (next < experts * blocks) {
      const auto rows = plan.rows_per_expert[static_cast<size_t>(next / blocks)];
      const bool has_rows = next % blocks * ready.block_rows < rows;
      if (has_rows && mark() != ready.wanted) {
        return false;
      }
      ++next;
    }
    return true;
  };
  const Deadline deadline(timeout - timeout / 16);
  const WaitReason reason = {.op = "combine", .call = number, .what = "marks of rows"};
  rank.waiter.until(
      reason,
      [&] { return is_whole() || deadline.has_passed(); },
      [] { return std::vector<Missing>(); }
  );
  WEFT_CHECK(
      context,
      is_whole(),
      ErrorCode::kTimeout,
      "combine: rank {} waited {} ms for block {} of the rows of expert {} in call {} (its mark is "
      "{}, wanted {})",
      plan.shape.rank,
      timeout.count(),
      next % blocks,
      plan.shape.rank * experts + next / blocks,
      number,
      mark(),
      ready.wanted
  );
}

// Has workers take turns: send a chunk to every token rank, add up this domain's rows for tokens of
// other domains, sum the tokens that are complete.
template <class Send, class Forward, class Rows>
void run_roles(const CpuCall& call, Send& send, Forward& forward, CombineSum<Rows>& sum) {
  const WaitReason reason = {.op = "combine", .call = call.number, .what = "partial sums"};
  const auto run_unit = [&](int64_t unit, int worker) { send.run(unit, worker); };
  take_turns(call.rank, reason, send.num_units(), run_unit, forward, sum);
  sum.release_rows();
  wait_for_readers(call);
}

void run(const CpuCall& call, const CombineInput& in, const CombineOutput& out) {
  if (in.scale == CombineScale::kSourceWeights) {
    swap_source_weights(call, in);
  }
  if (call.plan.shape.options.order == SumOrder::kTopk) {
    TopkReturn send(call, in);
    NothingToForward forward;
    CombineSum<TopkRows> sum(call, in, out);
    run_roles(call, send, forward, sum);
    return;
  }
  CombineReduce reduce(call, in);
  CombineForward forward(call, in);
  CombineSum<CombineRows> sum(call, in, out);
  run_roles(call, reduce, forward, sum);
}

Staging staging_for(const PlanData& plan, const CombineInput& in) {
  const bool has_source_weights = in.scale == CombineScale::kSourceWeights;
  const auto row_bytes = static_cast<uint64_t>(returned_row_bytes(in));
  return combine_staging(
      plan,
      {.rows = row_bytes,
       .weights = in.weights.is_given() ? sizeof(float) : 0,
       .source_weights = has_source_weights ? sizeof(float) : 0,
       .crossing_rows = row_bytes}
  );
}

}  // namespace

void CpuExchange::combine(
    const Plan& handle, const CombineInput& in, const CombineOutput& out, const CallOptions& call
) {
  const auto prepare = [&] {
    const PlanData& plan = surviving(handle);
    Validator{context_, settings_, id_}.combine(plan, in, out);
    if (in.source_idx.is_given()) {
      check_choices(contents_of(handle), in.source_idx, context_);
    }
    Staging ready = staging_for(plan, in);
    reserve_staging(ready.num_bytes);
    return ready;
  };
  run_call(Op::kCombine, prepare, [&](const Staging& ready) {
    const PlanData& plan = surviving(handle);
    if (in.ready.marks.is_given()) {
      await_marks(cpu_rank(), call_number_, plan, in.ready, settings_.timeout, context_);
    }
    const CallWord word = new_word(
        {.op = Op::kCombine,
         .number = call.number,
         .plan_number = static_cast<int64_t>(plan.call),
         .payload = payload_of(in, plan.shape.topk),
         .scale = in.scale}
    );
    const auto region = pool_->find(in.rows.data, static_cast<uint64_t>(in.rows.num_bytes()));
    std::vector<CallWord> to(static_cast<size_t>(context_.num_ranks), word);
    const bool has_source_weights = in.scale == CombineScale::kSourceWeights;
    for (size_t peer = 0; peer < to.size(); ++peer) {
      if (returned_from(plan, peer) > 0) {  // see dispatch/call.cpp
        to[peer].rows = staging_at(ready.rows[peer]);
      } else if (crossing_sums_from(plan, peer) > 0) {
        to[peer].rows = staging_at(ready.crossing_rows[peer]);
      }
      if (plan.sent[peer].size() > 0 && in.weights.is_given()) {
        to[peer].weights = staging_at(ready.weights[peer]);
      }
      if (reads_rows(plan, peer, in) && region && may_touch_peers(plan)) {
        const auto begin = static_cast<uint64_t>(in.rows.data - region->data);
        to[peer].own_rows = {.region = region->ref, .offset = begin, .place = Place::kEverySlot};
      }
      if (has_source_weights) {
        to[peer].source_weights = staging_at(ready.source_weights[peer]);
      }
    }
    std::vector<CallWord> words = board_->swap(to, {});
    for (size_t peer = 0; peer < words.size(); ++peer) {
      // A rank that reads this rank's rows itself gets no partial sums; it waits for nothing here
      // and may have released its staging by now. (Of what it forwards it may get some.)
      const bool has_sums = has_source_weights && forwards_sums(plan) &&
                            rows_from(plan, peer) > plan.received[peer].size();
      if (to[peer].own_rows.region.generation != 0 && !has_sums) {
        words[peer].rows = {};
      }
    }
    import_targets(words);
    const CountedWeights counted(plan, in);
    run({cpu_rank(), call_number_, plan, words, to, ready, staging_.data}, counted.get(), out);
    ++counters_.num_combines;
    count_crossings(count_returned(plan), returned_row_bytes(in));
  });
}

}  // namespace weft
