// SPDX-License-Identifier: Apache-2.0
#include "group/topology.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <numeric>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "core/log.hpp"
#include "core/printable.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"
#include "group/shared_memory.hpp"

namespace weft {

std::vector<std::vector<int>> domains_of(const Reach& reach) {
  std::vector<std::vector<int>> domains;
  for (int rank = 0; rank < static_cast<int>(reach.size()); ++rank) {
    const auto home = std::ranges::find_if(domains, [&](const std::vector<int>& domain) {
      return std::ranges::all_of(domain, [&](int member) {
        const auto a = static_cast<size_t>(rank);
        const auto b = static_cast<size_t>(member);
        return reach[a][b] != 0 && reach[b][a] != 0;
      });
    });
    if (home == domains.end()) {
      domains.push_back({rank});
    } else {
      home->push_back(rank);
    }
  }
  return domains;
}

std::vector<std::vector<int>> split_domains(
    const std::vector<std::vector<int>>& domains, int ranks_per_domain, const Context& context
) {
  WEFT_CHECK_ARG(
      context,
      ranks_per_domain >= 1,
      "topology: WEFT_RANKS_PER_DOMAIN = {} is too small (at least 1)",
      ranks_per_domain
  );
  const auto size = static_cast<size_t>(ranks_per_domain);
  size_t num_ranks = 0;
  for (const std::vector<int>& domain : domains) {
    num_ranks += domain.size();
  }
  if (num_ranks < size) {
    return domains;  // a program may have a small group next to its large one
  }
  std::vector<std::vector<int>> parts;
  for (const std::vector<int>& domain : domains) {
    WEFT_CHECK_ARG(
        context,
        domain.size() % size == 0,
        "topology: WEFT_RANKS_PER_DOMAIN = {} does not divide a domain of {} ranks (the one of "
        "rank {})",
        ranks_per_domain,
        domain.size(),
        domain.front()
    );
    for (auto first = domain.begin(); first != domain.end(); first += ranks_per_domain) {
      parts.emplace_back(first, first + ranks_per_domain);
    }
  }
  std::ranges::sort(parts);  // by lowest member
  return parts;
}

Topology make_topology(
    std::vector<std::vector<int>> domains, std::vector<std::string> host_of, bool one_process
) {
  Topology topology;
  topology.domain_of.resize(host_of.size());
  for (size_t i = 0; i < domains.size(); ++i) {
    for (const int rank : domains[i]) {
      topology.domain_of[static_cast<size_t>(rank)] = static_cast<int>(i);
    }
  }
  topology.domains = std::move(domains);
  topology.host_of = std::move(host_of);
  topology.one_process = one_process;
  return topology;
}

Topology local_topology(int num_ranks, std::optional<int> ranks_per_domain) {
  const auto size = static_cast<size_t>(num_ranks);
  std::vector<std::vector<int>> domains = {std::vector<int>(size)};
  std::iota(domains[0].begin(), domains[0].end(), 0);
  if (ranks_per_domain) {
    domains = split_domains(domains, *ranks_per_domain, {});
  }
  return make_topology(std::move(domains), std::vector<std::string>(size, this_host()), true);
}

std::string this_host() {
  std::array<char, 256> name = {};
  return gethostname(name.data(), name.size() - 1) == 0 ? printable(name.data()) : "unknown";
}

namespace {

template <size_t kSize>
void copy_text(std::array<char, kSize>& to, const std::string& text) {
  to = {};
  std::memcpy(to.data(), text.data(), std::min(text.size(), kSize - 1));
}

}  // namespace

ProcessPlace this_place() {
  ProcessPlace place;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  file >> boot_id;
  copy_text(place.boot_id, boot_id);
  struct stat status = {};
  place.pid_namespace = stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
  place.pid = getpid();
  return place;
}

// --- what can really be mapped: each rank shares a page that holds a random number, and looks for
// the numbers of all others ---

namespace {

using Nonce = std::array<std::byte, 32>;

// Facts that each rank tells the others. Trivially copyable; every version begins with the version.
struct Card {
  uint32_t version = kProtocolVersion;
  SharedMemoryRef probe;
  Nonce nonce = {};
  ProcessPlace place;
  int32_t ranks_per_domain = 0;  // 0: not given
  std::array<char, 256> host = {};
  uint32_t outcome_bytes = 0;  // why the rest is missing; 0: it is not
  std::array<std::byte, 1024> outcome = {};
};

// Makes `probe` and a card that names it. `probe` must live as long as others may map it.
Card make_card(const RanksPerDomain& read_ranks_per_domain, SharedMemory& probe) {
  Card card;
  const Bytes outcome = outcome_of([&] {
    card.ranks_per_domain = read_ranks_per_domain().value_or(0);
    probe = SharedMemory::create(sizeof(Nonce));
    card.probe = probe.ref();
    card.nonce = random_value<Nonce>();
    card.place = this_place();
    std::memcpy(probe.data(), card.nonce.data(), card.nonce.size());
    copy_text(card.host, this_host());
  });
  card.outcome_bytes = static_cast<uint32_t>(std::min(outcome.size(), card.outcome.size()));
  std::copy_n(outcome.begin(), card.outcome_bytes, card.outcome.begin());
  return card;
}

// Returns all cards. Throws for a card of another version, which a group over the caller's own
// control plane meets only here, of a rank that could not make its card, or of another setting.
std::vector<Card> swap_cards(const AllGather& all_gather, const Card& own, const Context& context) {
  std::vector<Card> cards;
  for (const Bytes& block : all_gather(std::as_bytes(std::span(&own, 1)))) {
    Card card;
    std::memcpy(&card, block.data(), std::min(block.size(), sizeof card));
    WEFT_CHECK(
        context,
        card.version == kProtocolVersion && block.size() == sizeof card,
        ErrorCode::kPeerFailed,
        "topology: rank {} speaks version {} in {} B (here: {} in {} B). Run the same Weft on all "
        "ranks",
        cards.size(),
        card.version,
        block.size(),
        kProtocolVersion,
        sizeof card
    );
    card.host.back() = '\0';
    cards.push_back(card);
  }
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    const size_t bytes = std::min<size_t>(cards[rank].outcome_bytes, cards[rank].outcome.size());
    check_outcome(std::span(cards[rank].outcome).first(bytes), rank, context);
  }
  for (size_t rank = 1; rank < cards.size(); ++rank) {
    WEFT_CHECK_ARG(
        context,
        cards[rank].ranks_per_domain == cards[0].ranks_per_domain,
        "topology: WEFT_RANKS_PER_DOMAIN differs: {} on rank 0, {} on rank {} (0: not set)",
        cards[0].ranks_per_domain,
        cards[rank].ranks_per_domain,
        rank
    );
  }
  return cards;
}

// Returns why this rank cannot map the card's probe; empty: it can.
std::string map_obstacle(const Card& card) {
  try {
    const SharedMemory memory = SharedMemory::open(card.probe);
    const bool is_that = memory.bytes() >= sizeof(Nonce) &&
                         std::memcmp(memory.data(), card.nonce.data(), sizeof(Nonce)) == 0;
    return is_that ? "" : "another process's memory is there";
  } catch (const Error& error) {
    return error.what();
  }
}

// Logs, on one rank, that two ranks of a host share no memory, so that a network joins them.
void tell_apart(
    const Reach& reach,
    const std::vector<Card>& cards,
    const std::vector<std::string>& obstacles,
    const Context& context
) {
  for (size_t a = 0; a < cards.size(); ++a) {
    for (size_t b = 0; b < cards.size(); ++b) {
      const ProcessPlace& here = cards[a].place;
      const ProcessPlace& there = cards[b].place;
      const bool is_one_host = here.boot_id == there.boot_id && here.boot_id.front() != 0;
      if (!is_one_host || reach[a][b] != 0) {
        continue;
      }
      if (std::cmp_equal(a, context.rank)) {
        const bool is_apart = here.pid_namespace != there.pid_namespace;
        log(LogLevel::kWarn,
            "topology: ranks {} and {} are on one host and share no memory: {}",
            a,
            b,
            is_apart ? "their pid namespaces differ" : obstacles[b]);
      }
      return;
    }
  }
}

// Returns who maps whom. The exchange of this also tells that no rank needs the probes any more.
Reach swap_rows(
    const AllGather& all_gather, const std::vector<Card>& cards, const Context& context
) {
  std::vector<std::string> obstacles;
  std::ranges::transform(cards, std::back_inserter(obstacles), map_obstacle);
  std::vector<uint8_t> row(cards.size());
  std::ranges::transform(obstacles, row.begin(), &std::string::empty);
  Reach reach;
  for (const Bytes& block : all_gather(std::as_bytes(std::span(row)))) {
    WEFT_CHECK(
        context,
        block.size() == cards.size(),
        ErrorCode::kPeerFailed,
        "topology: rank {} sent a row of {} ranks (expected {})",
        reach.size(),
        block.size(),
        cards.size()
    );
    std::memcpy(reach.emplace_back(block.size()).data(), block.data(), block.size());
  }
  tell_apart(reach, cards, obstacles, context);
  return reach;
}

}  // namespace

Topology probe_topology(
    const AllGather& all_gather, const RanksPerDomain& read_ranks_per_domain, const Context& context
) {
  SharedMemory probe;
  const Card own = make_card(read_ranks_per_domain, probe);
  const std::vector<Card> cards = swap_cards(all_gather, own, context);
  const Reach reach = swap_rows(all_gather, cards, context);

  auto domains = domains_of(reach);
  if (own.ranks_per_domain > 0) {
    domains = split_domains(domains, own.ranks_per_domain, context);
  }
  std::vector<std::string> host_of;
  for (const Card& other : cards) {
    host_of.emplace_back(other.host.data());
  }
  const bool one_process =
      std::ranges::all_of(cards, [&](const Card& other) { return other.place == cards[0].place; });
  return make_topology(std::move(domains), std::move(host_of), one_process);
}

}  // namespace weft
