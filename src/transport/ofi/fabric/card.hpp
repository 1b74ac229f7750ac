// SPDX-License-Identifier: Apache-2.0
// Which of a host's network cards and addresses a rank uses: a card that lies near its GPU, or near
// its cores, and where several do, ranks of the host take them in turns.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/host_map.hpp"
#include "transport/ofi/fabric/fabric.hpp"

namespace weft::ofi {

// Of a list, as fi_getinfo gives it, what the first one's provider offers on each card: each domain
// once, of those that are `wanted`, or if none is named of the first one's fabric: others may lead
// elsewhere.
[[nodiscard]] std::vector<const fi_info*> list_cards(
    const fi_info* offers, std::span<const std::string> wanted
);

// "0000:17:00.0"; empty: there is no card, or the provider does not say where.
[[nodiscard]] std::string card_address(const fi_info& offer);

// Index of the card. `device`: PCI address of the rank's GPU, or empty; `turn`: the rank's number
// among those of its host.
[[nodiscard]] size_t choose_card(
    const HostMap& map, std::string_view device, std::span<const std::string> cards, size_t turn
);

// Cores for the threads that look after a card, or where it is not known those near the GPU.
[[nodiscard]] std::vector<int> cores_for(const fi_info& offer, std::string_view device);

// The numeric address that `wanted` means here: empty is 127.0.0.1; else an interface ("eth0"), an
// address of this host ("10.1.2.3") or a network ("10.1.0.0/16", the first address in it), so that
// one setting serves all hosts. Throws Error (kNotAvailable) with the addresses that there are.
[[nodiscard]] std::string local_address(const std::string& wanted);

}  // namespace weft::ofi
