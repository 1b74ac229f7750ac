// SPDX-License-Identifier: Apache-2.0
// A rank for tests on several hosts: joins the group that the environment names, exchanges tokens
// and compares every byte until all rounds are done or something goes wrong, says what, and then,
// if told, does the same in a new group. With --shrink it goes on without lost ranks instead, until
// so many are left, and some rounds more, and says who they are; with --call-back it then invites
// new processes in the places of those that are lost, which are started with --join.
// usage: host_rank [--rounds N] [--timeout-ms N] [--transport NAME] [--spare-mb N]
//                  [--shrink NUM_LEFT [--call-back]] [--join RANK INVITATION]
//                  [--again RANK NUM_RANKS ADDRESS PORT]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <sys/resource.h>
#include <unistd.h>
#include <vector>

#include "support/errors.hpp"
#include "support/run_case.hpp"
#include "survivors/survivors.hpp"
#include "weft/group.hpp"

namespace weft::test {
namespace {

constexpr int kRoundsAgain = 2;
constexpr int kRoundsAfterLoss = 5;

struct Orders {
  int num_rounds = 1;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  std::string transport = "auto";
  int spare_mb = -1;  // memory that an exchange may take; negative: no limit
  std::optional<size_t> num_left = {};
  bool calls_back = false;
  int joins_as = -1;
  std::string invitation = {};
  std::optional<Rendezvous> again = {};
};

// Limits the process to `spare_mb` MiB more memory, as long as this lives; negative: no limit.
class ScopedLimit {
 public:
  explicit ScopedLimit(int spare_mb) {
    ::getrlimit(RLIMIT_AS, &before_);
    uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit = before_;
    if (spare_mb >= 0) {
      const auto page_bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
      limit.rlim_cur = pages * page_bytes + (static_cast<uint64_t>(spare_mb) << 20);
    }
    ::setrlimit(RLIMIT_AS, &limit);
  }
  ScopedLimit(const ScopedLimit&) = delete;
  ScopedLimit& operator=(const ScopedLimit&) = delete;
  ~ScopedLimit() { ::setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_ = {};
};

void say(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

ExchangeSetup make_setup(const Orders& orders, const Group& group) {
  const int num_ranks = group.num_ranks();
  ExchangeSetup setup;
  setup.num_ranks = num_ranks;
  setup.domain_of = group.topology().domain_of;
  setup.transport = orders.transport;
  setup.num_threads = 2;
  setup.hidden = 512;
  setup.num_experts = 2 * num_ranks;
  setup.timeout = orders.timeout;
  return setup;
}

// Makes the same cases on every rank, so that each knows what it must get.
std::vector<CaseData> make_cases(const Orders& orders, const Group& group) {
  const ExchangeSetup setup = make_setup(orders, group);
  std::vector<CaseData> cases;
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
    Case spec;
    spec.seed = 40 + cases.size();
    spec.num_tokens.assign(static_cast<size_t>(setup.num_ranks), setup.max_tokens);
    spec.num_tokens.front() = 0;
    spec.topk = setup.max_topk;
    spec.layout = layout;
    spec.calls = "dcdc";
    cases.push_back(make_case_data(setup, spec));
  }
  return cases;
}

void exchange_tokens(const Group& group, const Orders& orders, int num_rounds, int spare_mb = -1) {
  const auto cases = make_cases(orders, group);
  const ScopedLimit limit(spare_mb);
  Exchange exchange(group, cases.front().setup.config(group.rank()));
  say("ready");
  for (int round = 1; round <= num_rounds; ++round) {
    const std::string difference = run_cases(exchange, cases);
    if (!difference.empty()) {
      say(fmt::format("wrong {}", difference));
      std::exit(EXIT_FAILURE);
    }
    say(fmt::format("round {}", round));
  }
  group.barrier();
}

void run_round(const SurvivorRounds& rounds, Exchange& exchange, int round) {
  const std::string difference = rounds.run(exchange, static_cast<uint64_t>(round));
  if (!difference.empty()) {
    say(fmt::format("wrong {}", difference));
    std::exit(EXIT_FAILURE);
  }
  say(fmt::format("round {}", round));
}

void go_on_together(const SurvivorRounds& rounds, Exchange& exchange) {
  constexpr int kFirstRound = 1000;
  for (int round = 0; round < kRoundsAfterLoss; ++round) {
    run_round(rounds, exchange, kFirstRound + round);
  }
}

void survive(const Group& group, const Orders& orders, size_t num_left) {
  const ExchangeSetup setup = make_setup(orders, group);
  const SurvivorRounds rounds(setup, {});
  ExchangeConfig config = setup.config();
  config.on_peer_loss = PeerLoss::kShrink;
  Exchange exchange(group, config);
  for (int round = 1, num_after = 0; num_after < kRoundsAfterLoss; ++round) {
    run_round(rounds, exchange, round);
    num_after += exchange.report().alive.size() <= num_left ? 1 : 0;
  }
  if (orders.calls_back) {
    const std::vector<int> alive = exchange.report().alive;
    std::vector<int> lost;
    for (int rank = 0; rank < group.num_ranks(); ++rank) {
      if (!std::ranges::binary_search(alive, rank)) {
        lost.push_back(rank);
      }
    }
    if (alive.front() == group.rank()) {
      say(fmt::format("invitation {}", exchange.invitation()));
    }
    exchange.readmit(lost);
    go_on_together(rounds, exchange);
  }
  say(fmt::format("alive {}", fmt::join(exchange.report().alive, " ")));
}

void join(const Orders& orders) {
  const Group group = Group::rejoin(orders.joins_as, orders.invitation);
  const ExchangeSetup setup = make_setup(orders, group);
  ExchangeConfig config = setup.config();
  config.on_peer_loss = PeerLoss::kShrink;
  Exchange exchange(group, config);
  go_on_together(SurvivorRounds(setup, {}), exchange);
  say(fmt::format("alive {}", fmt::join(exchange.report().alive, " ")));
}

int run(const Orders& orders) {
  const auto thrown = thrown_by([&] {
    if (orders.joins_as >= 0) {
      join(orders);
      return;
    }
    const Group group = Group::from_env();
    if (orders.num_left) {
      survive(group, orders, *orders.num_left);
      return;
    }
    exchange_tokens(group, orders, orders.num_rounds, orders.spare_mb);
  });
  say(thrown ? fmt::format("error {}", thrown->text) : "good");
  if (!orders.again) {
    return thrown ? EXIT_FAILURE : EXIT_SUCCESS;
  }
  const auto thrown_again = thrown_by([&] {
    const Group group = Group::connect(*orders.again);
    exchange_tokens(group, orders, kRoundsAgain);
  });
  say(thrown_again ? fmt::format("error again {}", thrown_again->text) : "good again");
  return thrown_again ? EXIT_FAILURE : EXIT_SUCCESS;
}

Orders read_orders(const std::vector<std::string>& words) {
  Orders orders;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--rounds") {
      orders.num_rounds = std::stoi(words.at(++i));
    } else if (words[i] == "--timeout-ms") {
      orders.timeout = std::chrono::milliseconds(std::stoi(words.at(++i)));
    } else if (words[i] == "--transport") {
      orders.transport = words.at(++i);
    } else if (words[i] == "--spare-mb") {
      orders.spare_mb = std::stoi(words.at(++i));
    } else if (words[i] == "--shrink") {
      orders.num_left = std::stoul(words.at(++i));
    } else if (words[i] == "--call-back") {
      orders.calls_back = true;
    } else if (words[i] == "--join") {
      orders.joins_as = std::stoi(words.at(++i));
      orders.invitation = words.at(++i);
    } else if (words[i] == "--again") {
      Rendezvous& again = orders.again.emplace();
      again.rank = std::stoi(words.at(++i));
      again.num_ranks = std::stoi(words.at(++i));
      again.address = words.at(++i);
      again.port = std::stoi(words.at(++i));
      again.secret = std::getenv("WEFT_SECRET");
    } else {
      fmt::print(stderr, "host_rank: unknown argument '{}'\n", words[i]);
      std::exit(2);
    }
  }
  return orders;
}

}  // namespace
}  // namespace weft::test

int main(int argc, char** argv) {
  return weft::test::run(weft::test::read_orders({argv + 1, argv + argc}));
}
