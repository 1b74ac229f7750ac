// SPDX-License-Identifier: Apache-2.0
#include "overlap/no_pipelining.hpp"

#include <deque>

#include "core/check.hpp"
#include "overlap/chunk_order.hpp"

namespace weft::overlap {
namespace {

std::deque<ChunkPlan> make_chunks(Schedule& schedule, const MicroBatches& batches) {
  WEFT_CHECK_ARG(
      Context{}, batches.num > 0, "schedule: {} micro-batches (at least 1)", batches.num
  );
  std::deque<ChunkPlan> chunks;
  for (int idx = 0; idx < batches.num; ++idx) {
    chunks.emplace_back(schedule, batches.nodes(idx), fmt::format("m{}", idx), idx);
  }
  return chunks;
}

void issue_switch(Schedule& schedule, const char* name, const Work& work) {
  if (work) {
    schedule.add_step({name, Lane::kCompute, -1, work});
  }
}

}  // namespace

Schedule schedule_overlapped(const MicroBatches& batches, const OverlapOptions& options) {
  Schedule schedule;
  std::deque<ChunkPlan> chunks = make_chunks(schedule, batches);
  issue_chunks(&chunks.front(), nullptr, options);
  if (chunks.size() > 1) {
    issue_switch(schedule, "enter_no_sync", batches.enter_no_sync);
    for (size_t idx = 0; idx + 1 < chunks.size(); ++idx) {
      issue_chunks(&chunks[idx + 1], &chunks[idx], options);
    }
    issue_switch(schedule, "exit_no_sync", batches.exit_no_sync);
  }
  issue_chunks(nullptr, &chunks.back(), options);
  return schedule;
}

Schedule schedule_sequential(const MicroBatches& batches, const OverlapOptions& options) {
  Schedule schedule;
  std::deque<ChunkPlan> chunks = make_chunks(schedule, batches);
  if (chunks.size() > 1) {
    issue_switch(schedule, "enter_no_sync", batches.enter_no_sync);
  }
  for (size_t idx = 0; idx < chunks.size(); ++idx) {
    issue_chunks(&chunks[idx], nullptr, options);
    if (idx > 0 && idx + 1 == chunks.size()) {
      issue_switch(schedule, "exit_no_sync", batches.exit_no_sync);
    }
    issue_chunks(nullptr, &chunks[idx], options);
  }
  return schedule;
}

}  // namespace weft::overlap
