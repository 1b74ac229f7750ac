// SPDX-License-Identifier: Apache-2.0
// What libfabric offers on this host and what Weft makes of it.
#include "core/env.hpp"
#include "transport/ofi/address.hpp"
#include "transport/ofi/ofi.hpp"
#include "transport/ofi/select.hpp"

namespace weft {
namespace {

std::string memory_text(int mode) {
  struct Bit {
    int bit;
    const char* text;
  };
  static constexpr Bit kBits[] = {
      {FI_MR_LOCAL, "sources registered"},
      {FI_MR_VIRT_ADDR, "by address"},
      {FI_MR_ALLOCATED, "pages present"},
      {FI_MR_PROV_KEY, "keys of the provider"},
      {FI_MR_ENDPOINT, "bound to an endpoint"}};
  std::string text;
  for (const auto& [bit, name] : kBits) {
    if ((mode & bit) != 0) {
      text += fmt::format("{}{}", text.empty() ? "" : ", ", name);
    }
  }
  return text.empty() ? "by offset" : text;
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
