// SPDX-License-Identifier: Apache-2.0
// One plan, its dispatches and combines, described by a few numbers.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/random_routing.hpp"
#include "weft/exchange.hpp"

namespace weft::test {

// Settings that all cases of one exchange have in common.
struct ExchangeSetup {
  int num_ranks = 2;
  std::string transport = "loopback";
  int num_threads = 1;
  FanOut fan_out = FanOut::kAuto;
  int64_t hidden = 32;
  int64_t max_tokens = 64;
  int num_experts = 8;
  int max_topk = 4;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  // [num_ranks] the domain of each; empty: one domain, whatever the environment says of the group.
  // Domains are numbered by their first rank.
  std::vector<int> domain_of = {};

  // On GPUs: rank r uses GPU r % num_gpus; 0: on the CPU.
  int num_gpus = 0;
  Mover mover = Mover::kAuto;
  int num_sms = 0;
  bool has_own_stream = false;  // calls are queued on a stream of the caller's
  bool has_copy_room = false;   // calls by copy engines are possible
  bool copy_engines = false;    // and asked for

  [[nodiscard]] bool is_on_gpu() const { return num_gpus > 0; }
  [[nodiscard]] ExchangeConfig config(int rank = 0) const;
};

enum class IndexKind : uint8_t { kInt64, kInt32, kMap };

enum class Room : uint8_t {
  kExact,        // the plan decides
  kSpare,        // some rows more: slack that nobody may touch
  kOneRowShort,  // on every rank that has rows
  kRandom,       // from none to more than enough, each rank its own
};

enum class OutputMemory : uint8_t {
  kDirect,  // Exchange::allocate
  kStaged,  // the caller's own
  kMixed,   // one or the other by rank and by kind
};

struct Case {
  uint64_t seed = 1;

  // Routing.
  std::vector<int64_t> num_tokens;  // by rank
  int topk = 2;                     // of a map: ExchangeSetup::max_topk at most are set
  Popularity popularity = Popularity::kUniform;
  double hole_fraction = 0;
  bool repeat_experts = false;
  IndexKind index = IndexKind::kInt64;
  bool has_plan_weights = true;
  std::vector<int32_t> experts;  // if not empty: the experts of every token, [topk]
  bool ignores_unknown = false;  // holes of topk_idx are values that no expert has, and not just -1
  // Ranks that take no part any more (PeerLoss::kShrink), ascending: routes to experts that only
  // they have are none. They have no tokens.
  std::vector<int> lost = {};

  // Plan.
  Layout layout = Layout::kExpertMajor;
  int64_t pad_multiple = 1;
  SumOrder order = SumOrder::kRank;
  Balancing balance = {};
  Room room = Room::kExact;
  int64_t rows = -1;  // if not negative, instead of room: rows of every rank, or of every expert
                      // with kExpertStrided

  // Calls: 'd' dispatches, 'c' combines; with data of their own each, in this order.
  std::string calls = "dc";
  // The first call, if it is a dispatch, makes the plan, if that gives the number of rows.
  bool is_routed = false;
  DType dtype = DType::kFloat32;
  int64_t byte_cols = 48;  // of a dispatch of kByte
  bool has_weights = true;
  int64_t scale_cols = 0;  // bytes
  // Format of dispatches of bf16 rows of whole groups, which then have no scales of their own.
  Quantise quantise = Quantise::kNone;
  ScaleRule scale_rule = ScaleRule::kExact;
  float global_scale = 0;  // of NVFP4; 0: not given
  // Dispatches tell sources, counts and their sums, and give scales by a layout where that is
  // possible.
  bool asks_beside = false;
  ScaleLayout scale_layout = ScaleLayout::kByColumn;
  OutputMemory output = OutputMemory::kDirect;
  CombineScale scale = CombineScale::kNone;
  bool skips_source_weights = false;  // not between domains of GPUs
  // Format of combines of bf16 rows of whole groups, with order rank.
  Wire wire = Wire::kNone;
  bool receives_later = false;  // what can be sent first is, and is then received, or by the
                                // next call
  bool has_marks = false;       // kExpertStrided: combines wait for marks, which have come
  bool is_late = false;         // ranks enter each call some milliseconds apart
};

// The case in one line, seed included.
[[nodiscard]] std::string describe(const ExchangeSetup& setup, const Case& spec);

// Returns the format to which the case's dispatches quantise; kNone if its rows do not fit it.
[[nodiscard]] Quantise quantise_of(const ExchangeSetup& setup, const Case& spec);

// Returns the format in which the case's combines send what they add up; kNone if it does not fit.
[[nodiscard]] Wire wire_of(const ExchangeSetup& setup, const Case& spec);

// Returns a random case, whose options can all be asked for at once.
[[nodiscard]] Case random_case(const ExchangeSetup& setup, uint64_t seed);
// One with replicas of experts, half of them where the caller says.
[[nodiscard]] Case balanced_case(const ExchangeSetup& setup, uint64_t seed);
[[nodiscard]] ExchangeSetup random_setup(uint64_t seed);

}  // namespace weft::test
