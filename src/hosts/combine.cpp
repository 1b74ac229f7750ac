// SPDX-License-Identifier: Apache-2.0
// combine over several domains of GPUs: each domain adds up what its ranks have for a token, its
// carrier sends the sum back, and the token's rank adds the domains' sums. Previous in the data
// flow: the caller's experts.
#include "hosts/combine.hpp"

#include <algorithm>

#include "call/validate.hpp"
#include "plan/device_plan.hpp"

namespace weft {
namespace {

Call combine_call(const PlanData& plan, const CombineInput& in) {
  return {
      .op = Op::kCombine,
      .plan_number = static_cast<int64_t>(plan.call),
      .payload = payload_of(in, plan.shape.topk),
      .scale = in.scale};
}

}  // namespace

CombineAcross::CombineAcross(
    DomainsCudaExchange& owner,
    const DomainsPlan& device,
    const CombineInput& in,
    const CombineOutput& out,
    cudaStream_t stream,
    const CallOptions& options
)
    : DomainsCall("combine", owner, device, stream, options),
      in_(in),
      out_(out),
      topk_(plan_.shape.topk) {
  const int64_t weight_bytes = topk_ * kWeightBytes;
  sums_ = crossing_chunk(
      in.rows.row_bytes(), in.weights.is_given() ? weight_bytes : 0, 0, kChunkArrivals
  );
  // All that a domain gets, in one message.
  weights_ = {
      .weight_bytes = in.source_weights.is_given() ? weight_bytes : 0,
      .rows = std::max<int64_t>(owner.settings.max_tokens, 1)};
  areas_ = CombineAreas(plan_, sums_, weights_);
  check_room(areas_.room);
}

void CombineAcross::run() {
  const std::vector<CallWord> words = network_.swap(own_words());
  try {
    let_copies_begin();
    if (in_.source_weights.is_given()) {
      swap_weights(words);
    }
    swap_sums(sum_carried(words));
  } catch (const std::exception& error) {
    owner_.refuse_rounds(Op::kCombine, num_launched_, device_.rounds.size(), error.what(), stream_);
    throw;
  }
  owner_.let_follow_copies(stream_);
  add_parts();
  network_.count(Op::kCombine, count_carried(plan_), sums_.row_bytes);
}

std::vector<CallWord> CombineAcross::own_words() const {
  const CallWord word = network_.new_word(combine_call(plan_, in_));
  std::vector<CallWord> to(static_cast<size_t>(network_.context().num_ranks), word);
  for (size_t domain = 0; domain < traffic_.sent.size(); ++domain) {
    if (num_sent(domain) > 0) {
      to[carrier_of(domain)].rows = network_.staging_at(areas_.staged_sums[domain]);
    }
  }
  for (size_t i = 0; i < traffic_.carried.size(); ++i) {
    const CarriedSource& carried = traffic_.carried[i];
    if (in_.source_weights.is_given() && carried.crossings.size() > 0) {
      to[static_cast<size_t>(carried.source)].source_weights =
          network_.staging_at(areas_.staged_weights[i]);
    }
  }
  return to;
}

void DomainsCudaExchange::combine(
    const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
) {
  const CudaDeviceGuard guard(settings.device.index);
  settle();
  last_op = Op::kCombine;
  const cudaStream_t stream = stream_of(call);
  const PlanData& header = header_of(plan);
  const std::exception_ptr refusal = refusal_of([&] {
    network->validator(settings).combine(header, in, out);
    near->check_aligned("combine", "rows", in.rows);
    near->check_aligned("combine", "x", out.x);
    begin_call("combine", stream);
  });
  if (!refusal) {  // weights cross both ways
    make_room(
        combine_call(header, in), in.rows.row_bytes() + 2 * kWeightBytes * header.shape.topk, stream
    );
  }
  const auto prepare = [&] {
    rethrow(refusal);
    const auto& device = device_plan_as<DomainsPlan>(header, network->context());
    return std::make_unique<CombineAcross>(*this, device, in, out, stream, call);
  };
  network->run_call(Op::kCombine, prepare, [&](const auto& across) { across->run(); });
  end_call(call, stream);
}

}  // namespace weft
