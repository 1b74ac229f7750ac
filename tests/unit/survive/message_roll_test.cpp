// SPDX-License-Identifier: Apache-2.0
#include "survive/message_roll.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <sys/resource.h>

#include "group/control_plane.hpp"
#include "support/errors.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

// Leaves this process only so much memory to ask for.
void leave_memory(uint64_t bytes) {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const uint64_t most = pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)) + bytes;
  const rlimit limit = {.rlim_cur = most, .rlim_max = RLIM_INFINITY};
  EXPECT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
}

void wait_until(MessageRoll& roll, const std::function<bool()>& is_over) {
  const Deadline deadline(20s);
  while (!is_over() && !deadline.has_passed()) {
    roll.beat();
    roll.sleep(roll.doorbell(), 20ms);
  }
  EXPECT_TRUE(is_over());
}

TEST(MessageRollTest, ARankWithoutMemoryToHearOthersLeavesThemAndSaysWhy) {
  const std::vector<int> codes = run_forked(2, [](const Group& group) {
    MessageRoll roll(group, 20s);
    group.barrier();
    if (group.rank() == 0) {
      roll.post(0, 0, Bytes(32 << 20));
      wait_until(roll, [&] { return roll.has_ended(1); });
      EXPECT_FALSE(roll.has_left(1));
    } else {
      leave_memory(8 << 20);
      const auto thrown = thrown_by([&] { wait_until(roll, [] { return false; }); });
      EXPECT_EQ(
          text_of(thrown), "survive: this rank hears no other any more (out of memory) [rank 1/2]"
      );
      EXPECT_TRUE(thrown && thrown->code == ErrorCode::kOutOfMemory);
    }
    group.barrier();
    return testing::Test::HasFailure() ? 1 : 0;
  });
  EXPECT_EQ(codes, std::vector<int>(2));
}

}  // namespace
}  // namespace weft::test
