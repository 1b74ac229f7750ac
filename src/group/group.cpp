// SPDX-License-Identifier: Apache-2.0
#include "weft/group.hpp"

#include <algorithm>
#include <numeric>

#include "core/check.hpp"
#include "core/env.hpp"
#include "group/control_plane.hpp"
#include "group/local_control.hpp"
#include "group/topology.hpp"

namespace weft {

struct Group::State {
  int rank = 0;
  int num_ranks = 1;
  std::unique_ptr<ControlPlane> control;
  Topology topology;
};

namespace {

// The caller's own function, checked.
class FunctionControl final : public ControlPlane {
 public:
  FunctionControl(AllGather all_gather, Context context)
      : all_gather_(std::move(all_gather)), context_(context) {}

  std::vector<Bytes> all_gather(std::span<const std::byte> block) override {
    std::vector<Bytes> blocks = all_gather_(block);
    WEFT_CHECK_ARG(
        context_,
        blocks.size() == static_cast<size_t>(context_.num_ranks),
        "all_gather: the function returned {} blocks (one per rank: {})",
        blocks.size(),
        context_.num_ranks
    );
    return blocks;
  }

 private:
  AllGather all_gather_;
  Context context_;
};

// All ranks of the group call it; each hears the members of its own part.
class PartControl final : public ControlPlane {
 public:
  PartControl(Group group, std::vector<int> members)
      : group_(std::move(group)), members_(std::move(members)) {}

  std::vector<Bytes> all_gather(std::span<const std::byte> block) override {
    std::vector<Bytes> blocks = group_.all_gather(block);
    std::vector<Bytes> mine;
    for (const int member : members_) {
      mine.push_back(std::move(blocks[static_cast<size_t>(member)]));
    }
    return mine;
  }

 private:
  Group group_;
  std::vector<int> members_;
};

}  // namespace

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
  WEFT_CHECK_ARG(
      Context{}, num_ranks >= 1, "group: num_ranks = {} is too small (at least 1)", num_ranks
  );
  WEFT_CHECK_ARG(
      Context{},
      rank >= 0 && rank < num_ranks,
      "group: rank {} is out of range (num_ranks = {})",
      rank,
      num_ranks
  );
  WEFT_CHECK_ARG(
      (Context{rank, num_ranks, {}}), all_gather != nullptr, "group: all_gather is empty"
  );
  const Context context{rank, num_ranks, {}};
  return make_group(
      rank, num_ranks, std::make_unique<FunctionControl>(std::move(all_gather), context)
  );
}

Group make_group(int rank, int num_ranks, std::unique_ptr<ControlPlane> control) {
  const Env env = Env::read();
  Topology topology = probe_topology(*control, env.ranks_per_domain, {rank, num_ranks, {}});
  return Group(std::make_shared<Group::State>(Group::State{
      rank, num_ranks, std::move(control), std::move(topology)}));
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
  std::vector<int> ranks(members.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return Group(std::make_shared<Group::State>(Group::State{
      static_cast<int>(place - members.begin()),
      static_cast<int>(members.size()),
      std::make_unique<PartControl>(group, members),
      make_topology({ranks}, std::move(hosts), group.topology().one_process)}));
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
  return state_->control->all_gather(block);
}

void Group::barrier() const {
  static_cast<void>(all_gather({}));
}

}  // namespace weft
