// SPDX-License-Identifier: Apache-2.0
// The slow, obvious dispatch and combine of all ranks at once, in one thread. Every executor must
// give the same bits; tests, `weft check` and `weft bench` compare with it.
#pragma once

#include <span>

#include "weft/exchange.hpp"

namespace weft {

// One plan, input and output per rank, by rank; the same views that Exchange::dispatch takes.
//
// Copies each arrival's row (and its scales) to all its slots and each route's weight to its place;
// the other weights of rows that carry a token are zero. Padding rows are zeroed in all outputs,
// slack is not touched. Quantises nothing: DispatchInput::quantise does not count.
void reference_dispatch(
    std::span<const Plan> plans,
    std::span<const DispatchInput> in,
    std::span<const DispatchOutput> out
);

// One plan, input and output per rank, by rank; the same views that Exchange::combine takes.
//
// For each token, for each rank it went to, ascending: partial = the token's rows there, added in
// fp32 in ascending slot order, each first multiplied by its weight (the product rounded to fp32)
// if asked; rounded to the dtype. Then the partials added in fp32 in that order, rounded to the
// dtype. A sum starts with its first term, not with zero. Weights come back to the place they left.
//
// With CombineInput::wire a partial is coded instead of rounded, and so is a domain's sum.
//
// With SumOrder::kTopk: the token's rows in the order of its choices, multiplied likewise, added in
// fp32 and rounded to the dtype once.
//
// `domain_of` [num_ranks] says which ranks share a domain (Topology::domain_of); empty: all do. If
// there are several, the partials of a domain's ranks are added in that way and rounded to the
// dtype, then the sums of the domains, ascending, and rounded again.
// SumOrder::kTopk ignores it.
// Throws Error (kInvalidArgument): scale with kRankMajor, whose rows belong to several routes.
void reference_combine(
    std::span<const Plan> plans,
    std::span<const CombineInput> in,
    std::span<const CombineOutput> out,
    std::span<const int> domain_of = {}
);

}  // namespace weft
