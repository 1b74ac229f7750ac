// SPDX-License-Identifier: Apache-2.0
// What waits for what, and when values go.
#include <gtest/gtest.h>

#include <map>

#include "overlap/check_schedule.hpp"
#include "overlap/no_pipelining.hpp"
#include "overlap/plain_nodes.hpp"
#include "overlap/recorder.hpp"
#include "overlap/release_rules.hpp"
#include "support/errors.hpp"

namespace weft::overlap::test {
namespace {

using weft::test::text_of;
using weft::test::thrown_by;

// reaches[a][b]: step a has ended before step b begins, whatever the lanes' speed.
using Reach = std::vector<std::vector<bool>>;

// By transitive closure; check_schedule() counts along lanes instead.
Reach order_of(const Schedule& schedule) {
  const auto& steps = schedule.steps();
  Reach reaches(steps.size(), std::vector<bool>(steps.size(), false));
  std::array<int, kNumLanes> last = {-1, -1};
  for (size_t b = 0; b < steps.size(); ++b) {
    std::vector<int> before = steps[b].waits;
    if (int& previous = last[lane_idx(steps[b].lane)]; previous >= 0) {
      before.push_back(previous);
    }
    last[lane_idx(steps[b].lane)] = static_cast<int>(b);
    for (const int wait : before) {
      const auto direct = static_cast<size_t>(wait);
      reaches[direct][b] = true;
      for (size_t a = 0; a < steps.size(); ++a) {
        reaches[a][b] = reaches[a][b] || reaches[a][direct];
      }
    }
  }
  return reaches;
}

struct Users {
  std::vector<size_t> writers;
  std::vector<size_t> readers;
  std::vector<size_t> freers;
};

std::vector<Users> users_of(const Schedule& schedule) {
  std::vector<Users> users(schedule.values().size());
  for (size_t step = 0; step < schedule.steps().size(); ++step) {
    const auto note = [&](const std::vector<int>& values, std::vector<size_t> Users::*list) {
      for (const int value : values) {
        (users[static_cast<size_t>(value)].*list).push_back(step);
      }
    };
    note(schedule.steps()[step].writes, &Users::writers);
    note(schedule.steps()[step].reads, &Users::readers);
    note(schedule.steps()[step].frees, &Users::freers);
  }
  return users;
}

void expect_safe(const Schedule& schedule) {
  const Reach reaches = order_of(schedule);
  const std::vector<Users> users = users_of(schedule);
  for (size_t value = 0; value < users.size(); ++value) {
    SCOPED_TRACE(schedule.values()[value].name);
    ASSERT_LE(users[value].writers.size(), 1U);
    ASSERT_EQ(users[value].freers.size(), 1U);
    const size_t freer = users[value].freers[0];
    for (const size_t reader : users[value].readers) {
      for (const size_t writer : users[value].writers) {
        EXPECT_TRUE(reaches[writer][reader]) << schedule.steps()[reader].name;
      }
      EXPECT_TRUE(reader == freer || reaches[reader][freer]) << schedule.steps()[reader].name;
    }
  }
}

// By value, the step that frees it.
std::map<std::string, std::string> freers_of(const Schedule& schedule) {
  std::map<std::string, std::string> freers;
  for (const Step& step : schedule.steps()) {
    for (const int value : step.frees) {
      freers[schedule.values()[static_cast<size_t>(value)].name] = step.name;
    }
  }
  return freers;
}

TEST(OverlapDependencyTest, HoldForEveryShapeOfSchedule) {
  for (const Kind kind : {Kind::kMoe, Kind::kDense, Kind::kMtp}) {
    for (int choice = 0; choice < 32; ++choice) {
      const auto has = [&](int bit) { return (choice >> bit & 1) != 0; };
      for (int layers = 1; layers <= 4; ++layers) {
        MicroBatches batches;
        batches.num = 3;
        batches.nodes = [&](int) {
          ChunkNodes nodes = plain_nodes({layers, kind, has(0), has(1), has(2)});
          for (LayerNodes& layer : nodes.layers) {
            set_early_release(layer, {.num_local_experts = has(3) ? 2 : 1});
          }
          return nodes;
        };
        const Schedule schedule = schedule_overlapped(batches, {.early_attention_release = has(4)});
        check_schedule(schedule);
        expect_safe(schedule);
      }
    }
  }
}

TEST(OverlapDependencyTest, LetDispatchBackwardPassTheWeightGradientOfTheExperts) {
  const Schedule schedule = schedule_overlapped({2, [](int) { return plain_nodes({2}); }});
  const Reach reaches = order_of(schedule);
  std::map<std::string, size_t> idx;
  for (size_t step = 0; step < schedule.steps().size(); ++step) {
    idx[schedule.steps()[step].name] = step;
  }
  const auto are_free_of_each_other = [&](const char* a, const char* b) {
    return !reaches[idx.at(a)][idx.at(b)] && !reaches[idx.at(b)][idx.at(a)];
  };
  EXPECT_TRUE(are_free_of_each_other("m0.L1.moe_combine.bwd", "m1.L0.pre_dispatch.fwd"));
  EXPECT_TRUE(are_free_of_each_other("m1.L0.moe_dispatch.fwd", "m0.L1.mlp.bwd"));
  EXPECT_TRUE(are_free_of_each_other("m0.L1.moe_dispatch.bwd", "m0.L1.mlp.backward_dw"));
  EXPECT_TRUE(are_free_of_each_other("m0.L1.moe_dispatch.bwd", "m1.L0.mlp.fwd"));
  EXPECT_TRUE(are_free_of_each_other("m1.L0.moe_combine.fwd", "m0.L1.pre_dispatch.bwd"));
  EXPECT_FALSE(are_free_of_each_other("m0.L1.moe_dispatch.bwd", "m0.L1.mlp.bwd"));
}

TEST(OverlapDependencyTest, HideEveryExchangeUnderTheOtherMicroBatch) {
  const Schedule schedule = schedule_overlapped({2, [](int) { return plain_nodes({1}); }});
  std::map<std::string, Span> spans;
  for (const Span& span : Recorder().run(schedule).spans) {
    spans[span.name] = span;
  }
  const auto run_together = [&](const char* a, const char* b) {
    return spans.at(a).begin_ns < spans.at(b).end_ns && spans.at(b).begin_ns < spans.at(a).end_ns;
  };
  EXPECT_TRUE(run_together("m0.L0.moe_combine.bwd", "m1.L0.pre_dispatch.fwd"));
  EXPECT_TRUE(run_together("m1.L0.moe_dispatch.fwd", "m0.L0.mlp.bwd"));
  EXPECT_TRUE(run_together("m0.L0.moe_dispatch.bwd", "m0.L0.mlp.backward_dw"));
  EXPECT_TRUE(run_together("m1.L0.moe_combine.fwd", "m0.L0.pre_dispatch.bwd"));
}

TEST(OverlapReleaseTest, FreesInputsAfterTheForwardWhereTheLayerAllowsIt) {
  const auto batches = [](Dispatcher dispatcher, int num_local_experts) {
    return MicroBatches{1, [=](int) {
                          ChunkNodes nodes = plain_nodes({1});
                          set_early_release(nodes.layers[0], {dispatcher, num_local_experts});
                          return nodes;
                        }};
  };
  auto freers = freers_of(schedule_overlapped(batches(Dispatcher::kAllToAll, 2)));
  EXPECT_EQ(freers.at("m0.L0.moe_combine.input"), "m0.L0.moe_combine.fwd");
  EXPECT_EQ(freers.at("m0.L0.mlp.input"), "m0.L0.mlp.fwd");
  EXPECT_EQ(freers.at("m0.L0.moe_dispatch.input"), "m0.L0.moe_dispatch.fwd");
  EXPECT_EQ(freers.at("m0.L0.pre_dispatch.input"), "m0.L0.pre_dispatch.backward_dw");
  EXPECT_EQ(freers.at("m0.L0.mlp.saved"), "m0.L0.mlp.backward_dw");
  EXPECT_EQ(freers.at("m0.L0.mlp.gradient"), "m0.L0.mlp.backward_dw");
  EXPECT_EQ(freers.at("m0.L0.moe_combine.saved"), "m0.L0.moe_combine.bwd");
  EXPECT_EQ(freers.at("m0.output"), "m0.post_process.bwd");
  EXPECT_EQ(freers.at("m0.state"), "m0.release_state");

  freers = freers_of(schedule_overlapped(batches(Dispatcher::kHybridEp, 2)));
  EXPECT_EQ(freers.at("m0.L0.moe_combine.input"), "m0.L0.moe_combine.fwd");
  EXPECT_EQ(freers.at("m0.L0.mlp.input"), "m0.L0.mlp.backward_dw");
  EXPECT_EQ(freers.at("m0.L0.moe_dispatch.input"), "m0.L0.moe_dispatch.bwd");
}

TEST(OverlapReleaseTest, FollowsTheTable) {
  struct Row {
    LayerKind kind;
    bool frees_dispatch_input;
    bool frees_mlp_input;
  };
  const std::vector<Row> rows = {
      {{Dispatcher::kAllToAll, 1}, true, false},
      {{Dispatcher::kAllToAll, 2}, true, true},
      {{Dispatcher::kAllToAll, 1, true}, true, true},
      {{Dispatcher::kAllToAll, 2, false, true}, false, true},
      {{Dispatcher::kAllGather, 1}, true, true},
      {{Dispatcher::kDeepEp, 1}, false, true},
      {{Dispatcher::kDeepEp, 2, true}, false, true},
      {{Dispatcher::kHybridEp, 2}, false, false},
      {{Dispatcher::kHybridEp, 2, true}, false, true},
      {{Dispatcher::kNcclEp, 2}, false, false},
      {{Dispatcher::kNcclEp, 1, true}, false, true},
  };
  for (size_t idx = 0; idx < rows.size(); ++idx) {
    SCOPED_TRACE(idx);
    LayerNodes nodes;
    set_early_release(nodes, rows[idx].kind);
    EXPECT_FALSE(nodes.pre_dispatch.free_input);
    EXPECT_EQ(nodes.moe_dispatch.free_input, rows[idx].frees_dispatch_input);
    EXPECT_EQ(nodes.mlp.free_input, rows[idx].frees_mlp_input);
    EXPECT_TRUE(nodes.moe_combine.free_input);
    EXPECT_FALSE(nodes.mtp_post_process.free_input);
  }
}

Step step(const char* name, Lane lane) {
  Step made;
  made.name = name;
  made.lane = lane;
  return made;
}

TEST(CheckScheduleTest, FindsAReaderThatDoesNotWait) {
  Schedule schedule;
  const int row = schedule.add_value("row");
  Step writer = step("writer", Lane::kCompute);
  writer.writes = {row};
  Step reader = step("reader", Lane::kExchange);
  reader.reads = {row};
  const int written = schedule.add_step(writer);
  Schedule fixed = schedule;
  schedule.add_step(reader);
  EXPECT_EQ(
      text_of(thrown_by([&] { check_schedule(schedule); })),
      "schedule: row may be read by reader before writer has written it"
  );
  reader.waits = {written};
  fixed.add_step(reader);
  check_schedule(fixed);
}

TEST(CheckScheduleTest, FindsAReaderBehindTheRelease) {
  Schedule schedule;
  const int row = schedule.add_value("row");
  Step freer = step("freer", Lane::kCompute);
  freer.frees = {row};
  schedule.add_step(freer);
  Step reader = step("reader", Lane::kExchange);
  reader.reads = {row};
  schedule.add_step(reader);
  EXPECT_EQ(
      text_of(thrown_by([&] { check_schedule(schedule); })),
      "schedule: row may be read by reader after freer has freed it"
  );
  EXPECT_EQ(
      text_of(thrown_by([&] { static_cast<void>(Recorder().run(schedule)); })),
      "schedule: row may be read by reader after freer has freed it"
  );
}

TEST(CheckScheduleTest, FindsWhatIsDoneTwice) {
  Schedule freed;
  const int row = freed.add_value("row");
  Step once = step("once", Lane::kCompute);
  once.frees = {row};
  Step again = step("again", Lane::kCompute);
  again.frees = {row};
  freed.add_step(once);
  freed.add_step(again);
  EXPECT_EQ(
      text_of(thrown_by([&] { check_schedule(freed); })),
      "schedule: row is freed by once and again by again"
  );
}

TEST(ScheduleTest, LetsAReleaseWaitForReadersOfTheOtherLane) {
  Schedule schedule;
  const int row = schedule.add_value("row");
  Step reader = step("reader", Lane::kExchange);
  reader.reads = {row};
  schedule.add_step(reader);
  Step freer = step("freer", Lane::kCompute);
  freer.frees = {row};
  schedule.add_step(freer);
  EXPECT_EQ(schedule.steps()[1].waits, std::vector<int>{0});
  check_schedule(schedule);
}

TEST(ScheduleTest, RefusesToWaitForLaterSteps) {
  Schedule schedule;
  Step circular = step("circular", Lane::kCompute);
  circular.waits = {0};
  EXPECT_EQ(
      text_of(thrown_by([&] { schedule.add_step(circular); })),
      "schedule: circular names step 0 (there are 0 so far)"
  );
}

}  // namespace
}  // namespace weft::overlap::test
