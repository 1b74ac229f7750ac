// SPDX-License-Identifier: Apache-2.0
#include "overlap/weight_gradients.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "overlap/no_pipelining.hpp"
#include "overlap/plain_nodes.hpp"
#include "overlap/thread_executor.hpp"

namespace weft::overlap::test {
namespace {

using Names = std::vector<std::string>;

class WeightGradientQueueTest : public testing::Test {
 protected:
  Work noting(std::string name) {
    return [this, name](const LaneContext&) { names_.push_back(name); };
  }

  WeightGradientQueue queue_;
  Names names_;
};

TEST_F(WeightGradientQueueTest, RunsTheOldestFirstThenTheHooks) {
  queue_.add_hook(noting("hook 1"));
  queue_.put(noting("a"));
  queue_.put(noting("b"));
  queue_.add_hook(noting("hook 2"));
  EXPECT_EQ(queue_.size(), 2U);
  EXPECT_TRUE(names_.empty());
  queue_.run({});
  EXPECT_EQ(names_, (Names{"a", "b", "hook 1", "hook 2"}));
  EXPECT_EQ(queue_.size(), 0U);
}

TEST_F(WeightGradientQueueTest, KeepsHooksForTheNextRun) {
  queue_.add_hook(noting("hook"));
  queue_.put(noting("a"));
  queue_.run({});
  queue_.put(noting("b"));
  queue_.run({});
  EXPECT_EQ(names_, (Names{"a", "hook", "b", "hook"}));
}

TEST_F(WeightGradientQueueTest, StopsAtWhatThrows) {
  queue_.add_hook(noting("hook"));
  queue_.put(noting("a"));
  queue_.put([](const LaneContext&) { throw std::runtime_error("broken"); });
  queue_.put(noting("b"));
  EXPECT_THROW(queue_.run({}), std::runtime_error);
  EXPECT_EQ(names_, (Names{"a"}));
  EXPECT_EQ(queue_.size(), 1U);
  queue_.clear();
  EXPECT_EQ(queue_.size(), 0U);
}

// The experts' gradients run before the attention's, each behind its own backward; layers from the
// last to the first, the first layer's attention behind the hook that sends.
TEST_F(WeightGradientQueueTest, RunsInItsSlotOfTheSchedule) {
  std::deque<WeightGradientQueue> queues(4);
  const auto deferred = [&](Node& node, WeightGradientQueue& queue, const std::string& name) {
    node.backward = [&, name](const LaneContext&) {
      names_.push_back(name + " bwd");
      queue.put(noting(name + " weights"));
    };
    node.weight_gradient = [&](const LaneContext& context) { queue.run(context); };
    queue.add_hook(noting(name + " hook"));
  };
  const auto nodes = [&](int) {
    ChunkNodes made = plain_nodes({2});
    for (size_t layer = 0; layer < 2; ++layer) {
      const std::string number = std::to_string(layer);
      deferred(made.layers[layer].pre_dispatch, queues[2 * layer], "attention " + number);
      deferred(made.layers[layer].mlp, queues[2 * layer + 1], "experts " + number);
    }
    made.post_backward = noting("post_backward");
    return made;
  };
  ThreadExecutor().run(schedule_overlapped({1, nodes}));
  const Names expected = {
      "experts 1 bwd",
      "experts 1 weights",
      "experts 1 hook",
      "attention 1 bwd",
      "attention 1 weights",
      "attention 1 hook",
      "experts 0 bwd",
      "experts 0 weights",
      "experts 0 hook",
      "attention 0 bwd",
      "post_backward",
      "attention 0 weights",
      "attention 0 hook",
  };
  EXPECT_EQ(names_, expected);
}

}  // namespace
}  // namespace weft::overlap::test
