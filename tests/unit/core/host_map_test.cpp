// SPDX-License-Identifier: Apache-2.0
// A host of two packages. On the first a switch with a GPU and a network card, and another network
// card; on the second a GPU and two network cards, each behind a bridge of its own.
#include "core/host_map.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sched.h>
#include <thread>

namespace weft::test {
namespace {

constexpr std::string_view kFirstGpu = "0000:19:00.0";
constexpr std::string_view kSecondGpu = "0000:98:00.0";
const std::vector<std::string> kCards = {
    "0000:1a:00.0", "0000:1b:00.0", "0000:a8:00.0", "0000:b8:00.0"};

namespace fs = std::filesystem;
using Indices = std::vector<size_t>;
using Cores = std::vector<int>;

class HostMapTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "weft_sys_XXXXXX").string();
    sys_ = ::mkdtemp(pattern.data());
    write(sys_ / "devices/system/cpu/online", "0-3\n");
    for (const int core : {0, 1, 2, 3}) {
      const std::string name = "cpu" + std::to_string(core);
      write(
          sys_ / "devices/system/cpu" / name / "topology/core_siblings_list",
          core < 2 ? "0,1\n" : "2-3\n"
      );
    }
    add("pci0000:17/0000:17:00.0/0000:19:00.0", "0-1\n");
    add("pci0000:17/0000:17:00.0/0000:1a:00.0", "0-1\n");
    add("pci0000:17/0000:1b:00.0", "0-1\n");
    add("pci0000:98/0000:98:00.0", "2-3\n");
    add("pci0000:a8/0000:a8:00.0", "2-3\n");
    add("pci0000:b8/0000:b8:00.0", "2,3\n");
  }
  void TearDown() override { fs::remove_all(sys_); }

  void add(const fs::path& way, const std::string& cores) const {
    write(sys_ / "devices" / way / "local_cpulist", cores);
    const fs::path links = sys_ / "bus/pci/devices";
    fs::create_directories(links);
    fs::create_directory_symlink(fs::path("../../../devices") / way, links / way.filename());
  }
  static void write(const fs::path& file, const std::string& text) {
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  [[nodiscard]] HostMap host(const Cores& usable = {}) const { return HostMap(sys_, usable); }

  fs::path sys_;
};

TEST_F(HostMapTest, TakesTheCardBehindTheGpusSwitch) {
  EXPECT_EQ(host().nearest(kFirstGpu, kCards), (Indices{0}));
}

TEST_F(HostMapTest, TakesAllCardsOfTheGpusPackageWhereNoneIsNearer) {
  const HostMap map = host();
  EXPECT_EQ(map.nearest(kSecondGpu, kCards), (Indices{2, 3}));
  const std::vector<std::string> others = {kCards[1], kCards[3]};
  EXPECT_EQ(map.nearest(kFirstGpu, others), (Indices{0}));
}

TEST_F(HostMapTest, TakesAnyCardWhereAllAreFar) {
  const std::vector<std::string> others = {kCards[2], kCards[3]};
  EXPECT_EQ(host().nearest(kFirstGpu, others), (Indices{0, 1}));
}

TEST_F(HostMapTest, WithoutAGpuTakesCardsBesideTheCoresOfTheProcess) {
  EXPECT_EQ(host().nearest("", kCards), (Indices{0, 1, 2, 3}));
  EXPECT_EQ(host(Cores{3}).nearest("", kCards), (Indices{2, 3}));
}

TEST_F(HostMapTest, TakesAllCardsWhenItDoesNotKnowThem) {
  const HostMap map = host();
  EXPECT_EQ(map.nearest("0000:77:00.0", kCards), (Indices{0, 1, 2, 3}));
  EXPECT_EQ(map.nearest(kFirstGpu, std::vector<std::string>{"", "nonsense"}), (Indices{0, 1}));
  EXPECT_EQ(map.nearest(kFirstGpu, {}), Indices{});
}

TEST_F(HostMapTest, ReadsAddressesInAnyCase) {
  EXPECT_EQ(
      host().nearest(kFirstGpu, std::vector<std::string>{"0000:B8:00.0", "0000:1A:00.0"}),
      (Indices{1})
  );
}

TEST_F(HostMapTest, ListsTheCoresOfADevicesPackageThatMayBeUsed) {
  EXPECT_EQ(host().cores_near(kFirstGpu), (Cores{0, 1}));
  EXPECT_EQ(host().cores_near(kSecondGpu), (Cores{2, 3}));
  EXPECT_EQ(host(Cores{1, 2}).cores_near(kFirstGpu), (Cores{1}));
}

TEST_F(HostMapTest, ListsNoCoresWhereTheyMakeNoDifference) {
  const HostMap map = host(Cores{0, 1});
  EXPECT_EQ(map.cores_near(kFirstGpu), Cores{}) << "all that may be used are near";
  EXPECT_EQ(map.cores_near(kSecondGpu), Cores{}) << "none that may be used is near";
  EXPECT_EQ(map.cores_near("0000:77:00.0"), Cores{});
  EXPECT_EQ(map.cores_near(""), Cores{});
}

TEST_F(HostMapTest, PrefersCardsOfAPackageToThoseOfTheOtherWhereThePackageHasParts) {
  add("pci0000:c8/0000:c8:00.0", "2\n");
  add("pci0000:d8/0000:d8:00.0", "3\n");
  const std::vector<std::string> others = {kCards[0], "0000:d8:00.0"};
  EXPECT_EQ(host().nearest("0000:c8:00.0", others), (Indices{1}));
}

TEST_F(HostMapTest, KnowsNothingWhereNothingCanBeRead) {
  const HostMap map(sys_ / "missing");
  EXPECT_EQ(map.nearest(kFirstGpu, kCards), (Indices{0, 1, 2, 3}));
  EXPECT_EQ(map.nearest("", kCards), (Indices{0, 1, 2, 3}));
  EXPECT_EQ(map.cores_near(kFirstGpu), Cores{});
}

TEST(HostMapHereTest, AnswersOnAnyMachine) {
  EXPECT_EQ(HostMap::here().nearest("", kCards).size(), kCards.size());
  EXPECT_EQ(HostMap::here().cores_near("ffff:ff:1f.7"), Cores{});
}

TEST(StayOnTest, KeepsTheThreadAndNoOtherOnItsCores) {
  cpu_set_t before;
  ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  int first = 0;
  while (!CPU_ISSET(static_cast<size_t>(first), &before)) {
    ++first;
  }
  std::thread([&] {
    stay_on(Cores{first});
    cpu_set_t now;
    ASSERT_EQ(::sched_getaffinity(0, sizeof now, &now), 0);
    EXPECT_EQ(CPU_COUNT(&now), 1);
    EXPECT_TRUE(CPU_ISSET(static_cast<size_t>(first), &now));
    stay_on({});
    ASSERT_EQ(::sched_getaffinity(0, sizeof now, &now), 0);
    EXPECT_EQ(CPU_COUNT(&now), 1) << "no cores: left alone";
  }).join();
  cpu_set_t after;
  ASSERT_EQ(::sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

}  // namespace
}  // namespace weft::test
