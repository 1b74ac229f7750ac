// SPDX-License-Identifier: Apache-2.0
#include "cuda/exchange/tuning.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>
#include <utility>

#include "core/atomic_file.hpp"
#include "core/check.hpp"

namespace weft {

extern const char* const kBuiltInTuning;  // the text of tuning.json

namespace {

constexpr double kDefaultShare = 0.55;  // of the senders, where nothing measured fits
constexpr double kOneRoleShare = 0.95;
constexpr double kNearly = 1.01;  // times that are not apart

RoleBlocks split(int num_sms, int senders) {
  const int first = std::clamp(senders, 1, std::max(1, num_sms - 1));
  return {first, std::max(1, num_sms - first)};
}

int total(const RoleBlocks& blocks) {
  return blocks.first + blocks.second;
}

// Returns the larger size over the smaller.
double factor(int64_t a, int64_t b) {
  return static_cast<double>(std::max(a, b)) / static_cast<double>(std::min(a, b));
}

std::vector<TunedSplit> parse_tuning(std::istream& text, const std::string& name) {
  const auto fail = [&](const std::string& problem) {
    raise_error(ErrorCode::kFile, Context{}, fmt::format("tuning: {}: {}", name, problem));
  };
  std::vector<TunedSplit> splits;
  try {
    const auto json = nlohmann::json::parse(text);
    for (const auto& one : json.at("splits")) {
      TunedSplit split;
      split.op = one.at("op").get<std::string>() == "dispatch" ? Op::kDispatch : Op::kCombine;
      split.num_ranks = one.at("ranks").get<int>();
      split.row_bytes = one.at("row_bytes").get<int64_t>();
      split.blocks = {one.at("senders").get<int>(), one.at("others").get<int>()};
      split.us = one.at("us").get<double>();
      split.one_row = one.value("layout", "") == "rank_major";
      if (split.num_ranks < 1 || split.row_bytes < 1 || split.blocks.first < 1 ||
          split.blocks.second < 1) {
        fail("ranks, row_bytes, senders and others must be at least 1");
      }
      splits.push_back(split);
    }
  } catch (const nlohmann::json::exception& error) {
    fail(error.what());
  }
  return splits;
}

bool fits(const TunedSplit& one, const CallSize& size) {
  return one.op == size.op && one.one_row == size.one_row && total(one.blocks) <= size.num_sms;
}

// Returns the best split that fits and was measured with `num_ranks`; there must be one.
TunedSplit best_split(const std::vector<TunedSplit>& tuning, const CallSize& size, int num_ranks) {
  std::vector<TunedSplit> splits;
  std::ranges::copy_if(tuning, std::back_inserter(splits), [&](const TunedSplit& one) {
    return one.num_ranks == num_ranks && fits(one, size);
  });
  const auto distance = [&](const TunedSplit& one) {
    return factor(one.row_bytes, size.row_bytes);
  };
  const TunedSplit fastest = std::ranges::min(splits, {}, [&](const TunedSplit& one) {
    return std::pair(distance(one), one.us);
  });
  // Takes the split with most blocks among those as fast: where few blocks run is decided by
  // chance.
  std::erase_if(splits, [&](const TunedSplit& one) {
    return distance(one) != distance(fastest) || one.us > kNearly * fastest.us;
  });
  const auto order = [](const TunedSplit& one) { return std::pair(-total(one.blocks), one.us); };
  return std::ranges::min(splits, {}, order);
}

}  // namespace

const std::vector<TunedSplit>& built_in_tuning() {
  static const std::vector<TunedSplit> splits = [] {
    std::istringstream text(kBuiltInTuning);
    return parse_tuning(text, "built in");
  }();
  return splits;
}

std::vector<TunedSplit> load_tuning(const std::string& path) {
  std::istringstream text(read_whole_file(path));
  return parse_tuning(text, path);
}

std::vector<TunedSplit> useful_splits(const std::vector<TunedSplit>& tuning) {
  std::vector<TunedSplit> useful;
  for (const TunedSplit& one : tuning) {
    const CallSize size = {
        .op = one.op,
        .num_ranks = one.num_ranks,
        .row_bytes = one.row_bytes,
        .num_sms = total(one.blocks),
        .one_row = one.one_row};
    const TunedSplit best = best_split(tuning, size, one.num_ranks);
    if (std::ranges::find(useful, best) == useful.end()) {
      useful.push_back(best);
    }
  }
  return useful;
}

MeasuredRanks measured_ranks(const std::vector<TunedSplit>& tuning, const CallSize& size) {
  MeasuredRanks found;
  for (const TunedSplit& one : tuning) {
    if (fits(one, size) && one.num_ranks <= size.num_ranks) {
      found.below = std::max(found.below, one.num_ranks);
    }
    if (fits(one, size) && one.num_ranks >= size.num_ranks) {
      found.above = found.above == 0 ? one.num_ranks : std::min(found.above, one.num_ranks);
    }
  }
  return {
      found.below == 0 ? found.above : found.below, found.above == 0 ? found.below : found.above};
}

RoleBlocks choose_blocks(const std::vector<TunedSplit>& tuning, const CallSize& size) {
  if (size.num_senders > 0) {
    return split(size.num_sms, size.num_senders);
  }
  if (size.is_one_role) {
    const auto most = static_cast<int>(size.num_sms * kOneRoleShare);
    return split(size.num_sms, size.op == Op::kDispatch ? most : size.num_sms - most);
  }
  const auto is_of_one_row = [&](const TunedSplit& one) {
    return one.op == size.op && one.one_row;
  };
  if (size.one_row && std::ranges::none_of(tuning, is_of_one_row)) {
    CallSize other = size;
    other.one_row = false;
    return choose_blocks(tuning, other);
  }
  const auto [below, above] = measured_ranks(tuning, size);
  if (below == 0) {
    return split(size.num_sms, static_cast<int>(std::lround(size.num_sms * kDefaultShare)));
  }
  const RoleBlocks few = best_split(tuning, size, below).blocks;
  if (below == above) {
    return few;
  }
  const RoleBlocks many = best_split(tuning, size, above).blocks;
  const double way = std::log2(factor(size.num_ranks, below)) / std::log2(factor(above, below));
  const auto between = [&](int a, int b) {
    return static_cast<int>(std::lround(a + way * (b - a)));
  };
  const int first = between(few.first, many.first);
  return {first, std::min(between(few.second, many.second), size.num_sms - first)};
}

std::optional<RoleBlocks> blocks_of_short_combine(int num_sms, int64_t num_tokens, int at_once) {
  const int64_t sums = std::max<int64_t>(1, (num_tokens + at_once - 1) / at_once);
  if (2 * sums > num_sms) {
    return std::nullopt;
  }
  return RoleBlocks{num_sms - static_cast<int>(sums), static_cast<int>(sums)};
}

RoleBlocks BlockChoice::of(const CallSize& size) {
  const size_t op = size.op == Op::kDispatch ? 0 : 1;
  if (last_[op] != size) {
    blocks_[op] = choose_blocks(tuning_, size);
    last_[op] = size;
  }
  return blocks_[op];
}

}  // namespace weft
