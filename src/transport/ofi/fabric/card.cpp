// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "transport/ofi/fabric/fabric.hpp"

namespace weft::ofi {
namespace {

std::string_view text(const char* name) {
  return name == nullptr ? std::string_view() : name;
}

}  // namespace

std::vector<const fi_info*> list_cards(const fi_info* offers, std::span<const std::string> wanted) {
  std::vector<const fi_info*> cards;
  for (const fi_info* one = offers; one != nullptr; one = one->next) {
    const std::string_view domain = text(one->domain_attr->name);
    const bool is_wanted = wanted.empty()
                               ? text(one->fabric_attr->name) == text(offers->fabric_attr->name)
                               : std::ranges::find(wanted, domain) != wanted.end();
    const bool is_same = text(one->fabric_attr->prov_name) == text(offers->fabric_attr->prov_name);
    const auto has_its_domain = [&](const fi_info* card) {
      return text(card->domain_attr->name) == domain;
    };
    if (is_wanted && is_same && std::ranges::none_of(cards, has_its_domain)) {
      cards.push_back(one);
    }
  }
  return cards;
}

std::string card_address(const fi_info& offer) {
  const fi_bus_attr* bus = offer.nic == nullptr ? nullptr : offer.nic->bus_attr;
  if (bus == nullptr || bus->bus_type != FI_BUS_PCI) {
    return {};
  }
  const fi_pci_attr& pci = bus->attr.pci;
  return fmt::format(
      "{:04x}:{:02x}:{:02x}.{:x}", pci.domain_id, pci.bus_id, pci.device_id, pci.function_id
  );
}

size_t choose_card(
    const HostMap& map, std::string_view device, std::span<const std::string> cards, size_t turn
) {
  const std::vector<size_t> near = map.nearest(device, cards);
  return near.empty() ? 0 : near[turn % near.size()];
}

std::vector<int> cores_for(const fi_info& offer, std::string_view device) {
  const std::string card = card_address(offer);
  if (card.empty() && device.empty()) {
    return {};
  }
  return HostMap::here().cores_near(card.empty() ? device : card);
}

}  // namespace weft::ofi
