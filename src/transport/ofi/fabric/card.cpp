// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/fabric/card.hpp"

#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <cstring>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <vector>

#include "core/check.hpp"
#include "core/env.hpp"

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

namespace {

constexpr const char* kLoopback = "127.0.0.1";

struct HostAddress {
  std::string interface;
  int family = AF_INET;
  std::array<uint8_t, 16> bytes = {};  // network order; 4 of them for IPv4

  [[nodiscard]] std::string text() const {
    std::array<char, INET6_ADDRSTRLEN> buffer = {};
    const char* text = ::inet_ntop(family, bytes.data(), buffer.data(), buffer.size());
    return text == nullptr ? std::string() : text;
  }
};

// A link-local IPv6 address means nothing without its link.
bool is_link_local(const HostAddress& address) {
  return address.family == AF_INET6 && address.bytes[0] == 0xfe &&
         (address.bytes[1] & 0xc0) == 0x80;
}

// Of interfaces that are up; IPv4 first.
std::vector<HostAddress> host_addresses() {
  ifaddrs* list = nullptr;
  WEFT_SYS(Context{}, ErrorCode::kNotAvailable, ::getifaddrs(&list));
  std::vector<HostAddress> addresses;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) {
      continue;
    }
    HostAddress address = {
        .interface = entry->ifa_name, .family = entry->ifa_addr->sa_family, .bytes = {}};
    if (address.family == AF_INET) {
      sockaddr_in ip = {};
      std::memcpy(&ip, entry->ifa_addr, sizeof ip);
      std::memcpy(address.bytes.data(), &ip.sin_addr, sizeof ip.sin_addr);
    } else if (address.family == AF_INET6) {
      sockaddr_in6 ip = {};
      std::memcpy(&ip, entry->ifa_addr, sizeof ip);
      std::memcpy(address.bytes.data(), &ip.sin6_addr, sizeof ip.sin6_addr);
    } else {
      continue;
    }
    if (!is_link_local(address)) {
      addresses.push_back(address);
    }
  }
  ::freeifaddrs(list);
  std::stable_partition(addresses.begin(), addresses.end(), [](const HostAddress& address) {
    return address.family == AF_INET;
  });
  return addresses;
}

// "10.1.0.0/16", or "10.1.2.3" for only itself.
class Network {
 public:
  explicit Network(const std::string& text) {
    const size_t slash = text.find('/');
    const std::string base = text.substr(0, slash);
    family_ = base.find(':') == std::string::npos ? AF_INET : AF_INET6;
    is_valid_ = ::inet_pton(family_, base.c_str(), bytes_.data()) == 1;
    const unsigned max_bits = family_ == AF_INET ? 32 : 128;
    bits_ = max_bits;
    if (slash != std::string::npos) {
      const auto bits = parse_number<unsigned>(std::string_view(text).substr(slash + 1));
      is_valid_ = is_valid_ && bits && *bits <= max_bits;
      bits_ = bits.value_or(0);
    }
  }

  [[nodiscard]] bool contains(const HostAddress& address) const {
    if (!is_valid_ || address.family != family_) {
      return false;
    }
    for (unsigned bit = 0; bit < bits_; ++bit) {
      const unsigned mask = 0x80U >> (bit % 8);
      if (((bytes_[bit / 8] ^ address.bytes[bit / 8]) & mask) != 0) {
        return false;
      }
    }
    return true;
  }

 private:
  int family_ = AF_INET;
  std::array<uint8_t, 16> bytes_ = {};
  unsigned bits_ = 0;
  bool is_valid_ = false;
};

}  // namespace

std::string local_address(const std::string& wanted) {
  if (wanted.empty()) {
    return kLoopback;
  }
  const std::vector<HostAddress> addresses = host_addresses();
  const Network network(wanted);
  std::string known;
  for (const HostAddress& address : addresses) {
    if (address.interface == wanted || network.contains(address)) {
      return address.text();
    }
    known += fmt::format("{}{} {}", known.empty() ? "" : ", ", address.interface, address.text());
  }
  WEFT_RAISE(
      Context{},
      ErrorCode::kNotAvailable,
      "WEFT_FABRIC_ADDRESS = \"{}\" is no interface, address or network of this host (it has "
      "{})",
      wanted,
      known
  );
}

}  // namespace weft::ofi
