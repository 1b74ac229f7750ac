// SPDX-License-Identifier: Apache-2.0
#include "hosts/call_memory.hpp"

namespace weft {
namespace {

// Takes areas of each memory for a call.
class CallAreas {
 public:
  uint64_t stage(int64_t bytes) { return staging_.add(static_cast<uint64_t>(bytes)); }
  uint64_t take(int64_t bytes) { return work_.add(static_cast<uint64_t>(bytes)); }
  MessageArea pack(const MessageFormat& format, int64_t count) {
    const MessageArea area = {
        messages_.add(static_cast<uint64_t>(format.area_bytes(count))), num_messages_};
    num_messages_ += format.num_chunks(count);
    return area;
  }
  [[nodiscard]] CallRoom room() const {
    return {
        .staging = staging_.num_bytes(),
        .messages = messages_.num_bytes(),
        .work = work_.num_bytes(),
        .num_messages = static_cast<uint64_t>(num_messages_)};
  }

 private:
  AreaMap staging_;
  AreaMap work_;
  AreaMap messages_;
  int64_t num_messages_ = 0;
};

}  // namespace

DispatchAreas::DispatchAreas(const PlanData& plan, const MessageFormat& tokens) {
  CallAreas areas;
  for (const ForwardedSource& one : plan.between->forwarded) {
    const int64_t count = one.crossings.size();
    staged.push_back(areas.stage(tokens.area_bytes(count)));
    forwarded.push_back(
        {areas.take(count * tokens.row_bytes),
         areas.take(count * tokens.weight_bytes),
         areas.take(count * tokens.scale_bytes)}
    );
  }
  own_weights = areas.take(plan.shape.num_tokens * tokens.weight_bytes);
  for (const auto& sent : plan.between->sent) {
    messages.push_back(areas.pack(tokens, static_cast<int64_t>(sent.size())));
  }
  room = areas.room();
}

CombineAreas::CombineAreas(
    const PlanData& plan, const MessageFormat& sums, const MessageFormat& weights
) {
  CallAreas areas;
  for (const ForwardedSource& one : plan.between->forwarded) {
    const int64_t count = one.crossings.size();
    forwarded.push_back(
        {areas.take(count * sums.row_bytes),
         areas.take(count * sums.weight_bytes),
         areas.take(count * weights.weight_bytes)}
    );
    staged_weights.push_back(areas.stage(weights.area_bytes(count)));
    sum_messages.push_back(areas.pack(sums, count));
  }
  int64_t num_parts = plan.shape.num_tokens;
  for (const auto& tokens : plan.between->sent) {
    const auto count = static_cast<int64_t>(tokens.size());
    first_part.push_back(num_parts);
    num_parts += count;
    staged_sums.push_back(areas.stage(sums.area_bytes(count)));
    weight_messages.push_back(areas.pack(weights, count));
  }
  parts = areas.take(num_parts * sums.row_bytes);
  part_weights = areas.take(num_parts * sums.weight_bytes);
  own_weights = areas.take(plan.shape.num_tokens * weights.weight_bytes);
  room = areas.room();
}

}  // namespace weft
