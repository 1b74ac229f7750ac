// SPDX-License-Identifier: Apache-2.0
// One round of one domain: the images of its ranks in plan blocks, and what the routing says should
// be there. Ranks are named by their place in the domain.
#pragma once

#include <numeric>

#include "domain_plans.hpp"
#include "hosts/plan_image.hpp"
#include "plan_player.hpp"

namespace weft::test {

inline constexpr uint32_t kMaxTokens = 1200;
inline constexpr size_t kMaxTopk = DomainPlans::kTopk + 2;

class PlayedRound {
 public:
  PlayedRound(const DomainPlans& plans, const std::vector<int>& members, size_t index)
      : plans_(plans), members_(members), index_(index), player_(map_of(plans, members.size())) {
    std::vector<ImportedImage> images;
    for (const int member : members) {
      const Round sent = find_round(plans.plan(member), index);
      const PlanImage image(map_of(plans, members.size()), sent, plans.plan(member).shape.topk);
      ImportedImage& given = images.emplace_back();
      given.num_tokens = sent.num_tokens;
      given.bytes.assign(image.num_bytes(), kCanary);
      given.records = image.records();
      image.write_block(given.bytes, plans.plan(member), index == 0);
      image.write_records(given.bytes);
    }
    player_.play(images);
    for (size_t member = 0; member < members.size(); ++member) {
      tokens_.push_back(find_tokens(member));
    }
  }

  [[nodiscard]] const std::vector<int>& members() const { return members_; }
  [[nodiscard]] size_t index() const { return index_; }
  [[nodiscard]] const PlanData& plan(size_t member) const { return plans_.plan(members_[member]); }
  [[nodiscard]] PlanView block(size_t member) const { return player_.block(member); }

  // Returns the rank whose tokens a member sends, or -1.
  [[nodiscard]] int source(size_t member) const {
    if (index_ == 0) {
      return members_[member];
    }
    const auto forwarded = plan(member).between->domains->forwarded();
    return index_ <= forwarded.size() ? forwarded[index_ - 1] : -1;
  }
  // Returns the numbers of those tokens at the source.
  [[nodiscard]] const std::vector<int32_t>& tokens(size_t member) const { return tokens_[member]; }
  [[nodiscard]] std::vector<KeptRoute> routes(size_t from, int32_t token, size_t to) const {
    return plans_.routes(source(from), token, members_[to]);
  }
  // Returns the number in the round of each arrival's token, ascending.
  [[nodiscard]] std::vector<int32_t> arrivals(size_t from, size_t to) const {
    std::vector<int32_t> numbers;
    const std::vector<int32_t>& sent = tokens(from);
    for (size_t t = 0; t < sent.size(); ++t) {
      if (!routes(from, sent[t], to).empty()) {
        numbers.push_back(static_cast<int32_t>(t));
      }
    }
    return numbers;
  }

 private:
  static PlanMap map_of(const DomainPlans& plans, size_t members) {
    const auto num = static_cast<uint32_t>(members);
    const auto per_rank = static_cast<uint32_t>(plans.plan(0).shape.num_local_experts());
    return {num, num * per_rank, kMaxTokens, kMaxTopk};
  }

  [[nodiscard]] std::vector<int32_t> find_tokens(size_t member) const {
    if (index_ > 0) {
      return source(member) < 0 ? std::vector<int32_t>()
                                : plans_.tokens_into(source(member), members_);
    }
    std::vector<int32_t> all(static_cast<size_t>(plan(member).shape.num_tokens));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  const DomainPlans& plans_;
  const std::vector<int>& members_;
  size_t index_;
  PlanPlayer player_;
  std::vector<std::vector<int32_t>> tokens_;  // [members]
};

}  // namespace weft::test
