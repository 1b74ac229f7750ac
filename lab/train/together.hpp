// SPDX-License-Identifier: Apache-2.0
// Steps that may fail on only one rank, a file for example, and must then fail on all.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "weft/group.hpp"

namespace weft::moe {

// Collective. Runs `work` on every rank and returns all results, by rank. If it throws Error on any
// rank, every rank throws that error, naming the rank it came from.
std::vector<uint64_t> together(const Group& group, const std::function<uint64_t()>& work);

}  // namespace weft::moe
