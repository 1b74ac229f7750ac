// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/select.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <vector>

#include "core/check.hpp"
#include "core/env.hpp"
#include "transport/agree.hpp"

namespace weft::ofi {
namespace {

// One rank's offers as they travel: its number of queues, then for each provider of the table a
// line that is empty if it can be used.
Bytes encode(const std::vector<Offer>& offers, int num_queues) {
  std::string text = std::to_string(num_queues) + "\n";
  for (const Offer& offer : offers) {
    text += offer.obstacle + "\n";
  }
  Bytes block(text.size());
  std::memcpy(block.data(), text.data(), text.size());
  return block;
}

std::vector<std::string> decode(const Bytes& block) {
  std::vector<std::string> lines(1);
  for (const std::byte byte : block) {
    const char c = static_cast<char>(byte);
    if (c == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += c;
    }
  }
  lines.pop_back();  // behind the last end of line
  WEFT_ASSERT(lines.size() == providers().size() + 1);
  return lines;
}

uint32_t queues_of(const fi_info& info, int wanted) {
  const bool has_one = (info.domain_attr->mr_mode & FI_MR_ENDPOINT) != 0;
  const size_t most = has_one ? 1 : std::max<size_t>(info.domain_attr->ep_cnt, 1);
  return static_cast<uint32_t>(std::min<size_t>(static_cast<size_t>(wanted), most));
}

int fewest_queues(const std::vector<Offer>& offers, int wanted) {
  auto fewest = static_cast<uint32_t>(wanted);
  for (const Offer& offer : offers) {
    if (offer.info != nullptr) {
      fewest = std::min(fewest, queues_of(*offer.info, wanted));
    }
  }
  return static_cast<int>(fewest);
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
  std::string reasons;
  for (const Offer& offer : list_offers(wish)) {
    if (offer.obstacle.empty()) {
      return {};
    }
    reasons +=
        fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", offer.provider->name, offer.obstacle);
  }
  return fmt::format("libfabric {} has no provider to use ({})", api().version, reasons);
}

Selection select_provider(const Group& group, std::string_view kind, std::string_view device) {
  std::vector<Offer> offers;
  FabricWish wish;
  agree(group, [&] {
    wish = wish_for(group, kind, device);
    WEFT_CHECK(Context{}, api().obstacle.empty(), ErrorCode::kNotAvailable, "{}", api().obstacle);
    offers = list_offers(wish);
  });
  const int most = fewest_queues(offers, wish.num_queues);
  std::vector<std::vector<std::string>> answers;  // by rank
  auto num_queues = std::numeric_limits<uint32_t>::max();
  for (const Bytes& block : group.all_gather(encode(offers, most))) {
    answers.push_back(decode(block));
    num_queues = std::min(num_queues, static_cast<uint32_t>(std::stoul(answers.back()[0])));
  }
  std::string reasons;
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
    reasons += fmt::format(
        "{}{}: {} on rank {}",
        reasons.empty() ? "" : "; ",
        offers[i].provider->name,
        (*lacking)[i + 1],
        lacking - answers.begin()
    );
  }
  raise_error(
      ErrorCode::kNotAvailable,
      {.rank = group.rank(), .num_ranks = group.num_ranks(), .transport = "ofi"},
      fmt::format("open(ofi): no provider can be used by all ranks ({})", reasons)
  );
}

}  // namespace weft::ofi
