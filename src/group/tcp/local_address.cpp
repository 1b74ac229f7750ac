// SPDX-License-Identifier: Apache-2.0
#include "group/tcp/local_address.hpp"

#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <functional>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <optional>
#include <vector>

#include "core/check.hpp"
#include "core/env.hpp"

namespace weft {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

struct HostAddress {
  std::string interface;
  std::string text;
  [[nodiscard]] bool is_ipv6() const { return text.find(':') != std::string::npos; }
};

// Returns the addresses of interfaces that are up; IPv4 first.
std::vector<HostAddress> host_addresses() {
  ifaddrs* list = nullptr;
  WEFT_SYS(Context{}, ErrorCode::kNotAvailable, ::getifaddrs(&list));
  std::vector<HostAddress> addresses;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const int family = entry->ifa_addr == nullptr ? AF_UNSPEC : entry->ifa_addr->sa_family;
    if ((family != AF_INET && family != AF_INET6) || (entry->ifa_flags & IFF_UP) == 0) {
      continue;
    }
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::array<char, NI_MAXHOST> text = {};
    ::getnameinfo(entry->ifa_addr, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
    // A link-local IPv6 address ("fe80::1%eth0") means nothing without its link.
    if (std::string_view(text.data()).find('%') == std::string_view::npos) {
      addresses.push_back({.interface = entry->ifa_name, .text = text.data()});
    }
  }
  ::freeifaddrs(list);
  std::stable_partition(addresses.begin(), addresses.end(), std::not_fn(&HostAddress::is_ipv6));
  return addresses;
}

// True if the address is in `network`: "10.1.0.0/16", or "10.1.2.3" for only that address.
bool is_in(const HostAddress& address, const std::string& network) {
  const int family = address.is_ipv6() ? AF_INET6 : AF_INET;
  const unsigned max_bits = address.is_ipv6() ? 128 : 32;
  const size_t slash = network.find('/');
  const auto bits = slash == std::string::npos
                        ? std::optional(max_bits)
                        : parse_number<unsigned>(std::string_view(network).substr(slash + 1));
  std::array<uint8_t, 16> own = {};
  std::array<uint8_t, 16> base = {};
  if (!bits || *bits > max_bits || ::inet_pton(family, address.text.c_str(), own.data()) != 1 ||
      ::inet_pton(family, network.substr(0, slash).c_str(), base.data()) != 1) {
    return false;
  }
  for (unsigned bit = 0; bit < *bits; ++bit) {
    const unsigned mask = 0x80U >> (bit % 8);
    if (((base[bit / 8] ^ own[bit / 8]) & mask) != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::string local_address(const std::string& wanted) {
  if (wanted.empty()) {
    return kLoopback;
  }
  std::vector<std::string> known;
  for (const HostAddress& address : host_addresses()) {
    if (address.interface == wanted || is_in(address, wanted)) {
      return address.text;
    }
    known.push_back(fmt::format("{} {}", address.interface, address.text));
  }
  WEFT_RAISE(
      Context{},
      ErrorCode::kNotAvailable,
      "WEFT_FABRIC_ADDRESS = \"{}\" is no interface, address or network of this host (it has "
      "{})",
      wanted,
      fmt::join(known, ", ")
  );
}

}  // namespace weft
