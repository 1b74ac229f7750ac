// SPDX-License-Identifier: Apache-2.0
#include "check/case.hpp"

#include <fmt/format.h>

#include <array>
#include <functional>
#include <string_view>

namespace weft::program {
namespace {

constexpr std::array kLayouts = {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided};
constexpr std::array kDTypes = {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kByte};

constexpr int kManyRanks = 8;

// Tokens differ on every rank.
std::vector<int64_t> some_tokens(int num_ranks, int64_t about) {
  std::vector<int64_t> tokens;
  for (int rank = 0; rank < num_ranks; ++rank) {
    tokens.push_back(about + 5 * rank % 7 - rank % 8);
  }
  return tokens;
}

// Every rank computes the reference of all ranks: so much work that a quick check of many ranks is
// content with a part of the cases, and with fewer tokens.
bool is_reduced(int num_ranks, bool is_quick) {
  return is_quick && num_ranks > kManyRanks;
}

Workload base_workload(int num_ranks, bool is_quick, uint64_t seed) {
  Workload workload;
  const bool is_small = is_reduced(num_ranks, is_quick);
  workload.num_tokens = some_tokens(num_ranks, is_small ? 9 : is_quick ? 29 : 120);
  workload.hidden = is_quick ? 64 : 512;
  workload.routing.num_experts = 4 * num_ranks;
  workload.routing.topk = 3;
  workload.routing.popularity = Popularity::kZipf;
  workload.routing.zipf_exponent = 0.5;
  workload.routing.hole_fraction = 0.1;
  workload.routing.seed = seed;
  return workload;
}

bool is_padded_layout(Layout layout) {
  return layout != Layout::kRankMajor;
}

void set_tokens(Workload& workload, const std::function<int64_t(int)>& tokens_of) {
  for (int rank = 0; rank < workload.num_ranks(); ++rank) {
    workload.num_tokens[static_cast<size_t>(rank)] = tokens_of(rank);
  }
}

// Change to an ordinary case that makes it one of those that go wrong first.
struct Trouble {
  std::string_view name;
  void (*apply)(CheckCase& check_case);
};

constexpr Trouble kTroubles[] = {
    {"no tokens at all", [](CheckCase& c) { set_tokens(c.workload, [](int) { return 0; }); }},
    {"no tokens on odd ranks",
     [](CheckCase& c) { set_tokens(c.workload, [](int rank) { return rank % 2 == 0 ? 20 : 0; }); }},
    {"one token on the last rank",
     [](CheckCase& c) {
       const int last = c.workload.num_ranks() - 1;
       set_tokens(c.workload, [last](int rank) { return rank == last ? 1 : 0; });
     }},
    {"all tokens to one expert",
     [](CheckCase& c) { c.workload.routing.popularity = Popularity::kOneExpert; }},
    {"holes only", [](CheckCase& c) { c.workload.routing.hole_fraction = 1; }},
    {"half of the routes are holes", [](CheckCase& c) { c.workload.routing.hole_fraction = 0.5; }},
    {"one route per token", [](CheckCase& c) { c.workload.routing.topk = 1; }},
    {"32 routes per token, repeated experts",
     [](CheckCase& c) {
       c.workload.routing.topk = kMaxTopk;
       c.workload.routing.repeat_experts = true;
     }},
    {"very uneven experts", [](CheckCase& c) { c.workload.routing.zipf_exponent = 3; }},
    {"routing from a map", [](CheckCase& c) { c.workload.from_map = true; }},
    {"rows of 16 bytes", [](CheckCase& c) { c.workload.hidden = 8; }},
    {"rows of 4112 bytes", [](CheckCase& c) { c.workload.hidden = 2056; }},
    {"bytes with scale rows",
     [](CheckCase& c) {
       c.workload.dtype = DType::kByte;
       c.workload.hidden = 144;
       c.workload.scale_cols = 9;
     }},
    {"staged output", [](CheckCase& c) { c.is_direct = false; }},
    {"four plans alive", [](CheckCase& c) { c.num_plans = 4; }},
    {"rows times the plan's weights",
     [](CheckCase& c) {
       if (is_padded_layout(c.options.layout)) {
         c.scale = CombineScale::kPlanWeights;
       }
     }},
    {"rows times the source's weights, map",
     [](CheckCase& c) {
       c.workload.from_map = true;
       if (is_padded_layout(c.options.layout)) {
         c.scale = CombineScale::kSourceWeights;
       }
     }},
};

}  // namespace

std::vector<CheckCase> matrix_cases(int num_ranks, bool is_quick, uint64_t seed) {
  std::vector<CheckCase> cases;
  for (const Layout layout : kLayouts) {
    for (const DType dtype : kDTypes) {
      if (is_reduced(num_ranks, is_quick) && dtype != DType::kBFloat16 && dtype != DType::kByte) {
        continue;
      }
      CheckCase base;
      base.row = fmt::format("{} {}", layout_name(layout), dtype_name(dtype));
      base.workload = base_workload(num_ranks, is_quick, mix_seed(seed, cases.size()));
      base.workload.dtype = dtype;
      base.options.layout = layout;
      const auto add = [&](std::string_view column, Room room, int64_t pad_multiple) {
        base.column = column;
        base.room = room;
        base.options.pad_multiple = pad_multiple;
        cases.push_back(base);
      };
      add("exact", Room::kExact, 1);
      if (is_padded_layout(layout)) {
        add("padded", Room::kExact, 16);
      }
      add("room to spare", Room::kSpare, 1);
      add("one row short", Room::kOneRowShort, 1);
    }
  }
  return cases;
}

std::vector<CheckCase> hard_cases(int num_ranks, bool is_quick, uint64_t seed) {
  std::vector<CheckCase> cases;
  for (size_t i = 0; i < std::size(kTroubles); ++i) {
    const Trouble& trouble = kTroubles[i];
    for (const Layout layout : kLayouts) {
      if (is_reduced(num_ranks, is_quick) && layout != kLayouts[(i + 1) % kLayouts.size()]) {
        continue;  // the layouts take turns
      }
      CheckCase hard;
      hard.row = trouble.name;
      hard.column = layout_name(layout);
      hard.workload = base_workload(num_ranks, is_quick, mix_seed(seed, 1000 + cases.size()));
      hard.options.layout = layout;
      hard.options.pad_multiple = is_padded_layout(layout) ? 8 : 1;
      trouble.apply(hard);
      cases.push_back(hard);
    }
  }
  return cases;
}

std::vector<CheckCase> with_vector_moves(std::vector<CheckCase> cases) {
  for (CheckCase& check_case : cases) {
    check_case.row += ", vector moves";
    check_case.mover = Mover::kVector;
  }
  return cases;
}

std::vector<CheckCase> by_copy_engines(std::vector<CheckCase> cases) {
  std::erase_if(cases, [](const CheckCase& check_case) {
    const DType dtype = check_case.workload.dtype;
    return dtype != DType::kBFloat16 && dtype != DType::kByte;  // fp16 goes as bf16 does
  });
  for (CheckCase& check_case : cases) {
    check_case.row += ", copy engines";
    check_case.copy_engines = true;
  }
  return cases;
}

}  // namespace weft::program
