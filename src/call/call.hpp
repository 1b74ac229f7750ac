// SPDX-License-Identifier: Apache-2.0
// One collective call as a value: what every rank must pass alike. It is made once from the
// arguments; signature.hpp packs it for the others.
#pragma once

#include <cstdint>
#include <string_view>

#include "call/payload.hpp"
#include "weft/plan.hpp"

namespace weft {

// Names any number, as a peer's word may hold any.
[[nodiscard]] constexpr std::string_view op_name(Op op) {
  constexpr std::string_view kNames[] = {
      "call", "plan", "dispatch", "combine", "plan and dispatch"};
  const auto index = static_cast<size_t>(op);
  return index < std::size(kNames) ? kNames[index] : "nothing known";
}

// Place where a source writes an arrival's row: the receiver chooses, the sources follow.
enum class Place : uint32_t {
  kStaging,      // row i of the receiver's staging, of arrival i; copied there to every slot
  kPrimarySlot,  // the arrival's first slot in the output; the receiver copies it to the others
  kEverySlot,    // CPU: a source's store costs no more than the receiver's own
  kEager,        // GPU, before slots are known: the token's place among the receiver's eager rows
  kCopied,       // GPU, by copy engines, in blocks: a block of the receiver's, by source
};

// Arguments of a call; those that its operation does not have keep their default.
struct Call {
  Op op = Op::kNone;
  int64_t number = 0;  // CallOptions::number
  // Number of the call that made the plan, for dispatch and combine; for a plan 0, or the number of
  // the plan that is imported from the host.
  int64_t plan_number = 0;

  PlanOptions options = {};  // these four of a plan
  int topk = 0;
  bool from_map = false;
  bool has_weights = false;

  PayloadFormat payload = {};  // of dispatch and combine, and of a plan in one launch with dispatch
  CombineScale scale = CombineScale::kNone;
  bool has_copies = false;   // copy engines carry the rows
  bool is_by_route = false;  // of a combine: a row returns for each route, not for each arrival
  // Between hosts, ahead of a call that lacks memory: bytes that it needs for each token.
  int64_t token_room = 0;
};

}  // namespace weft
