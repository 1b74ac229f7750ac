// SPDX-License-Identifier: Apache-2.0
#include "exchange/tuning.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <utility>

#include "core/check.hpp"
#include "exchange/tuning_table.hpp"

namespace weft {
namespace {

constexpr double kDefaultShare = 0.55;  // of the senders, where nothing measured fits
constexpr double kOneRoleShare = 0.85;
constexpr double kNearly = 1.01;  // times that are not apart

RoleBlocks split(int num_sms, int senders) {
  const int first = std::clamp(senders, 1, std::max(1, num_sms - 1));
  return {first, std::max(1, num_sms - first)};
}

// How far apart two sizes are.
double factor(int64_t a, int64_t b) {
  return static_cast<double>(std::max(a, b)) / static_cast<double>(std::min(a, b));
}

}  // namespace

const std::vector<TunedSplit>& built_in_tuning() {
  static const std::vector<TunedSplit> splits(kBuiltInTuning.begin(), kBuiltInTuning.end());
  return splits;
}

std::vector<TunedSplit> load_tuning(const std::string& path) {
  const auto fail = [&](const std::string& problem) {
    raise_error(ErrorCode::kFile, Context{}, fmt::format("tuning: {}: {}", path, problem));
  };
  std::ifstream file(path);
  if (!file) {
    fail("cannot be opened");
  }
  std::vector<TunedSplit> splits;
  try {
    const auto json = nlohmann::json::parse(file);
    for (const auto& one : json.at("splits")) {
      TunedSplit split;
      split.op =
          one.at("op").get<std::string>() == "dispatch" ? TunedOp::kDispatch : TunedOp::kCombine;
      split.num_ranks = one.at("ranks").get<int>();
      split.row_bytes = one.at("row_bytes").get<int64_t>();
      split.blocks = {one.at("senders").get<int>(), one.at("others").get<int>()};
      split.us = one.at("us").get<double>();
      splits.push_back(split);
    }
  } catch (const nlohmann::json::exception& error) {
    fail(error.what());
  }
  for (const TunedSplit& split : splits) {
    if (split.num_ranks < 1 || split.row_bytes < 1 || split.blocks.first < 1 ||
        split.blocks.second < 1) {
      fail("ranks, row_bytes, senders and others must be at least 1");
    }
  }
  return splits;
}

RoleBlocks choose_blocks(const std::vector<TunedSplit>& tuning, const CallSize& size) {
  if (size.num_senders > 0) {
    return split(size.num_sms, size.num_senders);
  }
  if (size.is_one_role) {
    return split(size.num_sms, static_cast<int>(size.num_sms * kOneRoleShare));
  }
  // More ranks have fewer rows of a token each, which decides how much there is to fan out or sum.
  const auto distance = [&](const TunedSplit& one) {
    return std::pair(factor(one.num_ranks, size.num_ranks), factor(one.row_bytes, size.row_bytes));
  };
  const auto fits = [&](const TunedSplit& one) {
    return one.op == size.op && one.blocks.first + one.blocks.second <= size.num_sms;
  };
  const TunedSplit* fastest = nullptr;
  for (const TunedSplit& one : tuning) {
    if (fits(one) && (fastest == nullptr || std::pair(distance(one), one.us) <
                                                std::pair(distance(*fastest), fastest->us))) {
      fastest = &one;
    }
  }
  // Of those that are as fast the one with most blocks: with few, chance decides where they run.
  const auto rank_of = [](const TunedSplit& one) {
    return std::pair(-(one.blocks.first + one.blocks.second), one.us);
  };
  const TunedSplit* best = fastest;
  for (const TunedSplit& one : tuning) {
    if (fastest != nullptr && fits(one) && distance(one) == distance(*fastest) &&
        one.us <= kNearly * fastest->us && rank_of(one) < rank_of(*best)) {
      best = &one;
    }
  }
  return best == nullptr
             ? split(size.num_sms, static_cast<int>(std::lround(size.num_sms * kDefaultShare)))
             : best->blocks;
}

std::optional<RoleBlocks> blocks_of_short_combine(int num_sms, int64_t num_tokens, int at_once) {
  const int64_t sums = std::max<int64_t>(1, (num_tokens + at_once - 1) / at_once);
  if (2 * sums > num_sms) {
    return std::nullopt;
  }
  return RoleBlocks{num_sms - static_cast<int>(sums), static_cast<int>(sums)};
}

RoleBlocks BlockChoice::of(const CallSize& size) {
  const auto op = static_cast<size_t>(size.op);
  if (last_[op] != size) {
    blocks_[op] = choose_blocks(tuning_, size);
    last_[op] = size;
  }
  return blocks_[op];
}

}  // namespace weft
