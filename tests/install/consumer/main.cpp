// SPDX-License-Identifier: Apache-2.0
// A round trip through the installed library: each token comes back once for each of its routes.
#include <cstdio>
#include <vector>

#include "weft/weft.hpp"

int main() {
  weft::Group group = std::move(weft::Group::local(1).front());
  weft::Exchange exchange(group, {.hidden = 4, .max_tokens = 2, .num_experts = 2, .max_topk = 2});
  const std::vector<int32_t> topk_idx = {0, 1, 1, -1};
  const weft::Plan plan = exchange.plan({.topk_idx = weft::matrix(topk_idx.data(), 2, 2)});

  const std::vector<float> x = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> rows(static_cast<size_t>(plan.num_rows()) * 4);
  std::vector<float> out(x.size());
  exchange.dispatch(
      plan,
      {.x = weft::matrix(x.data(), 2, 4)},
      {.rows = weft::matrix(rows.data(), plan.num_rows(), 4)}
  );
  exchange.combine(
      plan,
      {.rows = weft::matrix(rows.data(), plan.num_rows(), 4)},
      {.x = weft::matrix(out.data(), 2, 4)}
  );

  const std::vector<float> expected = {2, 4, 6, 8, 5, 6, 7, 8};
  if (out != expected) {
    std::fputs("consumer: combine returned other sums than expected\n", stderr);
    return 1;
  }
  std::puts("consumer: ok");
  return 0;
}
