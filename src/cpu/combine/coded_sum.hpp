// SPDX-License-Identifier: Apache-2.0
// Sums of rows that travel coded (Wire of weft/calls.hpp), in the place of sum_groups() of
// row_sum.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/combine/row_sum.hpp"
#include "weft/calls.hpp"

namespace weft {

// Purpose of a sum.
enum class SumFor : uint8_t {
  kRank,    // what a rank has for a token: one group of rows, coded
  kDomain,  // what a domain has: what its groups' codes stand for, coded
  kToken,   // the same, rounded to bf16
};

// Adds groups up, each a code that has come, or bf16 rows, which are added in fp32 and coded first.
// `out`: a coded or a bf16 row. `num_cols`: a multiple of kQuantiseGroup. The rest as for
// sum_groups().
void sum_coded_groups(
    std::byte* out, const RowGroups& groups, Wire wire, SumFor what, int64_t num_cols
);

}  // namespace weft
