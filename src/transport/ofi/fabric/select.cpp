// SPDX-License-Identifier: Apache-2.0
// Chooses the provider that all ranks can use, and reports on each.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <vector>

#include "core/check.hpp"
#include "core/env.hpp"
#include "group/agree.hpp"
#include "group/tcp/local_address.hpp"
#include "transport/common.hpp"
#include "transport/ofi/fabric/fabric.hpp"
#include "transport/ofi/ofi.hpp"

namespace weft::ofi {
namespace {

// Returns how many queues, up to `wanted`, every usable provider can have.
size_t fewest_queues(const std::vector<Offer>& offers, int wanted) {
  auto fewest = static_cast<size_t>(wanted);
  for (const Offer& offer : offers) {
    if (offer.info != nullptr) {
      const fi_domain_attr& domain = *offer.info->domain_attr;
      const bool has_one = (domain.mr_mode & FI_MR_ENDPOINT) != 0;
      fewest = std::min(fewest, has_one ? 1 : std::max<size_t>(domain.ep_cnt, 1));
    }
  }
  return fewest;
}

}  // namespace

FabricWish wish_for(const Group& group, std::string_view kind, std::string_view device) {
  FabricWish wish = read_wish(Env::read(), kind);
  const auto& hosts = group.topology().host_of;
  const auto self = hosts.begin() + group.rank();
  wish.turn = static_cast<size_t>(std::count(hosts.begin(), self, *self));
  wish.device = device;
  wish.has_gpu = !device.empty();
  wish.has_one_host = std::set<std::string>(hosts.begin(), hosts.end()).size() <= 1;
  return wish;
}

Selection select_provider(
    const Group& group, std::string_view kind, const TransportOptions& options
) {
  std::vector<Offer> offers;
  FabricWish wish;
  agree(group, [&] {
    wish = wish_for(group, kind, options.device);
    WEFT_CHECK(Context{}, api().obstacle.empty(), ErrorCode::kNotAvailable, "{}", api().obstacle);
    offers = list_offers(wish);
  });
  size_t num_queues = fewest_queues(offers, wish.num_queues);
  std::vector<std::string> own = {std::to_string(num_queues)};
  std::ranges::transform(offers, std::back_inserter(own), &Offer::obstacle);
  const std::string text =
      nlohmann::json(own).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  const std::vector<Bytes> blocks = group.all_gather(std::as_bytes(std::span(text)));
  std::map<int, std::vector<std::string>> answers;  // by rank: number of queues, obstacles
  for (int rank = 0; rank < group.num_ranks(); ++rank) {
    if (options.has(rank)) {
      const Bytes& block = blocks[static_cast<size_t>(rank)];
      const auto* const begin = reinterpret_cast<const char*>(block.data());
      answers[rank] = nlohmann::json::parse(begin, begin + block.size());
      num_queues = std::min<size_t>(num_queues, std::stoul(answers[rank].at(0)));
    }
  }
  std::vector<std::string> reasons;
  for (size_t i = 0; i < offers.size(); ++i) {
    const auto lacking = std::ranges::find_if(answers, [i](const auto& answer) {
      return !answer.second.at(i + 1).empty();
    });
    if (lacking == answers.end()) {
      return {std::move(offers[i]), static_cast<uint32_t>(num_queues)};
    }
    const auto& [rank, obstacles] = *lacking;
    reasons.push_back(
        fmt::format("{}: {} on rank {}", offers[i].provider->name, obstacles[i + 1], rank)
    );
  }
  WEFT_RAISE(
      context_of(group, "ofi"),
      ErrorCode::kNotAvailable,
      "open(ofi): no provider can be used by all ranks ({})",
      fmt::join(reasons, "; ")
  );
}

}  // namespace weft::ofi

namespace weft {

// --- what libfabric offers on this host and what Weft makes of it ---

namespace {

std::string memory_text(int mode) {
  static constexpr std::pair<int, const char*> kBits[] = {
      {FI_MR_LOCAL, "sources registered"},
      {FI_MR_VIRT_ADDR, "by address"},
      {FI_MR_ALLOCATED, "pages present"},
      {FI_MR_PROV_KEY, "keys of the provider"},
      {FI_MR_ENDPOINT, "bound to an endpoint"}};
  std::vector<std::string_view> names;
  for (const auto& [bit, name] : kBits) {
    if ((mode & bit) != 0) {
      names.emplace_back(name);
    }
  }
  return names.empty() ? "by offset" : fmt::format("{}", fmt::join(names, ", "));
}

FabricReport::Entry entry_of(const ofi::Offer& offer) {
  FabricReport::Entry entry = {
      .provider = std::string(offer.provider->name),
      .state = offer.obstacle.empty() ? "usable" : offer.obstacle,
      .fabric = {},
      .domain = {},
      .memory = {},
      .remark = std::string(offer.provider->remark)};
  if (offer.info != nullptr) {
    entry.fabric = offer.info->fabric_attr->prov_name;
    entry.domain = offer.info->domain_attr->name;
    if (offer.num_cards > 1) {
      entry.domain += fmt::format(", one of {}", offer.num_cards);
    }
    entry.memory = memory_text(offer.info->domain_attr->mr_mode);
    entry.memory += offer.gpu_obstacle.empty() ? ", GPUs' too" : "";
  }
  return entry;
}

}  // namespace

FabricReport fabric_report() {
  FabricReport report;
  if (!ofi::api().obstacle.empty()) {
    report.library = ofi::api().obstacle;
    return report;
  }
  report.library = fmt::format("libfabric {}", ofi::api().version);
  ofi::FabricWish wish = ofi::read_wish(Env::read(), "");
  wish.has_gpu = true;  // to see what it could do
  report.num_queues = wish.num_queues;
  try {
    report.address = local_address(wish.address);
  } catch (const Error&) {  // every provider that needs one says why there is none
  }
  for (const ofi::Offer& offer : ofi::list_offers(wish)) {
    report.providers.push_back(entry_of(offer));
    if (offer.info != nullptr && report.chosen.empty()) {
      report.providers.back().state = "chosen";
      report.chosen = report.providers.back().provider;
      report.why = wish.provider.empty() ? "best of those that are usable" : "asked for by name";
    }
  }
  return report;
}

std::string ofi_obstacle(const Group& group, std::string_view kind) {
  if (!ofi::api().obstacle.empty()) {
    return ofi::api().obstacle;
  }
  try {
    std::vector<std::string> reasons;
    for (const ofi::Offer& offer : ofi::list_offers(ofi::wish_for(group, kind))) {
      if (offer.obstacle.empty()) {
        return {};
      }
      reasons.push_back(fmt::format("{}: {}", offer.provider->name, offer.obstacle));
    }
    return fmt::format(
        "libfabric {} has no provider to use ({})", ofi::api().version, fmt::join(reasons, "; ")
    );
  } catch (const Error& error) {  // the environment asks for what there is not
    return error.what();
  }
}

}  // namespace weft
