// SPDX-License-Identifier: Apache-2.0
// Checks which micro-batches meet on a rank of a pipeline, and that ranks do not wait in a circle.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <tuple>

#include "support/errors.hpp"
#include "weft/overlap.hpp"

namespace weft::overlap::test {
namespace {

using weft::test::text_of;
using weft::test::thrown_by;

using Names = std::vector<std::string>;

// "F m1.c0", "B m0.c1"
Names runs_of(const PipelineShape& shape) {
  Names runs;
  for (const StagePair& pair : pipeline_order(shape)) {
    for (const auto& [what, stage] : {std::pair('F', pair.forward), {'B', pair.backward}}) {
      if (stage) {
        runs.push_back(fmt::format("{} m{}.c{}", what, stage->micro_batch, stage->chunk));
      }
    }
  }
  return runs;
}

int num_warm_up(const PipelineShape& shape) {
  const std::vector<StagePair> pairs = pipeline_order(shape);
  return static_cast<int>(std::ranges::count_if(pairs, [](const StagePair& pair) {
    return !pair.backward;
  }));
}

TEST(PipelineOrderTest, WarmsUpWithOneForwardMore) {
  EXPECT_EQ(num_warm_up({0, 2, 2, 4}), 5);
  EXPECT_EQ(num_warm_up({1, 2, 2, 4}), 3);
  EXPECT_EQ(num_warm_up({0, 4, 2, 8}), 11);
  EXPECT_EQ(num_warm_up({3, 4, 2, 8}), 5);
  EXPECT_EQ(num_warm_up({0, 2, 2, 2}), 4);  // all there are
}

TEST(PipelineOrderTest, PairsForwardsAndBackwards) {
  const Names expected = {
      "F m0.c0",
      "F m1.c0",
      "F m0.c1",  // warm-up
      "F m1.c1",
      "B m0.c1",
      "F m2.c0",
      "B m1.c1",  // pairs
      "F m3.c0",
      "B m0.c0",
      "F m2.c1",
      "B m1.c0",
      "F m3.c1",
      "B m2.c1",
      "B m3.c1",
      "B m2.c0",
      "B m3.c0",
  };
  EXPECT_EQ(runs_of({1, 2, 2, 4}), expected);
}

TEST(PipelineOrderTest, OfOneStageIsAScheduleWithoutAPipeline) {
  EXPECT_EQ(runs_of({}), (Names{"F m0.c0", "B m0.c0"}));
  EXPECT_EQ(
      runs_of({.num_micro_batches = 3}),
      (Names{"F m0.c0", "F m1.c0", "B m0.c0", "F m2.c0", "B m1.c0", "B m2.c0"})
  );
}

TEST(PipelineOrderTest, RefusesShapesThatAreNone) {
  const auto text = [](const PipelineShape& shape) {
    return text_of(thrown_by([&] { static_cast<void>(pipeline_order(shape)); }));
  };
  EXPECT_EQ(text({2, 2, 1, 2}), "schedule: rank 2 of a pipeline of 2");
  EXPECT_EQ(text({0, 2, 0, 2}), "schedule: 0 chunks (at least 1)");
  EXPECT_EQ(
      text({0, 2, 1, 3}), "schedule: 3 micro-batches in a pipeline of 2 ranks (a multiple of them)"
  );
}

// All ranks of a pipeline, step by step: a receive waits until it was sent to.
class Pipeline {
 public:
  Pipeline(int num_ranks, int num_chunks) : last_stage_(num_ranks * num_chunks - 1) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      std::deque<Event>& events = ranks_.emplace_back();
      for (const StagePair& pair : pipeline_order({rank, num_ranks, num_chunks, 2 * num_ranks})) {
        const auto no_layers = [](const auto& stage) {
          return stage ? std::optional<int>(0) : std::nullopt;
        };
        for (const PairStep& step :
             pair_order({no_layers(pair.forward), no_layers(pair.backward)})) {
          const VirtualStage& stage = step.is_backward ? *pair.backward : *pair.forward;
          events.push_back({step, stage.micro_batch, stage.chunk * num_ranks + rank});
        }
      }
    }
  }

  // Until nothing moves any more.
  void run() {
    bool has_moved = true;
    while (has_moved) {
      has_moved = false;
      for (std::deque<Event>& events : ranks_) {
        while (!events.empty() && take(events.front())) {
          events.pop_front();
          has_moved = true;
        }
      }
    }
  }

  [[nodiscard]] bool is_over() const {
    return std::ranges::all_of(ranks_, [](const auto& events) { return events.empty(); }) &&
           letters_.empty();
  }
  // The stages that a micro-batch passed forward, then those backward.
  [[nodiscard]] const std::vector<int>& route(int micro_batch) { return routes_[micro_batch]; }

 private:
  struct Event {
    PairStep step;
    int micro_batch;
    int stage;
  };

  bool take(const Event& event) {
    const int stage = event.stage;
    const auto letter = [&](bool is_backward, int to) {
      return std::tuple(is_backward, event.micro_batch, to);
    };
    switch (event.step.action) {
      case Action::kPreForward:
        return stage == 0 || letters_.erase(letter(false, stage)) == 1;
      case Action::kPreBackward:
        return stage == last_stage_ || letters_.erase(letter(true, stage)) == 1;
      case Action::kPostForward:
        return stage == last_stage_ || letters_.insert(letter(false, stage + 1)).second;
      case Action::kPostBackward:
        return stage == 0 || letters_.insert(letter(true, stage - 1)).second;
      case Action::kForward:
        if (event.step.node == NodeKind::kPreProcess) {
          routes_[event.micro_batch].push_back(stage);
        }
        return true;
      case Action::kBackward:
        if (event.step.node == NodeKind::kPostProcess) {
          routes_[event.micro_batch].push_back(stage);
        }
        return true;
      default:
        return true;
    }
  }

  int last_stage_;
  std::deque<std::deque<Event>> ranks_;
  std::set<std::tuple<bool, int, int>> letters_;
  std::map<int, std::vector<int>> routes_;
};

TEST(PipelineOrderTest, CarriesEveryMicroBatchThroughAllStagesAndBack) {
  for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
    for (int num_chunks = 1; num_chunks <= 3; ++num_chunks) {
      SCOPED_TRACE(fmt::format("{} ranks, {} chunks", num_ranks, num_chunks));
      Pipeline pipeline(num_ranks, num_chunks);
      pipeline.run();
      EXPECT_TRUE(pipeline.is_over());
      std::vector<int> expected(static_cast<size_t>(num_ranks * num_chunks));
      std::iota(expected.begin(), expected.end(), 0);
      const std::vector<int> back(expected.rbegin(), expected.rend());
      expected.insert(expected.end(), back.begin(), back.end());
      for (int micro_batch = 0; micro_batch < 2 * num_ranks; ++micro_batch) {
        EXPECT_EQ(pipeline.route(micro_batch), expected);
      }
    }
  }
}

}  // namespace
}  // namespace weft::overlap::test
