// SPDX-License-Identifier: Apache-2.0
// Four ranks as threads, eight experts, tokens there and back. Expert e multiplies a row by e + 1.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "weft/weft.hpp"

namespace {

constexpr int kRanks = 4;
constexpr int kExperts = 8;
constexpr int kTopk = 2;
constexpr int64_t kHidden = 16;

// Makes the calls of one rank. Returns the number of wrong elements.
int run_rank(weft::Group& group) {
  weft::Exchange exchange(
      group, {.hidden = kHidden, .max_tokens = 8, .num_experts = kExperts, .max_topk = kTopk}
  );

  // Ranks may bring different numbers of tokens. Token t wants experts t and t + 3.
  const int64_t num_tokens = 5 + group.rank();
  std::vector<float> x(static_cast<size_t>(num_tokens * kHidden), 1.0F);
  std::vector<int32_t> topk_idx;
  for (int32_t t = 0; t < num_tokens; ++t) {
    topk_idx.push_back(t % kExperts);
    topk_idx.push_back((t + 3) % kExperts);
  }
  const weft::Plan plan =
      exchange.plan({.topk_idx = weft::matrix(topk_idx.data(), num_tokens, kTopk)});

  // Every row goes once to each rank that has one of its experts, and lies there by expert.
  const weft::Buffer rows = exchange.allocate(plan.num_rows(), kHidden, weft::DType::kFloat32);
  exchange.dispatch(
      plan, {.x = weft::matrix(x.data(), num_tokens, kHidden)}, {.rows = rows.tensor()}
  );

  auto* row = reinterpret_cast<float*>(rows.tensor().data);
  const int first_expert = group.rank() * plan.num_local_experts();
  for (int e = 0; e < plan.num_local_experts(); ++e) {
    const int64_t elements = plan.rows_per_expert()[static_cast<size_t>(e)] * kHidden;
    for (int64_t i = 0; i < elements; ++i) {
      *row++ *= static_cast<float>(first_expert + e + 1);
    }
  }

  // Each token gets the sum of its experts' rows.
  exchange.combine(
      plan, {.rows = rows.tensor()}, {.x = weft::matrix(x.data(), num_tokens, kHidden)}
  );

  int num_wrong = 0;
  for (int64_t t = 0; t < num_tokens; ++t) {
    const auto expected = static_cast<float>(t % kExperts + 1 + (t + 3) % kExperts + 1);
    for (int64_t h = 0; h < kHidden; ++h) {
      num_wrong += x[static_cast<size_t>(t * kHidden + h)] == expected ? 0 : 1;
    }
  }
  return num_wrong;
}

}  // namespace

int main() {
  weft::run_threads(kRanks, [](weft::Group& group) {
    if (const int num_wrong = run_rank(group); num_wrong > 0) {
      std::printf("rank %d: %d elements are wrong\n", group.rank(), num_wrong);
      std::exit(1);
    }
  });
  std::printf("%d ranks sent their tokens to %d experts and back\n", kRanks, kExperts);
  return 0;
}
