// SPDX-License-Identifier: Apache-2.0
// Bytes of another process are refused, or are arrivals that an executor may follow.
#include "fuzz/fuzz_input.hpp"
#include "plan/build.hpp"

namespace weft::fuzz {
namespace {

constexpr int64_t kMaxTokens = 1 << 20;
constexpr int kTopk = 4;
constexpr int kNumLocalExperts = 3;

PlanData receiver(Layout layout) {
  PlanData plan;
  plan.shape.rank = 1;
  plan.shape.num_ranks = 2;
  plan.shape.num_experts = 2 * kNumLocalExperts;
  plan.shape.topk = kTopk;
  plan.shape.options.layout = layout;
  plan.num_rows = 16;
  plan.rows_per_expert.assign(kNumLocalExperts, 0);
  return plan;
}

void check_arrivals(const Arrivals& arrivals, const PlanData& plan) {
  for (int64_t i = 0; i < arrivals.size(); ++i) {
    require(!arrivals.slots(i).empty(), "an arrival has a row");
    require(arrivals.slots(i).size() <= kTopk, "an arrival has at most top-k rows");
    for (const int32_t slot : arrivals.slots(i)) {
      require(slot >= 0 && slot < plan.num_rows, "rows lie in the output");
    }
  }
  for (size_t r = 0; r < arrivals.slot.size(); ++r) {
    require(arrivals.expert[r] >= 0 && arrivals.expert[r] < kNumLocalExperts, "experts are local");
    require(arrivals.k[r] >= 0 && arrivals.k[r] < kTopk, "k is below top-k");
  }
}

}  // namespace
}  // namespace weft::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace weft::fuzz;
  const auto bytes = std::as_bytes(std::span(data, size));
  for (const weft::Layout layout : {weft::Layout::kExpertMajor, weft::Layout::kRankMajor}) {
    weft::PlanData plan = receiver(layout);
    try {
      weft::Arrivals arrivals =
          weft::decode_records(bytes, {plan.shape, kMaxTokens, plan.num_rows}, 0, {});
      check_arrivals(arrivals, plan);
      const std::vector<std::byte> again = weft::encode_records(arrivals);
      require(
          weft::decode_records(again, {plan.shape, kMaxTokens, plan.num_rows}, 0, {}) == arrivals,
          "records return"
      );
      weft::add_received(plan, {std::move(arrivals)});
    } catch (const weft::Error& error) {
      require(error.code() == weft::ErrorCode::kTransport, "bad records are the wire's error");
    }
  }
  return 0;
}
