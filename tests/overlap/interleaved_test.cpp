// SPDX-License-Identifier: Apache-2.0
#include "overlap/interleaved.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <tuple>

#include "overlap/check_schedule.hpp"
#include "overlap/plain_nodes.hpp"
#include "overlap/thread_executor.hpp"
#include "support/errors.hpp"

namespace weft::overlap::test {
namespace {

using weft::test::text_of;
using weft::test::thrown_by;

using Names = std::vector<std::string>;

Schedule plain_schedule(const PipelineShape& shape) {
  const PointToPoint::Transfer nothing = [](const VirtualStage&, const LaneContext&) {};
  const auto nodes = [](const VirtualStage&) { return plain_nodes({1}); };
  return schedule_interleaved({shape, nodes, {nothing, nothing, nothing, nothing}});
}

// Which chunk begins what, from the steps that begin it.
Names runs_of(const Schedule& schedule) {
  Names runs;
  for (const std::string& name : step_names(schedule)) {
    const std::string stage = name.substr(0, name.find('.', name.find('.') + 1));
    if (name == stage + ".pre_process.fwd") {
      runs.push_back("F " + stage);
    } else if (name == stage + ".post_process.bwd") {
      runs.push_back("B " + stage);
    }
  }
  return runs;
}

TEST(InterleavedTest, WarmsUpWithOneForwardMore) {
  EXPECT_EQ(num_warm_up({0, 2, 2, 4}), 5);
  EXPECT_EQ(num_warm_up({1, 2, 2, 4}), 3);
  EXPECT_EQ(num_warm_up({0, 4, 2, 8}), 11);
  EXPECT_EQ(num_warm_up({3, 4, 2, 8}), 5);
  EXPECT_EQ(num_warm_up({0, 2, 2, 2}), 4);  // all there are
}

TEST(InterleavedTest, PairsForwardsAndBackwards) {
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
  EXPECT_EQ(runs_of(plain_schedule({1, 2, 2, 4})), expected);
}

TEST(InterleavedTest, TransfersNothingBeyondTheEnds) {
  const auto hooks_of = [](const Schedule& schedule) {
    std::set<std::string> hooks;
    for (const std::string& name : step_names(schedule)) {
      const size_t dot = name.rfind('.');
      if (name.substr(dot).starts_with(".pre_") || name.substr(dot).starts_with(".post_")) {
        hooks.insert(name.substr(name.find('.') + 1));
      }
    }
    return hooks;
  };
  EXPECT_EQ(
      hooks_of(plain_schedule({0, 2, 2, 2})),
      (std::set<std::string>{
          "c0.post_forward",
          "c0.pre_backward",
          "c1.pre_forward",
          "c1.post_forward",
          "c1.pre_backward",
          "c1.post_backward"})
  );
  EXPECT_EQ(
      hooks_of(plain_schedule({1, 2, 2, 2})),
      (std::set<std::string>{
          "c0.pre_forward",
          "c0.post_forward",
          "c0.pre_backward",
          "c0.post_backward",
          "c1.pre_forward",
          "c1.post_backward"})
  );
}

TEST(InterleavedTest, IsSafeOnEveryRank) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (int chunks = 1; chunks <= 3; ++chunks) {
      for (int rank = 0; rank < ranks; ++rank) {
        check_schedule(plain_schedule({rank, ranks, chunks, 2 * ranks}));
      }
    }
  }
}

TEST(InterleavedTest, RefusesShapesThatAreNone) {
  const auto text = [](const PipelineShape& shape) {
    return text_of(thrown_by([&] { static_cast<void>(plain_schedule(shape)); }));
  };
  EXPECT_EQ(text({2, 2, 1, 2}), "schedule: rank 2 of a pipeline of 2");
  EXPECT_EQ(text({0, 2, 0, 2}), "schedule: 0 chunks (at least 1)");
  EXPECT_EQ(
      text({0, 2, 1, 3}), "schedule: 3 micro-batches in a pipeline of 2 ranks (a multiple of them)"
  );
}

// What ranks send each other: the stages of the model a value has passed.
class Mail {
 public:
  using Route = std::vector<int>;

