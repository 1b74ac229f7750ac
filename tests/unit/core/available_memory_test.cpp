// SPDX-License-Identifier: Apache-2.0
// On files as the kernel shows them, in a folder that stands for the root.
#include "core/available_memory.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/errors.hpp"

namespace weft::test {
namespace {

class AvailableMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "/memory.XXXXXX";
    root_ = ::mkdtemp(pattern.data());
    write("/proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n");
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  [[nodiscard]] MemoryBounds bounds() const { return memory_bounds(root_); }

  std::string root_;
};

TEST_F(AvailableMemoryTest, IsWhatTheSystemHasWithoutGroups) {
  EXPECT_EQ(bounds().available, 4000U << 10);
  EXPECT_EQ(bounds().limit, kUnknownBytes);
}

TEST_F(AvailableMemoryTest, IsBoundedByAGroupOfVersion2) {
  write("/proc/self/cgroup", "0::/pod/box\n");
  write("/sys/fs/cgroup/pod/box/memory.max", "1000000\n");
  write("/sys/fs/cgroup/pod/box/memory.current", "700000\n");
  write("/sys/fs/cgroup/pod/box/memory.stat", "anon 500000\ninactive_file 200000\n");
  EXPECT_EQ(bounds().limit, 1000000U);
  EXPECT_EQ(bounds().available, 500000U);  // what files keep in memory can be given back
}

TEST_F(AvailableMemoryTest, IsBoundedByTheGroupsAround) {
  write("/proc/self/cgroup", "0::/pod/box\n");
  write("/sys/fs/cgroup/pod/box/memory.max", "max\n");
  write("/sys/fs/cgroup/pod/memory.max", "300000\n");
  write("/sys/fs/cgroup/pod/memory.current", "400000\n");
  EXPECT_EQ(bounds().limit, 300000U);
  EXPECT_EQ(bounds().available, 0U);
}

TEST_F(AvailableMemoryTest, IsBoundedByAGroupOfVersion1) {
  write("/proc/self/cgroup", "5:cpu:/other\n4:hugetlb,memory:/box\n");
  write("/sys/fs/cgroup/memory/box/memory.limit_in_bytes", "2000000\n");
  write("/sys/fs/cgroup/memory/box/memory.usage_in_bytes", "500000\n");
  write("/sys/fs/cgroup/memory/box/memory.stat", "cache 9\ntotal_inactive_file 100000\n");
  EXPECT_EQ(bounds().limit, 2000000U);
  EXPECT_EQ(bounds().available, 1600000U);
}

// A container sees its own group as the root, while /proc may still name the host's.
TEST_F(AvailableMemoryTest, IsBoundedByTheRootWhereTheNamedGroupCannotBeSeen) {
  write("/proc/self/cgroup", "4:memory:/docker/0123\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n");
  EXPECT_EQ(bounds().available, 1000U);
}

TEST(CheckAvailableTest, NamesWhatIsAskedFor) {
  const auto thrown = thrown_by([] { check_available(uint64_t{1} << 60, "rows"); });
  EXPECT_NE(text_of(thrown).find("no room for 1152921504606846976 B of rows ("), std::string::npos)
      << text_of(thrown);
}

}  // namespace
}  // namespace weft::test
