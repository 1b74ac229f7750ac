// SPDX-License-Identifier: Apache-2.0
// Worlds in which the hard cases run: each test program defines its own (transports of the CPU in
// worlds.cpp, GPUs in tests/gpu/worlds.cpp).
#pragma once

#include <string>
#include <vector>

#include "support/exchange_case.hpp"

namespace weft::test {

// Their names, part of the tests' names.
[[nodiscard]] std::vector<std::string> worlds();

// Empty if this machine has it, else the reason.
[[nodiscard]] std::string obstacle(const std::string& world);

// The setup as it is to be run there, one way after the other.
[[nodiscard]] std::vector<ExchangeSetup> in_world(
    const std::string& world, const ExchangeSetup& setup
);

}  // namespace weft::test
