// SPDX-License-Identifier: Apache-2.0
// A schedule on two streams: what the GPU reaches when, and what comes after a throwing callback.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

#include "core/gpu/check.hpp"
#include "core/gpu/stream.hpp"
#include "gpu/gpu_test.hpp"
#include "train/lanes/schedule.hpp"

namespace weft::overlap::test {
namespace {

// Steps in the order in which the GPU comes to them.
class ReachedSteps {
 public:
  [[nodiscard]] Work work(int step) {
    return [this, step](const LaneContext& lane) {
      {
        const std::lock_guard lock(mutex_);
        pending_.push_back(std::make_unique<Note>(Note{this, step}));
      }
      WEFT_CUDA(
          Context{},
          cudaLaunchHostFunc(
              static_cast<cudaStream_t>(lane.stream), &ReachedSteps::note, pending_.back().get()
          )
      );
    };
  }
  [[nodiscard]] const std::vector<int>& steps() const { return steps_; }

 private:
  struct Note {
    ReachedSteps* owner;
    int step;
  };
  static void note(void* data) {
    const auto* note = static_cast<const Note*>(data);
    const std::lock_guard lock(note->owner->mutex_);
    note->owner->steps_.push_back(note->step);
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Note>> pending_;
  std::vector<int> steps_;
};

// Steps of alternating lanes, each waiting for the ones two and three before it.
Schedule ladder(int num_steps, const std::function<Work(int)>& work_of) {
  Schedule schedule;
  for (int i = 0; i < num_steps; ++i) {
    Step step;
    step.name = std::to_string(i);
    step.lane = i % 2 == 0 ? Lane::kCompute : Lane::kExchange;
    step.work = work_of(i);
    for (const int before : {i - 2, i - 3}) {
      if (before >= 0) {
        step.waits.push_back(before);
      }
    }
    schedule.push_back(std::move(step));
  }
  return schedule;
}

class StreamExecutorTest : public weft::test::GpuTest {};

TEST_F(StreamExecutorTest, ReachesEveryStepAfterWhatItWaitsFor) {
  const GpuStream compute(0);
  const GpuStream exchange(0);
  ReachedSteps reached;
  const Schedule schedule = ladder(200, [&](int step) { return reached.work(step); });
  const Trace trace = run_on_streams(schedule, compute.get(), exchange.get());
  ASSERT_EQ(reached.steps().size(), schedule.size());
  std::set<int> done;
  for (const int step : reached.steps()) {
    for (const int wait : schedule[static_cast<size_t>(step)].waits) {
      EXPECT_TRUE(done.contains(wait)) << "step " << step << " before " << wait;
    }
    EXPECT_TRUE(done.insert(step).second);
  }
  ASSERT_EQ(trace.spans.size(), schedule.size());
  std::map<Lane, int64_t> last_end;
  for (const Span& span : trace.spans) {
    EXPECT_LE(span.begin_ns, span.end_ns);
    EXPECT_GE(span.begin_ns, last_end[span.lane]);
    last_end[span.lane] = span.end_ns;
  }
}

TEST_F(StreamExecutorTest, ServesTheNextScheduleAfterACallbackHasThrown) {
  const GpuStream compute(0);
  const GpuStream exchange(0);
  for (int bad = 0; bad < 6; ++bad) {
    const Schedule schedule = ladder(6, [&](int step) -> Work {
      return [step, bad](const LaneContext&) {
        if (step == bad) {
          throw std::runtime_error("as wanted");
        }
      };
    });
    EXPECT_THROW(run_on_streams(schedule, compute.get(), exchange.get()), std::runtime_error);
  }
  ReachedSteps reached;
  run_on_streams(
      ladder(4, [&](int step) { return reached.work(step); }), compute.get(), exchange.get()
  );
  EXPECT_EQ(reached.steps().size(), 4U);
}

}  // namespace
}  // namespace weft::overlap::test
