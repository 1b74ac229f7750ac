// SPDX-License-Identifier: Apache-2.0
// Any routing is refused or planned exactly as the reference plans it.
#include <vector>

#include "fuzz/fuzz_input.hpp"
#include "plan/reference/reference_plan.hpp"

namespace weft::fuzz {
namespace {

struct Sizes {
  int num_ranks;
  int num_experts;
  int topk;
};

PlanOptions read_options(FuzzInput& in) {
  PlanOptions options;
  options.layout = static_cast<Layout>(in.between(0, 2));
  options.overflow = static_cast<Overflow>(in.between(0, 1));
  if (options.layout != Layout::kRankMajor) {
    options.pad_multiple = in.between(1, 9);
  }
  if (options.layout == Layout::kExpertStrided) {
    options.expert_stride = in.between(0, 12);
  } else if (in.coin()) {
    options.row_budget = in.byte();
  }
  return options;
}

// Indices reach a little outside the legal range.
RouteTable read_indices(FuzzInput& in, const Sizes& sizes, int num_tokens) {
  std::vector<int32_t> idx(static_cast<size_t>(num_tokens * sizes.topk));
  std::vector<float> weights(idx.size(), 0.5F);
  for (int32_t& expert : idx) {
    expert = static_cast<int8_t>(in.byte()) % (sizes.num_experts + 1);
    expert = expert < -1 ? -1 : expert;
  }
  Routing routing;
  routing.topk_idx = matrix(idx.data(), num_tokens, sizes.topk);
  if (in.coin()) {
    routing.weights = matrix(weights.data(), num_tokens, sizes.topk);
  }
  return read_routing(routing, sizes.num_experts, sizes.topk, 16, {});
}

RouteTable read_bits(FuzzInput& in, const Sizes& sizes, int num_tokens) {
  std::vector<std::byte> map(static_cast<size_t>(num_tokens * sizes.num_experts));
  for (std::byte& set : map) {
    set = static_cast<std::byte>(in.byte() % 5 == 4 ? 1 : 0);
  }
  Routing routing;
  routing.map = {map.data(), DType::kBool, num_tokens, sizes.num_experts};
  return read_routing(routing, sizes.num_experts, sizes.topk, 16, {});
}

void compare(const std::vector<RouteTable>& routes, int num_experts, const PlanOptions& options) {
  const std::vector<PlanData> slow = reference_plans(routes, num_experts, options);
  bool drops = false;
  for (const PlanData& plan : slow) {
    drops |= plan.overflow;
  }
  bool refused = false;
  try {
    const std::vector<Plan> fast = build_plans(routes, num_experts, options);
    for (size_t rank = 0; rank < fast.size(); ++rank) {
      require(contents_of(fast[rank]) == slow[rank], "the plan equals the reference");
    }
  } catch (const Error& error) {
    refused = error.code() == ErrorCode::kInvalidArgument;
  }
  require(
      refused == (drops && options.overflow == Overflow::kError),
      "overflow is refused when asked for, and only then"
  );
}

}  // namespace
}  // namespace weft::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace weft::fuzz;
  FuzzInput in(data, size);
  Sizes sizes = {};
  sizes.num_ranks = in.between(1, 8);
  sizes.num_experts = sizes.num_ranks * in.between(1, 4);
  sizes.topk = in.between(1, 32);
  const weft::PlanOptions options = read_options(in);
  const bool from_map = in.coin();
  std::vector<weft::RouteTable> routes;
  try {
    for (int rank = 0; rank < sizes.num_ranks; ++rank) {
      const int num_tokens = in.between(0, 17);  // one more than the capacity
      routes.push_back(
          from_map ? read_bits(in, sizes, num_tokens) : read_indices(in, sizes, num_tokens)
      );
    }
  } catch (const weft::Error& error) {
    require(error.code() == weft::ErrorCode::kInvalidArgument, "bad routing is the caller's error");
    return 0;
  }
  compare(routes, sizes.num_experts, options);
  return 0;
}
