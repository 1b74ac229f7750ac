// SPDX-License-Identifier: Apache-2.0
// A host of two packages. On the first a switch with a GPU and a network card, and another network
// card; on the second a GPU and two network cards, each behind a bridge of its own.
#include "core/host_map.hpp"

#include <gtest/gtest.h>

#include <sched.h>
#include <thread>

#include "support/errors.hpp"

namespace weft::test {
namespace {

const std::string kHost = R"(<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0xf" complete_cpuset="0xf" allowed_cpuset="0xf" nodeset="0x3" complete_nodeset="0x3" allowed_nodeset="0x3" gp_index="1">
  <object type="Package" os_index="0" cpuset="0x3" complete_cpuset="0x3" nodeset="0x1" complete_nodeset="0x1" gp_index="6">
   <object type="NUMANode" os_index="0" cpuset="0x3" complete_cpuset="0x3" nodeset="0x1" complete_nodeset="0x1" gp_index="7" local_memory="1000000000"/>
   <object type="PU" os_index="0" cpuset="0x1" complete_cpuset="0x1" nodeset="0x1" complete_nodeset="0x1" gp_index="2"/>
   <object type="PU" os_index="1" cpuset="0x2" complete_cpuset="0x2" nodeset="0x1" complete_nodeset="0x1" gp_index="4"/>
   <object type="Bridge" gp_index="20" bridge_type="0-1" depth="0" bridge_pci="0000:[17-1b]">
    <object type="Bridge" gp_index="21" bridge_type="1-1" depth="1" bridge_pci="0000:[18-1a]" pci_busid="0000:17:00.0" pci_type="0604 [1000:c030] [0000:0000] a0" pci_link_speed="0.0">
     <object type="PCIDev" gp_index="22" pci_busid="0000:19:00.0" pci_type="0302 [10de:2335] [10de:18be] a1" pci_link_speed="0.0"/>
     <object type="PCIDev" gp_index="23" pci_busid="0000:1a:00.0" pci_type="0207 [15b3:1021] [15b3:0023] 00" pci_link_speed="0.0"/>
    </object>
    <object type="PCIDev" gp_index="24" pci_busid="0000:1b:00.0" pci_type="0207 [15b3:1021] [15b3:0023] 00" pci_link_speed="0.0"/>
   </object>
  </object>
  <object type="Package" os_index="1" cpuset="0xc" complete_cpuset="0xc" nodeset="0x2" complete_nodeset="0x2" gp_index="12">
   <object type="NUMANode" os_index="1" cpuset="0xc" complete_cpuset="0xc" nodeset="0x2" complete_nodeset="0x2" gp_index="13" local_memory="1000000000"/>
   <object type="PU" os_index="2" cpuset="0x4" complete_cpuset="0x4" nodeset="0x2" complete_nodeset="0x2" gp_index="8"/>
   <object type="PU" os_index="3" cpuset="0x8" complete_cpuset="0x8" nodeset="0x2" complete_nodeset="0x2" gp_index="10"/>
   <object type="Bridge" gp_index="30" bridge_type="0-1" depth="0" bridge_pci="0000:[98-98]">
    <object type="PCIDev" gp_index="31" pci_busid="0000:98:00.0" pci_type="0302 [10de:2335] [10de:18be] a1" pci_link_speed="0.0"/>
   </object>
   <object type="Bridge" gp_index="32" bridge_type="0-1" depth="0" bridge_pci="0000:[a8-a8]">
    <object type="PCIDev" gp_index="33" pci_busid="0000:a8:00.0" pci_type="0207 [15b3:1021] [15b3:0023] 00" pci_link_speed="0.0"/>
   </object>
   <object type="Bridge" gp_index="34" bridge_type="0-1" depth="0" bridge_pci="0000:[b8-b8]">
    <object type="PCIDev" gp_index="35" pci_busid="0000:b8:00.0" pci_type="0207 [15b3:1021] [15b3:0023] 00" pci_link_speed="0.0"/>
   </object>
  </object>
 </object>
</topology>
)";
constexpr std::string_view kFirstGpu = "0000:19:00.0";
constexpr std::string_view kSecondGpu = "0000:98:00.0";
const std::vector<std::string> kCards = {
    "0000:1a:00.0", "0000:1b:00.0", "0000:a8:00.0", "0000:b8:00.0"};

using Indices = std::vector<size_t>;
using Cores = std::vector<int>;

bool has_hwloc() {
  return text_of(thrown_by([] { const HostMap map(kHost); })).find("leaves hwloc out") ==
         std::string::npos;
}

class HostMapTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_hwloc()) {
      GTEST_SKIP() << "this build leaves hwloc out";
    }
  }
};

