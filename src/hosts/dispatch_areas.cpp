// SPDX-License-Identifier: Apache-2.0
#include "hosts/dispatch_areas.hpp"

namespace weft {

DispatchAreas::DispatchAreas(const PlanData& plan, const CrossingChunk& tokens) {
  const DomainTraffic& traffic = *plan.between;
  AreaMap staging;
  AreaMap work;
  AreaMap packed;
  for (const CarriedSource& one : traffic.carried) {
    const int64_t count = one.crossings.size();
    staged.push_back(staging.add(tokens.area_bytes(count)));
    carried.push_back(
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

}  // namespace weft