  void send(bool is_forward, int micro_batch, int to_stage, Route route) {
    {
      const std::lock_guard lock(mutex_);
      letters_[{is_forward, micro_batch, to_stage}] = std::move(route);
    }
    arrived_.notify_all();
  }
  // Throws after a minute: somebody waits in a circle.
  Route receive(bool is_forward, int micro_batch, int at_stage) {
    std::unique_lock lock(mutex_);
    const std::tuple key = {is_forward, micro_batch, at_stage};
    if (!arrived_.wait_for(lock, std::chrono::minutes(1), [&] { return letters_.contains(key); })) {
      throw std::runtime_error("nothing arrives");
    }
    return letters_.extract(key).mapped();
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::tuple<bool, int, int>, Route> letters_;
};

// One rank: its chunks append their stage to what passes.
class Rank {
 public:
  Rank(const PipelineShape& shape, Mail& mail) : shape_(shape), mail_(mail) {}

  void run() {
    const auto nodes = [this](const VirtualStage& stage) { return nodes_of(stage); };
    PointToPoint link;
    link.receive_forward = [this](const VirtualStage& stage, const LaneContext&) {
      forward(stage) = mail_.receive(true, stage.micro_batch, place(stage));
    };
    link.send_forward = [this](const VirtualStage& stage, const LaneContext&) {
      mail_.send(true, stage.micro_batch, place(stage) + 1, forward(stage));
    };
    link.receive_backward = [this](const VirtualStage& stage, const LaneContext&) {
      backward(stage) = mail_.receive(false, stage.micro_batch, place(stage));
    };
    link.send_backward = [this](const VirtualStage& stage, const LaneContext&) {
      mail_.send(false, stage.micro_batch, place(stage) - 1, backward(stage));
    };
    // Before any callback looks for its place.
    routes_.resize(static_cast<size_t>(2 * shape_.num_micro_batches * shape_.num_chunks));
    ThreadExecutor().run(schedule_interleaved({shape_, nodes, link}));
  }

  // What the first chunk's backward ended with.
  Mail::Route& backward(const VirtualStage& stage) { return routes_[2 * index(stage) + 1]; }

 private:
  [[nodiscard]] int place(const VirtualStage& stage) const {
    return stage.chunk * shape_.num_ranks + shape_.rank;
  }
  [[nodiscard]] size_t index(const VirtualStage& stage) const {
    return static_cast<size_t>(stage.micro_batch * shape_.num_chunks + stage.chunk);
  }
  Mail::Route& forward(const VirtualStage& stage) { return routes_[2 * index(stage)]; }

  ChunkNodes nodes_of(const VirtualStage& stage) {
    const bool is_last = place(stage) == shape_.num_ranks * shape_.num_chunks - 1;
    ChunkNodes nodes = plain_nodes({1, Kind::kMoe, true, false});
    nodes.layers[0].moe_combine.forward = [this, stage](const LaneContext&) {
      forward(stage).push_back(place(stage));
    };
    nodes.layers[0].moe_combine.backward = [this, stage, is_last](const LaneContext&) {
      if (is_last) {
        backward(stage) = forward(stage);
      }
    };
    nodes.layers[0].pre_dispatch.backward = [this, stage](const LaneContext&) {
      backward(stage).push_back(place(stage));
    };
    return nodes;
  }

  PipelineShape shape_;
  Mail& mail_;
  std::vector<Mail::Route> routes_;
};

TEST(InterleavedTest, CarriesEveryMicroBatchThroughAllStagesAndBack) {
  for (const auto& [num_ranks, num_chunks] : {std::pair(1, 2), {2, 1}, {2, 2}, {3, 2}, {4, 3}}) {
    SCOPED_TRACE(fmt::format("{} ranks, {} chunks", num_ranks, num_chunks));
    Mail mail;
    std::deque<Rank> ranks;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) {
      Rank& own =
          ranks.emplace_back(PipelineShape{rank, num_ranks, num_chunks, 2 * num_ranks}, mail);
      threads.emplace_back([&own] { EXPECT_NO_THROW(own.run()); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    ASSERT_FALSE(HasFailure());
    Mail::Route expected(static_cast<size_t>(num_ranks * num_chunks));
    std::iota(expected.begin(), expected.end(), 0);
    const Mail::Route back(expected.rbegin(), expected.rend());
    expected.insert(expected.end(), back.begin(), back.end());
    for (int micro_batch = 0; micro_batch < 2 * num_ranks; ++micro_batch) {
      EXPECT_EQ(ranks[0].backward({micro_batch, 0}), expected);
    }
  }
}

}  // namespace
}  // namespace weft::overlap::test