TEST_F(HostMapTest, TakesTheCardBehindTheGpusSwitch) {
  EXPECT_EQ(HostMap(kHost).nearest(kFirstGpu, kCards), (Indices{0}));
}

TEST_F(HostMapTest, TakesAllCardsOfTheGpusPackageWhereNoneIsNearer) {
  const HostMap map(kHost);
  EXPECT_EQ(map.nearest(kSecondGpu, kCards), (Indices{2, 3}));
  const std::vector<std::string> others = {kCards[1], kCards[3]};
  EXPECT_EQ(map.nearest(kFirstGpu, others), (Indices{0}));
}

TEST_F(HostMapTest, TakesAnyCardWhereAllAreFar) {
  const std::vector<std::string> others = {kCards[2], kCards[3]};
  EXPECT_EQ(HostMap(kHost).nearest(kFirstGpu, others), (Indices{0, 1}));
}

TEST_F(HostMapTest, WithoutAGpuTakesCardsBesideTheCoresOfTheProcess) {
  EXPECT_EQ(HostMap(kHost).nearest("", kCards), (Indices{0, 1, 2, 3}));
  EXPECT_EQ(HostMap(kHost, Cores{3}).nearest("", kCards), (Indices{2, 3}));
}

TEST_F(HostMapTest, TakesAllCardsWhenItDoesNotKnowThem) {
  const HostMap map(kHost);
  EXPECT_EQ(map.nearest("0000:77:00.0", kCards), (Indices{0, 1, 2, 3}));
  EXPECT_EQ(map.nearest(kFirstGpu, std::vector<std::string>{"", "nonsense"}), (Indices{0, 1}));
  EXPECT_EQ(map.nearest(kFirstGpu, {}), Indices{});
}

TEST_F(HostMapTest, ReadsAddressesInAnyCase) {
  EXPECT_EQ(
      HostMap(kHost).nearest(kFirstGpu, std::vector<std::string>{"0000:B8:00.0", "0000:1A:00.0"}),
      (Indices{1})
  );
}

TEST_F(HostMapTest, ListsTheCoresOfADevicesPackageThatMayBeUsed) {
  EXPECT_EQ(HostMap(kHost).cores_near(kFirstGpu), (Cores{0, 1}));
  EXPECT_EQ(HostMap(kHost).cores_near(kSecondGpu), (Cores{2, 3}));
  EXPECT_EQ(HostMap(kHost, Cores{1, 2}).cores_near(kFirstGpu), (Cores{1}));
}

TEST_F(HostMapTest, ListsNoCoresWhereTheyMakeNoDifference) {
  const HostMap map(kHost, Cores{0, 1});
  EXPECT_EQ(map.cores_near(kFirstGpu), Cores{}) << "all that may be used are near";
  EXPECT_EQ(map.cores_near(kSecondGpu), Cores{}) << "none that may be used is near";
  EXPECT_EQ(map.cores_near("0000:77:00.0"), Cores{});
  EXPECT_EQ(map.cores_near(""), Cores{});
}

TEST_F(HostMapTest, RefusesWhatIsNoTopology) {
  EXPECT_NE(
      text_of(thrown_by([] { const HostMap map("<topology"); })).find("describe no topology"),
      std::string::npos
  );
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
