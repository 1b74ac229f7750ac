// SPDX-License-Identifier: Apache-2.0
// Runs cases through an Exchange and compares every byte with what the reference says.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "support/case_data.hpp"
#include "weft/exchange.hpp"

namespace weft::test {

// Returns the setup's domains, in the form of Topology::domains.
[[nodiscard]] std::vector<std::vector<int>> domains_of(const ExchangeSetup& setup);

// Collective. An exchange as the setup wants it, in domains that the group need not have.
[[nodiscard]] Exchange make_exchange(const Group& group, const ExchangeSetup& setup);
// Like the one above, by a config that need not be the setup's.
[[nodiscard]] Exchange make_exchange(
    const Group& group, const ExchangeSetup& setup, const ExchangeConfig& config
);

// Collective. Makes the plans of all cases, then uses them in another order, so that several are
// alive at once. Returns the first difference on this rank with the case's description, or nothing.
// Differences do not stop it: the calls that follow are collective. With a `group` no rank frees
// memory before all have finished: that keeps other threads of the process out of CUDA until the
// GPU has nothing to do, and it may wait for a rank that has yet to call.
[[nodiscard]] std::string run_cases(
    Exchange& exchange, std::span<const CaseData> cases, const Group* group = nullptr
);

// Calls run_cases() on one thread per rank, with an exchange made for the cases. Returns what any
// rank has to say; what a rank throws becomes text, too.
[[nodiscard]] std::string run_cases_on_threads(std::span<const CaseData> cases);
// Does the same on one process per rank; writes the text to stderr, returns the exit statuses.
[[nodiscard]] std::vector<int> run_cases_on_processes(std::span<const CaseData> cases);

[[nodiscard]] std::string run_on_threads(const ExchangeSetup& setup, const Case& spec);

}  // namespace weft::test
