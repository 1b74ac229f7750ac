// SPDX-License-Identifier: Apache-2.0
#include "hosts/call_memory.hpp"

namespace weft {

DispatchAreas::DispatchAreas(const PlanData& plan, const MessageFormat& tokens) {
  const DomainTraffic& traffic = *plan.between;
  AreaMap staging;
  AreaMap work;
  AreaMap packed;
  for (const ForwardedSource& one : traffic.forwarded) {
    const int64_t count = one.crossings.size();
    staged.push_back(staging.add(tokens.area_bytes(count)));
    forwarded.push_back(
        {work.add(count * tokens.row_bytes),
         work.add(count * tokens.weight_bytes),
         work.add(count * tokens.scale_bytes)}
    );
  }
  own_weights = work.add(plan.shape.num_tokens * tokens.weight_bytes);
  int64_t num_chunks = 0;
  for (const auto& sent : traffic.sent) {
    const auto count = static_cast<int64_t>(sent.size());
    messages.push_back(packed.add(tokens.area_bytes(count)));
    chunks.push_back(num_chunks);
    num_chunks += tokens.num_chunks(count);
  }
  room = {
      .staging = staging.num_bytes(),
      .messages = packed.num_bytes(),
      .work = work.num_bytes(),
      .num_messages = static_cast<uint64_t>(num_chunks)};
}

CombineAreas::CombineAreas(
    const PlanData& plan, const MessageFormat& sums, const MessageFormat& weights
) {
  const DomainTraffic& traffic = *plan.between;
  AreaMap staging;
  AreaMap work;
  AreaMap messages;
  int64_t num_chunks = 0;
  for (const ForwardedSource& one : traffic.forwarded) {
    const int64_t count = one.crossings.size();
    forwarded.push_back(
        {work.add(count * sums.row_bytes),
         work.add(count * sums.weight_bytes),
         work.add(count * weights.weight_bytes)}
    );
    staged_weights.push_back(staging.add(weights.area_bytes(count)));
    sum_messages.push_back(messages.add(sums.area_bytes(count)));
    sum_chunks.push_back(num_chunks);
    num_chunks += sums.num_chunks(count);
  }
  int64_t num_parts = plan.shape.num_tokens;
  for (const auto& tokens : traffic.sent) {
    const auto count = static_cast<int64_t>(tokens.size());
    first_part.push_back(num_parts);
    num_parts += count;
    staged_sums.push_back(staging.add(sums.area_bytes(count)));
    weight_messages.push_back(messages.add(weights.area_bytes(count)));
    weight_chunks.push_back(num_chunks);
    num_chunks += weights.num_chunks(count);
  }
  parts = work.add(num_parts * sums.row_bytes);
  part_weights = work.add(num_parts * sums.weight_bytes);
  own_weights = work.add(plan.shape.num_tokens * weights.weight_bytes);
  room = {
      .staging = staging.num_bytes(),
      .messages = messages.num_bytes(),
      .work = work.num_bytes(),
      .num_messages = static_cast<uint64_t>(num_chunks)};
}

}  // namespace weft
