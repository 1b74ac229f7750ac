// SPDX-License-Identifier: Apache-2.0
#include "support/exchange_case.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "call/quantise.hpp"
#include "plan/balance/balance.hpp"
#include "plan/random_routing.hpp"

namespace weft::test {
namespace {

template <class T, size_t N>
T pick(RandomSource& random, const std::array<T, N>& choices) {
  return choices[random.below(N)];
}

bool one_in(RandomSource& random, uint64_t n) {
  return random.below(n) == 0;
}

std::string_view index_name(IndexKind kind) {
  constexpr std::array<std::string_view, 3> kNames = {"int64", "int32", "map"};
  return kNames[static_cast<size_t>(kind)];
}

std::string executor_text(const ExchangeSetup& setup) {
  if (!setup.is_on_gpu()) {
    return fmt::format("{}, {} threads", setup.transport, setup.num_threads);
  }
  constexpr std::array<std::string_view, 3> kMovers = {"auto", "vector", "bulk"};
  return fmt::format(
      "{} GPUs, mover {}, {} SMs{}{}",
      setup.num_gpus,
      kMovers[static_cast<size_t>(setup.mover)],
      setup.num_sms,
      setup.has_own_stream ? ", own stream" : "",
      setup.copy_engines ? ", copy engines" : ""
  );
}

}  // namespace

ExchangeConfig ExchangeSetup::config(int rank) const {
  return {
      .hidden = hidden,
      .max_tokens = max_tokens,
      .num_experts = num_experts,
      .max_topk = max_topk,
      .device = is_on_gpu() ? Device{Device::Kind::kCuda, rank % num_gpus} : Device{},
      .transport = is_on_gpu() && domain_of.empty() ? "auto" : transport,
      .num_threads = num_threads,
      .num_sms = num_sms,
      .mover = mover,
      .fan_out = fan_out,
      .copy_engines = has_copy_room || copy_engines,
      .timeout = timeout};
}

std::string describe(const ExchangeSetup& setup, const Case& spec) {
  return fmt::format(
      "[seed {}: {} ranks, domains {}, {}, fan-out {}, H {}, E {}, T {}, K {}, {}, {}, pad {}, "
      "sums by {}, {} replicas, room {}, calls "
      "{}{}{}{}{}, {}{}, weights {}/{}, scales {} B, quantise {} by rule {} of {}, output {}, "
      "scale "
      "{}, wire {}]",
      spec.seed,
      setup.num_ranks,
      setup.domain_of,
      executor_text(setup),
      static_cast<int>(setup.fan_out),
      setup.hidden,
      setup.num_experts,
      spec.num_tokens,
      spec.topk,
      index_name(spec.index),
      layout_name(spec.layout),
      spec.pad_multiple,
      order_name(spec.order),
      spec.balance.replicas,
      static_cast<int>(spec.room),
      spec.calls,
      spec.is_routed ? " routed" : "",
      spec.receives_later ? " received later" : "",
      spec.has_marks ? " by marks" : "",
      spec.ignores_unknown ? " of unknown experts" : "",
      dtype_name(spec.dtype),
      spec.asks_beside ? " and what is beside" : "",
      spec.has_plan_weights,
      spec.has_weights,
      spec.scale_cols,
      static_cast<int>(quantise_of(setup, spec)),
      static_cast<int>(spec.scale_rule),
      spec.global_scale,
      static_cast<int>(spec.output),
      static_cast<int>(spec.scale),
      static_cast<int>(wire_of(setup, spec))
  );
}

Quantise quantise_of(const ExchangeSetup& setup, const Case& spec) {
  const int multiple = stored_format(spec.quantise, spec.scale_rule).row_multiple;
  const bool fits = spec.dtype == DType::kBFloat16 && setup.hidden % multiple == 0;
  return fits ? spec.quantise : Quantise::kNone;
}

Wire wire_of(const ExchangeSetup& setup, const Case& spec) {
  const bool fits = spec.dtype == DType::kBFloat16 && setup.hidden % kQuantiseGroup == 0 &&
                    spec.order == SumOrder::kRank;
  return fits ? spec.wire : Wire::kNone;
}

ExchangeSetup random_setup(uint64_t seed) {
  RandomSource random(seed);
  ExchangeSetup setup;
  setup.num_ranks = pick(random, std::array{1, 2, 2, 3, 4});
  setup.num_threads = pick(random, std::array{1, 1, 2, 3});
  setup.fan_out = pick(random, std::array{FanOut::kSource, FanOut::kReceiver});
  setup.hidden = 8 * random.between(1, 12);
  setup.max_tokens = random.between(1, 80);
  setup.num_experts = setup.num_ranks * static_cast<int>(random.between(1, 5));
  setup.max_topk = static_cast<int>(random.between(1, 8));
  if (one_in(random, 3)) {
    setup.hidden = kQuantiseGroup * random.between(1, 4);
  }
  return setup;
}

Case random_case(const ExchangeSetup& setup, uint64_t seed) {
  RandomSource random(seed);
  Case spec;
  spec.seed = seed;
  for (int rank = 0; rank < setup.num_ranks; ++rank) {
    spec.num_tokens.push_back(one_in(random, 6) ? 0 : random.between(0, setup.max_tokens));
  }
  spec.topk = static_cast<int>(random.between(1, setup.max_topk));
  spec.popularity =
      pick(random, std::array{Popularity::kUniform, Popularity::kZipf, Popularity::kOneExpert});
  spec.hole_fraction = pick(random, std::array{0.0, 0.0, 0.2, 0.9});
  spec.repeat_experts = spec.topk > setup.num_experts || one_in(random, 3);
  spec.index = pick(random, std::array{IndexKind::kInt64, IndexKind::kInt32, IndexKind::kMap});
  spec.has_plan_weights = !one_in(random, 3);
  spec.layout =
      pick(random, std::array{Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided});
  spec.pad_multiple =
      spec.layout == Layout::kRankMajor ? 1 : pick(random, std::array<int64_t, 4>{1, 2, 7, 16});
  spec.room = pick(
      random,
      std::array{Room::kExact, Room::kExact, Room::kSpare, Room::kOneRowShort, Room::kRandom}
  );
  spec.dtype = pick(
      random,
      std::array{DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat32, DType::kByte}
  );
  const bool is_bytes = spec.dtype == DType::kByte;
  spec.calls = is_bytes ? "d" : pick(random, std::array{"dc", "cd", "dcdc", "ccd"});
  spec.byte_cols = 16 * random.between(1, 20);
  spec.has_weights = !one_in(random, 3);
  spec.scale_cols = pick(random, std::array<int64_t, 5>{0, 0, 1, 4, 56});
  spec.output =
      pick(random, std::array{OutputMemory::kDirect, OutputMemory::kStaged, OutputMemory::kMixed});
  if (spec.layout != Layout::kRankMajor) {
    spec.scale = pick(
        random,
        std::array{CombineScale::kNone, CombineScale::kPlanWeights, CombineScale::kSourceWeights}
    );
  }
  spec.has_plan_weights = spec.has_plan_weights || spec.scale == CombineScale::kPlanWeights;
  spec.is_routed = one_in(random, 2);
  spec.ignores_unknown = one_in(random, 3);
  spec.asks_beside = one_in(random, 2);
  spec.quantise = pick(
      random,
      std::array{
          Quantise::kNone, Quantise::kE4M3, Quantise::kE5M2, Quantise::kMxfp8, Quantise::kNvfp4}
  );
  spec.scale_rule = pick(
      random,
      std::array{ScaleRule::kExact, ScaleRule::kClamped, ScaleRule::kPowerOfTwo, ScaleRule::kUe8m0}
  );
  if (!has_scale_rule(spec.quantise, spec.scale_rule)) {
    spec.scale_rule = ScaleRule::kExact;
  }
  spec.global_scale = pick(random, std::array{0.0F, 0.01F, 448.0F});
  spec.scale_layout =
      pick(random, std::array{ScaleLayout::kByRow, ScaleLayout::kByColumn, ScaleLayout::kInTiles});
  spec.wire = pick(random, std::array{Wire::kNone, Wire::kFp8, Wire::kLogFmt10});
  return spec;
}

Case balanced_case(const ExchangeSetup& setup, uint64_t seed) {
  Case spec = random_case(setup, seed);
  RandomSource random(seed);
  const auto replicas = static_cast<int>(random.between(1, 3));
  spec.balance = {.replicas = replicas, .min_rows = random.between(1, 9)};
  spec.balance.block_rows = pick(random, std::array<int64_t, 4>{1, 1, 3, 8});
  spec.balance.replica_rows = pick(random, std::array<int64_t, 4>{0, 0, 2, 20});
  const PhysicalExperts shape = {setup.num_ranks, setup.num_experts, replicas};
  for (int rank = 0; seed % 2 == 0 && rank < setup.num_ranks; ++rank) {
    // Replicas are of the next rank's experts; the first place is empty.
    for (int replica = 0; replica < replicas; ++replica) {
      const int expert = (rank + 1) % setup.num_ranks * shape.num_local() + replica;
      const bool is_one = replica > 0 && replica < shape.num_local() && setup.num_ranks > 1;
      spec.balance.placement.push_back(is_one ? expert : -1);
    }
  }
  return spec;
}

}  // namespace weft::test
