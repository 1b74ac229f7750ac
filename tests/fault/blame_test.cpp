// SPDX-License-Identifier: Apache-2.0
// A rank that no longer reaches a peer names that peer, or the rank that died, but no rank that was
// done with the call and left.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "core/context.hpp"
#include "cpu/exchange.hpp"
#include "support/errors.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

// A transport of which a test hears, and may add to what it says.
class WatchedTransport final : public Transport {
 public:
  struct Watch {
    std::function<void(int rank)> put = [](int) {};
    std::function<void(int rank)> mapped = [](int) {};
    std::function<void(int rank)> import = [](int) {};
    std::function<void()> wait = [] {};
    std::function<PeerState(int rank, PeerState real)> state = [](int, PeerState real) {
      return real;
    };
  };
  WatchedTransport(std::unique_ptr<Transport> inner, Watch& watch)
      : inner_(std::move(inner)), watch_(watch) {}

  [[nodiscard]] std::string_view name() const override { return inner_->name(); }
  [[nodiscard]] Region allocate(uint64_t bytes) override { return inner_->allocate(bytes); }
  void release(const RegionRef& region) override { inner_->release(region); }
  void import(int rank, const RegionRef& region) override {
    watch_.import(rank);
    inner_->import(rank, region);
  }
  void put(int rank, std::span<const Put> puts) override {
    watch_.put(rank);
    inner_->put(rank, puts);
  }
  void raise(int rank, uint32_t signal, uint64_t amount) override {
    inner_->raise(rank, signal, amount);
  }
  [[nodiscard]] std::byte* mapped(int rank, uint32_t region) const override {
    watch_.mapped(rank);
    return inner_->mapped(rank, region);
  }
  [[nodiscard]] uint64_t signal_value(uint32_t signal) const override {
    return inner_->signal_value(signal);
  }
  void progress() override {
    watch_.wait();
    inner_->progress();
  }
  [[nodiscard]] uint32_t doorbell() const override { return inner_->doorbell(); }
  void park(uint32_t seen, std::chrono::nanoseconds at_most) override {
    watch_.wait();
    inner_->park(seen, at_most);
  }
  [[nodiscard]] PeerState peer_state(int rank) const override {
    return watch_.state(rank, inner_->peer_state(rank));
  }
  void close() override { inner_->close(); }

 private:
  std::unique_ptr<Transport> inner_;
  Watch& watch_;
};

class BlameTest : public testing::TestWithParam<FanOut> {
 protected:
  BlameTest() {
    config_ = {.hidden = 8, .max_tokens = 4, .num_experts = 3, .max_topk = 1};
    config_.transport = "loopback";
    config_.num_threads = 1;
    config_.fan_out = GetParam();
  }

  // Rank 0 keeps its tokens, rank 1 sends its own to rank 2, which has none: a plan and a dispatch.
  // What each rank throws.
  std::vector<std::optional<Thrown>> dispatch() {
    std::vector<std::optional<Thrown>> all(3);
    run_threads(3, [&](const Group& group) {
      const auto rank = static_cast<size_t>(group.rank());
      const auto make = [&](std::string_view name, const auto&... rest) {
        return std::make_unique<WatchedTransport>(make_transport(name, rest...), watches_[rank]);
      };
      std::optional<Exchange> exchange = Executor::exchange_by(std::make_unique<CpuExchange>(
          group, config_, CpuPlace{.domains = group.topology().domains, .make = make}
      ));
      const int64_t num_tokens = rank == 2 ? 0 : 4;
      const std::vector<int32_t> experts(4, rank == 0 ? 0 : 2);
      const Plan plan = exchange->plan({.topk_idx = matrix(experts.data(), num_tokens, 1)});
      group.barrier();
      is_planned_ = true;
      group.barrier();
      all[rank] = thrown_by([&] {
        const std::vector<float> x(32);
        const Buffer rows = exchange->allocate(plan.num_rows(), 8, DType::kFloat32);
        const DispatchInput in = {.x = matrix(x.data(), num_tokens, 8)};
        exchange->dispatch(plan, in, {.rows = rows.tensor()});
      });
      exchange.reset();
      ++num_left_;
    });
    return all;
  }

  void await_leaving(int num_ranks) {
    while (num_left_ < num_ranks) {
      std::this_thread::yield();
    }
  }

  ExchangeConfig config_;
  std::vector<WatchedTransport::Watch> watches_{3};
  std::atomic<bool> is_planned_ = false;
  std::atomic<int> num_left_ = 0;
};

TEST_P(BlameTest, NamesThePeerThatIsOutOfReachNotOneThatIsDone) {
  std::atomic<bool> is_breaking = false;
  int num_reached = 0;
  const auto reach = [&](int rank) {
    if (is_planned_ && rank == 2 && !is_breaking && ++num_reached == 2) {  // first its handshake
      is_breaking = true;
      await_leaving(2);
    }
  };
  watches_[1].put = reach;
  watches_[1].mapped = reach;
  watches_[2].wait = [&] {
    if (is_breaking) {
      throw Error(ErrorCode::kTransport, "broken on purpose", 2, "");
    }
  };
  const auto all = dispatch();
  EXPECT_EQ(text_of(all[0]), "nothing");
  EXPECT_EQ(text_of(all[2]), "broken on purpose");
  ASSERT_TRUE(all[1] && all[1]->is_peer_error) << text_of(all[1]);
  EXPECT_TRUE(all[1]->text.starts_with("dispatch: rank 2 left the exchange during call 2 ("))
      << all[1]->text;
}

TEST_P(BlameTest, WaitsUntilTheDeathOfAPeerWithoutMemoryCanBeSeen) {
  watches_[1].import = [&](int rank) {
    if (is_planned_ && rank == 2) {
      await_leaving(1);
      throw LostPeerError(Error(ErrorCode::kNotAvailable, "its memory is gone", 1, ""), 2);
    }
  };
  std::atomic<int> num_looks = 0;
  watches_[1].state = [&](int rank, PeerState real) {
    return rank == 2 && ++num_looks > 3 ? PeerState::kDied : real;
  };
  const auto all = dispatch();
  EXPECT_EQ(text_of(all[0]), "nothing");
  ASSERT_TRUE(all[1] && all[1]->is_peer_error) << text_of(all[1]);
  EXPECT_EQ(
      all[1]->text, "dispatch: rank 2 died during call 2 (its memory is gone) [rank 1/3, loopback]"
  );
}

INSTANTIATE_TEST_SUITE_P(
    All,
    BlameTest,
    testing::Values(FanOut::kSource, FanOut::kReceiver),
    [](const auto& param) { return param.param == FanOut::kSource ? "BySource" : "ByReceiver"; }
);

}  // namespace
}  // namespace weft::test
