// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <utility>

#include "group/tcp/local_address.hpp"
#include "transport/ofi/fabric/fabric.hpp"
#include "transport/ofi/fabric/queue.hpp"

namespace weft::ofi {
namespace {

constexpr std::array kProviders = {
    Provider{
        .name = "cxi",
        .reaches_gpus = true,
        .remark = "Slingshot; memory is bound to one endpoint, so there is one queue"},
    Provider{
        .name = "efa",
        .reaches_gpus = true,
        .remark = "unordered; memory of sources is registered, keys are its own"},
    Provider{
        .name = "verbs",
        .reaches_gpus = true,
        .remark = "InfiniBand and RoCE, reliable datagrams by ofi_rxm; memory of sources is "
                  "registered, keys are its own"},
    Provider{
        .name = "tcp",
        .takes_address = true,
        .write_completion = FI_TRANSMIT_COMPLETE,
        .remark = "sockets of any host, one stream for each pair of endpoints"},
    // Last, and only by name: ranks that share a host have a better way, and a process that is
    // killed leaves this provider's files in /dev/shm.
    Provider{
        .name = "shm",
        .is_local = true,
        .remark = "between processes of one host, when asked for by name"},
};

Info make_hints(const Provider& provider, const FabricWish& wish, bool has_gpu_memory) {
  Info hints(api().dupinfo(nullptr));
  WEFT_CHECK(Context{}, hints != nullptr, ErrorCode::kOutOfMemory, "fi_dupinfo: no memory");
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
  hints->ep_attr->type = FI_EP_RDM;
  hints->tx_attr->size = kMaxFlying;  // providers set memory aside for each
  hints->rx_attr->size = kNumReceives;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  if (has_gpu_memory) {
    hints->caps |= FI_HMEM;
    hints->domain_attr->mr_mode |= FI_MR_HMEM;
  }
  // Freed with the hints.
  hints->fabric_attr->prov_name = ::strdup(std::string(provider.name).c_str());
  if (wish.domains.size() == 1) {
    hints->domain_attr->name = ::strdup(wish.domains.front().c_str());
  }
  return hints;
}

// Returns an error's text without the place in the source.
std::string plain_text(const Error& error) {
  const std::string text = error.what();
  return text.substr(0, text.rfind(" at "));
}

// Returns why this rank does not ask for memory of GPUs; empty: it does.
std::string gpu_memory_obstacle(const Provider& provider, const FabricWish& wish) {
  if (!wish.has_gpu) {
    return "this rank has no GPU";
  }
  if (wish.gpu_memory == FabricGpuMemory::kHost) {
    return "WEFT_FABRIC_GPU_MEMORY is host";
  }
  if (wish.gpu_memory == FabricGpuMemory::kAuto && !provider.reaches_gpus) {
    return fmt::format(
        "provider {} does not reach it (WEFT_FABRIC_GPU_MEMORY is auto)", provider.name
    );
  }
  return {};
}

// Asks libfabric for an offer on one card. Throws Error for what libfabric would say less well.
void query(const Provider& provider, const FabricWish& wish, bool has_gpu_memory, Offer& offer) {
  const Info hints = make_hints(provider, wish, has_gpu_memory);
  const std::string address = provider.takes_address ? local_address(wish.address) : "";
  const KeptHandlers kept;
  fi_info* found = nullptr;
  const int result = api().getinfo(
      kApiVersion,
      provider.takes_address ? address.c_str() : nullptr,
      nullptr,
      provider.takes_address ? FI_SOURCE | FI_NUMERICHOST : 0,
      hints.get(),
      &found
  );
  const Info all(found);
  check_call(Context{}, provider.name, "fi_getinfo", result);
  const std::vector<const fi_info*> cards = list_cards(all.get(), wish.domains);
  WEFT_CHECK(  // not every provider minds what it is asked
      Context{},
      !cards.empty(),
      ErrorCode::kNotAvailable,
      "it has no domain \"{}\" (but {})",
      fmt::join(wish.domains, ","),
      all->domain_attr->name
  );
  std::vector<std::string> addresses;
  std::ranges::transform(cards, std::back_inserter(addresses), [](const fi_info* card) {
    return card_address(*card);
  });
  const size_t chosen =
      cards.size() == 1 ? 0 : choose_card(HostMap::here(), wish.device, addresses, wish.turn);
  Info info(api().dupinfo(cards[chosen]));
  WEFT_CHECK(Context{}, info != nullptr, ErrorCode::kOutOfMemory, "fi_dupinfo: no memory");
  WEFT_CHECK(
      Context{},
      info->domain_attr->cq_data_size >= 4,
      ErrorCode::kNotAvailable,
      "it carries {} B of data with a write (at least 4)",
      info->domain_attr->cq_data_size
  );
  offer.info = std::move(info);
  offer.num_cards = cards.size();
}

// Asks with memory of GPUs if that can be had.
void query(const Provider& provider, const FabricWish& wish, Offer& offer) {
  offer.gpu_obstacle = gpu_memory_obstacle(provider, wish);
  if (offer.gpu_obstacle.empty()) {
    try {
      query(provider, wish, true, offer);
      return;
    } catch (const Error& error) {
      offer.gpu_obstacle = fmt::format("with FI_HMEM: {}", plain_text(error));
    }
  }
  query(provider, wish, false, offer);
}

// Returns what speaks against a provider before libfabric is asked; empty: nothing.
std::string obstacle_to(const Provider& provider, const FabricWish& wish) {
  if (!wish.provider.empty() && wish.provider != provider.name) {
    return fmt::format("{} is asked for", wish.provider);
  }
  if (provider.is_local && !wish.has_one_host) {
    return "the ranks are on several hosts";
  }
  if (provider.is_local && wish.provider.empty()) {
    return "used only when asked for by name";
  }
  if (provider.takes_address && !wish.has_one_host && wish.address.empty()) {
    return "the ranks are on several hosts and WEFT_FABRIC_ADDRESS, the network to use, is not set";
  }
  return {};
}

}  // namespace

std::span<const Provider> providers() {
  return kProviders;
}

FabricWish read_wish(const Env& env, std::string_view kind) {
  FabricWish wish;
  const std::string fabric(kind.empty() ? env.fabric.value_or("") : kind);
  const size_t slash = fabric.find('/');
  wish.provider = fabric.substr(0, slash);
  for (size_t end = slash; end != std::string::npos;) {
    const size_t begin = end + 1;
    end = fabric.find(',', begin);
    wish.domains.push_back(fabric.substr(begin, end - begin));
  }
  std::vector<std::string_view> known;
  std::ranges::transform(kProviders, std::back_inserter(known), &Provider::name);
  WEFT_CHECK_ARG(
      Context{},
      wish.provider.empty() || std::ranges::find(known, wish.provider) != known.end(),
      "open(ofi): \"{}\" names no provider that is known ({})",
      fabric,
      fmt::join(known, ", ")
  );
  wish.address = env.fabric_address.value_or("");
  wish.num_queues = env.fabric_queues;
  wish.gpu_memory = env.fabric_gpu_memory;
  return wish;
}

std::vector<Offer> list_offers(const FabricWish& wish) {
  std::vector<Offer> offers;
  for (const Provider& provider : kProviders) {
    Offer offer;
    offer.provider = &provider;
    offer.obstacle = obstacle_to(provider, wish);
    if (offer.obstacle.empty()) {
      try {
        query(provider, wish, offer);
      } catch (const Error& error) {
        offer.obstacle = plain_text(error);
      }
    }
    offers.push_back(std::move(offer));
  }
  return offers;
}

}  // namespace weft::ofi
