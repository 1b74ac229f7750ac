// SPDX-License-Identifier: Apache-2.0
// A rank that forks: what its child inherits stays the rank's own. The child neither ends it nor
// can use it, as a program that starts helpers, or a data loader with workers, does without
// knowing.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "transport/transport.hpp"
#include "weft/weft.hpp"

namespace weft {
namespace {

class ForkTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string reason = transport_obstacle(GetParam(), Group::local(1).front());
    if (!reason.empty()) {
      GTEST_SKIP() << reason;
    }
    ::setenv("WEFT_TRANSPORT", GetParam(), 1);
  }
  void TearDown() override { ::unsetenv("WEFT_TRANSPORT"); }
};

// Returns whether `body` returns 0 in a child, in no more time than the ranks' own deadlines.
bool ends_well(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    ::_exit(body());
  }
  int status = -1;
  return ::waitpid(child, &status, 0) == child && status == 0;
}

template <class Call>
bool is_refused(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code() == ErrorCode::kUnsupported &&
           std::string(error.what()).find("was forked from process") != std::string::npos;
  }
  return false;
}

TEST_P(ForkTest, AChildNeitherEndsNorUsesWhatItInherits) {
  const auto statuses = run_forked(2, [](Group& group) {
    auto exchange = std::make_unique<Exchange>(
        group, ExchangeConfig{.hidden = 16, .max_tokens = 8, .num_experts = 4, .max_topk = 2}
    );
    const std::vector<int32_t> topk_idx = {0, 3, 1, 2};
    const auto plan = [&] {
      return exchange->plan({.topk_idx = weft::matrix(topk_idx.data(), 2, 2)}).num_rows();
    };
    auto buffer = std::make_unique<Buffer>(exchange->allocate(4, 16, DType::kFloat32));
    const int64_t rows = plan();
    const bool has_child_ended = group.rank() != 0 || ends_well([&] {
                                   const bool is_safe =
                                       is_refused(plan) && is_refused([&] { group.barrier(); });
                                   buffer.reset();
                                   exchange.reset();
                                   return is_safe ? 0 : 1;
                                 });
    group.barrier();
    return has_child_ended && plan() == rows && plan() == rows ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

INSTANTIATE_TEST_SUITE_P(
    All, ForkTest, ::testing::Values("shm", "ofi:tcp", "faulty:shm?delay=0.2")
);

}  // namespace
}  // namespace weft
