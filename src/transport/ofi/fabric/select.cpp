// SPDX-License-Identifier: Apache-2.0
// Chooses the provider that all ranks can use, and reports on each.
#include <algorithm>
#include <limits>
#include <set>
#include <sstream>
#include <vector>

#include "core/check.hpp"
#include "core/env.hpp"
#include "transport/agree.hpp"
#include "transport/common.hpp"
#include "transport/ofi/fabric/card.hpp"
#include "transport/ofi/fabric/fabric.hpp"
#include "transport/ofi/ofi.hpp"

namespace weft::ofi {
namespace {

// One rank's offers as they travel: its number of queues, then for each provider of the table a
// line that is empty if it can be used.
std::string encode(const std::vector<Offer>& offers, size_t num_queues) {
  std::string text = std::to_string(num_queues) + "\n";
  for (const Offer& offer : offers) {
    text += offer.obstacle + "\n";
  }
  return text;
}

std::vector<std::string> decode(const Bytes& block) {
  std::istringstream text({reinterpret_cast<const char*>(block.data()), block.size()});
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) {
    lines.push_back(line);
  }
  WEFT_ASSERT(lines.size() == providers().size() + 1);
  return lines;
}

// As many queues, up to `wanted`, as every usable provider can have.
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

std::string obstacle_here(const FabricWish& wish) {
  if (!api().obstacle.empty()) {
    return api().obstacle;
  }
  std::vector<std::string> reasons;
  for (const Offer& offer : list_offers(wish)) {
    if (offer.obstacle.empty()) {
      return {};
    }
    reasons.push_back(fmt::format("{}: {}", offer.provider->name, offer.obstacle));
  }
  return fmt::format(
      "libfabric {} has no provider to use ({})", api().version, fmt::join(reasons, "; ")
  );
}

Selection select_provider(const Group& group, std::string_view kind, std::string_view device) {
  std::vector<Offer> offers;
  FabricWish wish;
  agree(group, [&] {
    wish = wish_for(group, kind, device);
    WEFT_CHECK(Context{}, api().obstacle.empty(), ErrorCode::kNotAvailable, "{}", api().obstacle);
    offers = list_offers(wish);
  });
  const size_t most = fewest_queues(offers, wish.num_queues);
  std::vector<std::vector<std::string>> answers;  // by rank
  auto num_queues = std::numeric_limits<uint32_t>::max();
  const std::string own = encode(offers, most);
  for (const Bytes& block : group.all_gather(std::as_bytes(std::span(own)))) {
    answers.push_back(decode(block));
    num_queues = std::min(num_queues, static_cast<uint32_t>(std::stoul(answers.back()[0])));
  }
  std::vector<std::string> reasons;
  for (size_t i = 0; i < offers.size(); ++i) {
    const auto lacking = std::find_if(answers.begin(), answers.end(), [i](const auto& lines) {
      return !lines[i + 1].empty();
    });
    if (lacking == answers.end()) {
      return {
          .provider = offers[i].provider,
          .info = std::move(offers[i].info),
          .gpu_obstacle = offers[i].gpu_obstacle,
          .num_queues = num_queues};
    }
    const auto rank = lacking - answers.begin();
    reasons.push_back(
        fmt::format("{}: {} on rank {}", offers[i].provider->name, (*lacking)[i + 1], rank)
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
    report.address = ofi::local_address(wish.address);
  } catch (const Error&) {  // every provider that needs one says why there is none
  }
  for (const ofi::Offer& offer : ofi::list_offers(wish)) {
    report.providers.push_back(entry_of(offer));
    if (offer.info != nullptr && report.chosen.empty()) {
      report.providers.back().state = "chosen";
      report.chosen = report.providers.back().provider;
      report.why = ofi::reason_for(wish);
    }
  }
  return report;
}

std::string ofi_obstacle(const Group& group, std::string_view kind) {
  try {
    return ofi::obstacle_here(ofi::wish_for(group, kind));
  } catch (const Error& error) {  // the environment asks for what there is not
    return error.what();
  }
}

}  // namespace weft
