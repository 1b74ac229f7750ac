// SPDX-License-Identifier: Apache-2.0
#include "support/soak.hpp"

#include "support/run_case.hpp"

namespace weft::test {

SoakResult soak(
    const std::string& transport,
    uint64_t seed,
    int64_t num_calls,
    const std::function<void(int64_t)>& progress
) {
  constexpr uint64_t kCasesPerExchange = 10;
  SoakResult result;
  for (uint64_t round = seed; result.num_calls < num_calls && result.failure.empty(); ++round) {
    ExchangeSetup setup = random_setup(round);
    setup.transport = transport;
    std::vector<CaseData> cases;
    for (uint64_t i = 0; i < kCasesPerExchange; ++i) {
      cases.push_back(make_case_data(setup, random_case(setup, round * kCasesPerExchange + i)));
      result.num_calls += 1 + static_cast<int64_t>(cases.back().calls.size());
    }
    result.failure = run_cases_on_threads(cases);
    if (progress) {
      progress(result.num_calls);
    }
  }
  return result;
}

}  // namespace weft::test
