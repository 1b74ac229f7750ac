// SPDX-License-Identifier: Apache-2.0
#include "survive/roll.hpp"

#include <algorithm>
#include <iterator>

namespace weft {

bool Roll::Members::has(int rank) const {
  return std::ranges::binary_search(ranks, rank);
}

std::vector<int> Roll::Members::beside(const Members& others) const {
  std::vector<int> rest;
  std::ranges::copy_if(ranks, std::back_inserter(rest), [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    return !others.has(rank) || others.lives[at] != lives[at];
  });
  return rest;
}

}  // namespace weft
