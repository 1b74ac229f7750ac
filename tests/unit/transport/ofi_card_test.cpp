// SPDX-License-Identifier: Apache-2.0
// Lists as fi_getinfo gives them, made by hand.
#include <gtest/gtest.h>

#include <deque>

#include "transport/ofi/fabric/fabric.hpp"

namespace weft::ofi {
namespace {

// Offers linked in the order in which they were added.
class Offers {
 public:
  struct Names {
    std::string provider = "verbs;ofi_rxm";
    std::string fabric = "IB-0xfe80";
    std::string domain;
  };

  Offers& add(const Names& names) {
    One& one = all_.emplace_back();
    one.names = names;
    one.fabric.prov_name = one.names.provider.data();
    one.fabric.name = one.names.fabric.data();
    one.domain.name = one.names.domain.data();
    one.info.fabric_attr = &one.fabric;
    one.info.domain_attr = &one.domain;
    if (all_.size() > 1) {
      all_[all_.size() - 2].info.next = &one.info;
    }
    return *this;
  }
  Offers& at(fi_pci_attr address, fi_bus_type type = FI_BUS_PCI) {
    One& one = all_.back();
    one.bus.bus_type = type;
    one.bus.attr.pci = address;
    one.nic.bus_attr = &one.bus;
    one.info.nic = &one.nic;
    return *this;
  }
  [[nodiscard]] const fi_info* first() const { return &all_.front().info; }
  [[nodiscard]] std::vector<std::string> cards(const std::vector<std::string>& wanted = {}) const {
    std::vector<std::string> domains;
    for (const fi_info* card : list_cards(first(), wanted)) {
      domains.emplace_back(card->domain_attr->name);
    }
    return domains;
  }

 private:
  struct One {
    Names names;
    fi_info info = {};
    fi_fabric_attr fabric = {};
    fi_domain_attr domain = {};
    fi_bus_attr bus = {};
    fid_nic nic = {};
  };
  std::deque<One> all_;  // addresses stay
};

using Texts = std::vector<std::string>;

TEST(OfiCardTest, ListsEachCardOnce) {
  Offers offers;
  offers.add({.domain = "mlx5_0"}).add({.domain = "mlx5_0"}).add({.domain = "mlx5_1"});
  EXPECT_EQ(offers.cards(), (Texts{"mlx5_0", "mlx5_1"}));
}

TEST(OfiCardTest, KeepsToTheProviderAndFabricOfTheFirst) {
  Offers offers;
  offers.add({.domain = "mlx5_0"})
      .add({.fabric = "IB-storage", .domain = "mlx5_8"})
      .add({.provider = "verbs;ofi_rxd", .domain = "mlx5_2"})
      .add({.domain = "mlx5_1"});
  EXPECT_EQ(offers.cards(), (Texts{"mlx5_0", "mlx5_1"}));
  EXPECT_EQ(offers.cards({"mlx5_8", "mlx5_1", "mlx5_2"}), (Texts{"mlx5_8", "mlx5_1"})) << "named";
  EXPECT_EQ(offers.cards({"mlx5_9"}), Texts{});
}

TEST(OfiCardTest, ReadsWhereACardIs) {
  Offers offers;
  offers.add({.domain = "mlx5_0"});
  EXPECT_EQ(card_address(*offers.first()), "") << "no card";
  offers.at({.domain_id = 0, .bus_id = 0x1a, .device_id = 0, .function_id = 1});
  EXPECT_EQ(card_address(*offers.first()), "0000:1a:00.1");
  offers.at({.domain_id = 1, .bus_id = 2, .device_id = 3, .function_id = 4}, FI_BUS_UNKNOWN);
  EXPECT_EQ(card_address(*offers.first()), "");
}

TEST(OfiCardTest, RanksTakeEqualCardsInTurns) {
  const Texts unknown = {"", "", ""};
  std::vector<size_t> taken;
  for (size_t turn = 0; turn < 5; ++turn) {
    taken.push_back(choose_card(HostMap::here(), "", unknown, turn));
  }
  EXPECT_EQ(taken, (std::vector<size_t>{0, 1, 2, 0, 1}));
  EXPECT_EQ(choose_card(HostMap::here(), "0000:17:00.0", {}, 3), 0U);
}

TEST(OfiCardTest, RanksOfAHostCountThemselves) {
  run_threads(3, [](Group& group) {
    const FabricWish wish = wish_for(group, "tcp", "0000:17:00.0");
    EXPECT_EQ(wish.turn, static_cast<size_t>(group.rank()));
    EXPECT_EQ(wish.device, "0000:17:00.0");
  });
}

TEST(OfiCardTest, ThreadsGoWhereTheyLikeWithoutACardAndAGpu) {
  Offers offers;
  offers.add({.domain = "lo"});
  EXPECT_TRUE(cores_for(*offers.first(), "").empty());
}

}  // namespace
}  // namespace weft::ofi
