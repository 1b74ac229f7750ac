// SPDX-License-Identifier: Apache-2.0
// A rank that is killed while all are at work.
#pragma once

#include <chrono>
#include <vector>

#include "support/case_data.hpp"

namespace weft::test {

// One process for each rank of the case's group repeats the case until it fails; `victim` is killed
// after `delay`. Returns the exit statuses: 128 + SIGKILL of the victim, 0 of a rank that got an
// error that says who died, 1 of any other, whose text goes to stderr.
[[nodiscard]] std::vector<int> run_until_killed(
    const CaseData& data, int victim, std::chrono::microseconds delay
);

}  // namespace weft::test
