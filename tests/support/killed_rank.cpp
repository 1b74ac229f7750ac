// SPDX-License-Identifier: Apache-2.0
#include "support/killed_rank.hpp"

#include <fmt/format.h>

#include <csignal>
#include <iostream>
#include <thread>

#include "support/errors.hpp"
#include "support/run_case.hpp"

namespace weft::test {

std::vector<int> run_until_killed(
    const CaseData& data, int victim, std::chrono::microseconds delay
) {
  return run_forked(data.setup.num_ranks, [&](const Group& group) {
    Exchange exchange = make_exchange(group, data.setup);
    if (group.rank() == victim) {
      std::thread([delay] {
        std::this_thread::sleep_for(delay);
        std::raise(SIGKILL);
      }).detach();
    }
    std::string difference;
    const auto thrown = thrown_by([&] {
      while (difference.empty()) {
        difference = run_cases(exchange, {&data, 1});
      }
    });
    const bool is_named =
        thrown && thrown->is_peer_error &&
        thrown->text.find(fmt::format("rank {} died ", victim)) != std::string::npos;
    if (!is_named) {
      std::cerr << fmt::format("rank {}: {}\n", group.rank(), thrown ? thrown->text : difference);
    }
    return is_named ? 0 : 1;
  });
}

}  // namespace weft::test
