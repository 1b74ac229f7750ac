// SPDX-License-Identifier: Apache-2.0
#include "weft/group.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>

#include "core/check.hpp"
#include "core/clock.hpp"
#include "core/env.hpp"
#include "group/control_plane.hpp"
#include "group/invitation.hpp"
#include "group/topology.hpp"

namespace weft {

struct Group::State {
  int rank = 0;
  int num_ranks = 1;
  AllGather all_gather;
  Topology topology;
  pid_t maker = ::getpid();
  std::optional<Invitation> invitation = {};
};

std::vector<Group> Group::local(int num_ranks) {
  const Env env = Env::read();
  auto controls = make_local_control(num_ranks, env.timeout);
  const Topology topology = local_topology(num_ranks, env.ranks_per_domain);
  std::vector<Group> groups;
  for (int rank = 0; rank < num_ranks; ++rank) {
    auto& control = controls[static_cast<size_t>(rank)];
    groups.push_back(Group(std::make_shared<State>(State{
        rank, num_ranks, std::move(control), topology})));
  }
  return groups;
}

Group Group::from_all_gather(int rank, int num_ranks, AllGather all_gather) {
  check_place("group", rank, num_ranks);
  const Context context{rank, num_ranks, {}};
  WEFT_CHECK_ARG(context, all_gather != nullptr, "group: all_gather is empty");
  const auto checked = [all_gather = std::move(all_gather),
                        context](std::span<const std::byte> block) {
    std::vector<Bytes> blocks = all_gather(block);
    WEFT_CHECK_ARG(
        context,
        blocks.size() == static_cast<size_t>(context.num_ranks),
        "all_gather: the function returned {} blocks (one per rank: {})",
        blocks.size(),
        context.num_ranks
    );
    return blocks;
  };
  return make_group(rank, num_ranks, checked);
}

Group make_group(int rank, int num_ranks, AllGather all_gather) {
  const auto setting = [] { return Env::read().ranks_per_domain; };
  Topology topology = probe_topology(all_gather, setting, {rank, num_ranks, {}});
  return Group(std::make_shared<Group::State>(Group::State{
      rank, num_ranks, std::move(all_gather), std::move(topology)}));
}

Group part_of(const Group& group, const std::vector<int>& members) {
  const auto place = std::ranges::find(members, group.rank());
  WEFT_CHECK_ARG(
      (Context{group.rank(), group.num_ranks(), {}}),
      place != members.end(),
      "group: rank {} is not among the {} ranks of its part",
      group.rank(),
      members.size()
  );
  std::vector<std::string> hosts;
  for (const int member : members) {
    hosts.push_back(group.topology().host_of[static_cast<size_t>(member)]);
  }
  // All ranks of the group call all_gather; each hears the members of its own part.
  const auto all_gather = [group, members](std::span<const std::byte> block) {
    std::vector<Bytes> blocks = group.all_gather(block);
    std::vector<Bytes> mine;
    for (const int member : members) {
      mine.push_back(std::move(blocks[static_cast<size_t>(member)]));
    }
    return mine;
  };
  std::vector<int> ranks(members.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return Group(std::make_shared<Group::State>(Group::State{
      static_cast<int>(place - members.begin()),
      static_cast<int>(members.size()),
      all_gather,
      make_topology({ranks}, std::move(hosts), group.topology().one_process)}));
}

Group Group::rejoin(int rank, std::string_view invitation) {
  Invitation invited = Invitation::from_text(invitation);
  check_place("rejoin", rank, invited.num_ranks);
  Topology& topology = invited.topology;
  const auto at = static_cast<size_t>(rank);
  const bool is_alone = topology.domains[static_cast<size_t>(topology.domain_of[at])].size() == 1;
  WEFT_CHECK(
      (Context{rank, invited.num_ranks, {}}),
      is_alone || topology.host_of[at] == this_host(),
      ErrorCode::kUnsupported,
      "rejoin: this process is on host {}, and rank {} shared memory with others on host {}",
      this_host(),
      rank,
      topology.host_of[at]
  );
  topology.host_of[at] = this_host();
  const AllGather none = [rank, num_ranks = invited.num_ranks](auto) -> std::vector<Bytes> {
    WEFT_RAISE(
        (Context{rank, num_ranks, {}}),
        ErrorCode::kUnsupported,
        "all_gather: the group was made by rejoin, for one exchange alone"
    );
  };
  return Group(std::make_shared<State>(State{
      .rank = rank,
      .num_ranks = invited.num_ranks,
      .all_gather = none,
      .topology = topology,
      .invitation = invited}));
}

std::optional<Invitation> invitation_of(const Group& group) {
  return group.state_->invitation;
}

Group with_control(const Group& group, AllGather all_gather) {
  return Group(std::make_shared<Group::State>(Group::State{
      group.rank(), group.num_ranks(), std::move(all_gather), group.topology()}));
}

int Group::rank() const {
  return state_->rank;
}

int Group::num_ranks() const {
  return state_->num_ranks;
}

const Topology& Group::topology() const {
  return state_->topology;
}

std::vector<Bytes> Group::all_gather(std::span<const std::byte> block) const {
  check_maker("all_gather", state_->maker, {rank(), num_ranks(), {}});
  return state_->all_gather(block);
}

void Group::barrier() const {
  static_cast<void>(all_gather({}));
}

namespace {

using Blocks = std::vector<Bytes>;

class Table {
 public:
  Table(int num_ranks, std::chrono::milliseconds timeout)
      : timeout_(timeout), block_of_(static_cast<size_t>(num_ranks)) {}

  Blocks all_gather(int rank, std::span<const std::byte> block) {
    const Deadline deadline(timeout_);
    std::unique_lock lock(mutex_);
    throw_if_broken(rank);
    block_of_[static_cast<size_t>(rank)] = Bytes(block.begin(), block.end());
    if (absent().empty()) {
      complete_round();
      return *done_;
    }
    const uint64_t round = round_;
    while (round_ == round && !failure_) {
      if (changed_.wait_until(lock, deadline.end()) == std::cv_status::timeout && round_ == round) {
        break_off(late_failure(absent(), timeout_));
      }
    }
    if (round_ == round) {
      throw_if_broken(rank);
    }
    // The next round cannot complete before this rank joins it, so `done_` is still this round's.
    return *done_;
  }

  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    break_off({ErrorCode::kPeerFailed, fmt::format("all_gather: rank {} left the group", rank)});
  }

 private:
  [[nodiscard]] int num_ranks() const { return static_cast<int>(block_of_.size()); }
  [[nodiscard]] std::vector<int> absent() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      if (!block_of_[static_cast<size_t>(rank)]) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  }

  void complete_round() {
    auto blocks = std::make_shared<Blocks>();
    for (auto& block : block_of_) {
      blocks->push_back(std::move(*block));
      block.reset();
    }
    done_ = std::move(blocks);
    ++round_;
    changed_.notify_all();
  }

  // The first failure stays: a table that lost a rank is of no more use.
  void break_off(Failure failure) {
    failure_ = failure_.value_or(std::move(failure));
    changed_.notify_all();
  }

  void throw_if_broken(int rank) const {
    if (failure_) {
      failure_->raise({rank, num_ranks(), {}});
    }
  }

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t round_ = 0;
  std::optional<Failure> failure_;
  std::vector<std::optional<Bytes>> block_of_;  // by rank, of the round that is filling
  std::shared_ptr<const Blocks> done_;          // of the last round that filled
};

}  // namespace

std::vector<AllGather> make_local_control(int num_ranks, std::chrono::milliseconds timeout) {
  check_place("local", 0, num_ranks);
  const auto table = std::make_shared<Table>(num_ranks, timeout);
  std::vector<AllGather> controls;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::shared_ptr<void> seat(nullptr, [table, rank, maker = ::getpid()](void*) {
      if (::getpid() == maker) {
        table->leave(rank);
      }
    });
    controls.emplace_back([table, rank, seat](std::span<const std::byte> block) {
      return table->all_gather(rank, block);
    });
  }
  return controls;
}

}  // namespace weft
