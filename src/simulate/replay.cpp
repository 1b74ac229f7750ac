// SPDX-License-Identifier: Apache-2.0
#include "simulate/replay.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace weft::sim {

std::string_view ReplayTimes::bound() const {
  const std::array<std::pair<double, std::string_view>, 4> kinds = {{
      {busy.link_us, "links"},
      {busy.card_us, "cards"},
      {busy.proxy_us, "proxies"},
      {busy.copy_us, "copies"},
  }};
  const auto longest =
      std::ranges::max_element(kinds, {}, [](const auto& kind) { return kind.first; });
  return longest->second;
}

double domain_load_us(const Scenario& scenario, const Model& model, const RankTraffic& rank) {
  const auto us = [&](int64_t rows, double gbps) {
    return static_cast<double>(rows * scenario.row_bytes) / gbps / 1e3;
  };
  const double links = us(std::max(rank.link_out, rank.link_in), model.link_gbps);
  const double copies = us(rank.routes, model.copy_gbps);
  return model.one_mover != 0 ? links + copies : std::max(links, copies);
}

}  // namespace weft::sim
