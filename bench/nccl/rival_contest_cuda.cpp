// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <numeric>

#include "core/gpu/check.hpp"
#include "measure/gpu_timer_cuda.hpp"
#include "measure/measure.hpp"
#include "measure/workload.hpp"
#include "nccl/nccl_rival_cuda.hpp"
#include "nccl/rival_check_cuda.hpp"
#include "nccl/rival_contest.hpp"
#include "plan/random_routing.hpp"

namespace weft::bench {
namespace {

using namespace weft::program;

constexpr uint64_t kNumVersions = 4;

// Bytes that cross and that are received, means over the routings.
struct Traffic {
  double wire_bytes = 0;     // all ranks, as this way sends
  double logical_bytes = 0;  // all ranks
  double least_bytes = 0;    // the busiest rank's, once per (token, rank)
};

class Contest {
 public:
  Contest(NcclGroup& group, const RivalCase& shape, const NcclContestOptions& options)
      : group_(group), shape_(shape), options_(options) {
    make_routing();
    RivalSizes sizes;
    for (const RivalWay way : options.ways) {
      auto& plans = plans_.emplace_back();
      for (const auto& routes : routing_) {
        plans.emplace_back(way, make_lists(shape, routes, way));
        for (int rank = 0; rank < shape.num_ranks; ++rank) {
          const RivalLists& lists = plans.back().lists(rank);
          sizes.num_sent = std::max(sizes.num_sent, lists.num_sent);
          sizes.num_received = std::max(sizes.num_received, lists.num_received);
          sizes.num_rows = std::max(sizes.num_rows, lists.num_rows);
        }
      }
    }
    rival_ = std::make_unique<NcclRival>(group, shape, sizes);
  }

  std::vector<NcclResult> run() {
    std::vector<NcclResult> results;
    for (const auto& plans : plans_) {
      add_exchange(results, plans);
    }
    for (const auto& plans : plans_) {
      if (plans.front().way() == RivalWay::kPerRoute) {
        add_kernels(results, plans);
      }
    }
    return results;
  }

 private:
  // Makes routing as `weft bench` does.
  void make_routing() {
    RandomRouting spec;
    spec.num_tokens = shape_.num_tokens;
    spec.num_experts = shape_.num_experts;
    spec.topk = shape_.topk;
    spec.with_weights = false;
    for (uint64_t version = 0; version < kNumVersions; ++version) {
      spec.seed = mix_seed(options_.seed, version);
      auto& routes = routing_.emplace_back();
      for (int rank = 0; rank < shape_.num_ranks; ++rank) {
        routes.push_back(random_routing(spec, rank));
      }
    }
  }

  ResultRow row_of(const char* op, std::span<const double> us) const {
    ResultRow row;
    row.op = op;
    row.executor = "nccl";
    row.transport = "nccl";
    row.layout = "expert_major";
    row.dtype = "bfloat16";
    row.ranks = shape_.num_ranks;
    row.tokens = shape_.num_tokens;
    row.hidden = shape_.hidden;
    row.experts = shape_.num_experts;
    row.topk = shape_.topk;
    row.pad = shape_.pad_multiple;
    row.us_p50 = percentile(us, 50);
    row.us_p99 = percentile(us, 99);
    return row;
  }

  [[nodiscard]] Traffic traffic_of(const std::vector<RivalPlan>& plans) const {
    Traffic traffic;
    for (size_t version = 0; version < plans.size(); ++version) {
      const auto least = make_lists(shape_, routing_[version], RivalWay::kPerRank);
      double busiest = 0;
      for (int rank = 0; rank < shape_.num_ranks; ++rank) {
        const RivalLists& lists = plans[version].lists(rank);
        const RivalLists& once = least[static_cast<size_t>(rank)];
        traffic.wire_bytes += rows_to_others(lists.outgoing, rank);
        traffic.logical_bytes += static_cast<double>(std::ranges::count_if(
            routing_[version][static_cast<size_t>(rank)].expert,
            [](int32_t expert) { return expert >= 0; }
        ));
        busiest = std::max(
            {busiest, rows_to_others(once.outgoing, rank), rows_to_others(once.incoming, rank)}
        );
      }
      traffic.least_bytes += busiest;
    }
    const double scale =
        static_cast<double>(shape_.row_bytes()) / static_cast<double>(plans.size());
    return {traffic.wire_bytes * scale, traffic.logical_bytes * scale, traffic.least_bytes * scale};
  }

  static double rows_to_others(const std::vector<Message>& messages, int rank) {
    int64_t rows = 0;
    for (const Message& message : messages) {
      rows += message.peer == rank ? 0 : message.num_rows;
    }
    return static_cast<double>(rows);
  }

  void add_exchange(std::vector<NcclResult>& results, const std::vector<RivalPlan>& plans) {
    std::vector<int> gpus(static_cast<size_t>(shape_.num_ranks));
    std::iota(gpus.begin(), gpus.end(), 0);
    std::vector<cudaStream_t> streams;
    for (const int rank : gpus) {
      streams.push_back(group_.stream(rank));
    }
    GpuTimer timer(gpus, streams);
    const Traffic traffic = traffic_of(plans);
    const auto plan = [&](int i) -> const RivalPlan& {
      return plans[static_cast<size_t>(i) % plans.size()];
    };
    const auto add = [&](const char* op, bool is_right, const std::vector<double>& us) {
      NcclResult result = {row_of(op, us)};
      result.row.mode = way_name(plans.front().way());
      result.row.wire_bytes = traffic.wire_bytes;
      result.row.logical_bytes = traffic.logical_bytes;
      result.row.checked = is_right;
      if (options_.link_gbps > 0) {
        result.row.limit_us = traffic.least_bytes / options_.link_gbps / 1e3;
      }
      results.push_back(std::move(result));
    };
    bool is_dispatched = true;
    bool is_combined = true;
    for (const size_t version : {size_t{0}, plans.size() - 1}) {
      is_dispatched &= is_dispatch_right(*rival_, plans[version], routing_[version]);
      is_combined &= is_combine_right(*rival_, plans[version], routing_[version]);
    }
    const auto dispatch = [&](int i) { rival_->dispatch(plan(i)); };
    const auto combine = [&](int i) { rival_->combine(plan(i)); };
    add("dispatch", is_dispatched, timer.measure(options_.warmup, options_.iterations, dispatch));
    add("combine", is_combined, timer.measure(options_.warmup, options_.iterations, combine));
  }

  // The steps around the communication, on GPU 0; their results were checked with the exchange.
  void add_kernels(std::vector<NcclResult>& results, const std::vector<RivalPlan>& plans) {
    const int gpu = 0;
    const cudaStream_t stream = group_.stream(gpu);
    GpuTimer timer(std::span(&gpu, 1), std::span(&stream, 1));
    const bool is_checked =
        std::ranges::all_of(results, [](const auto& result) { return result.row.checked; });
    const RivalLists& lists = plans.front().lists(gpu);
    const double routes = static_cast<double>(lists.permute.num_entries());
    const double tokens = static_cast<double>(shape_.num_tokens);
    const auto received = static_cast<double>(lists.num_received);
    const auto padded = static_cast<double>(lists.num_rows);
    const auto add = [&](const char* op, const char* mode, double rows, auto step) {
      const auto work = [&](int i) { step(plans[static_cast<size_t>(i) % plans.size()]); };
      NcclResult result = {
          row_of(op, timer.measure(options_.warmup, options_.iterations, work)),
          rows * static_cast<double>(shape_.row_bytes())};
      result.row.executor = "cuda";
      result.row.transport = "none";
      result.row.ranks = 1;
      result.row.mode = mode;
      result.row.logical_bytes = received * static_cast<double>(shape_.row_bytes());
      result.row.checked = is_checked;
      if (options_.local_copy_gbps > 0) {
        result.row.limit_us = result.kernel_bytes / options_.local_copy_gbps / 1e3;
      }
      results.push_back(std::move(result));
    };
    add("permute", "tokens to routes by expert", tokens + routes, [&](const RivalPlan& plan) {
      rival_->permute(plan, gpu);
    });
    add("permute",
        "received rows to padded experts",
        received + padded,
        [&](const RivalPlan& plan) { rival_->place(plan, gpu); });
    add("unpermute", "padded experts to rows to send", 2 * received, [&](const RivalPlan& plan) {
      rival_->take_back(plan, gpu);
    });
    add("unpermute", "routes to sums of tokens", tokens + routes, [&](const RivalPlan& plan) {
      rival_->sum(plan, gpu);
    });
  }

  NcclGroup& group_;
  RivalCase shape_;
  NcclContestOptions options_;
  std::vector<std::vector<RouteTable>> routing_;  // [versions][num_ranks]
  std::vector<std::vector<RivalPlan>> plans_;     // [ways][versions]
  std::unique_ptr<NcclRival> rival_;
};

}  // namespace

std::string way_name(RivalWay way) {
  switch (way) {
    case RivalWay::kPerRoute:
      return "one row per route";
    case RivalWay::kPerExpert:
      return "one row per route, a message per expert";
    case RivalWay::kPerRank:
      return "one row per rank";
  }
  return "unknown";
}

void run_nccl_cases(
    const NcclLibrary& library,
    std::span<const RivalCase> cases,
    const NcclContestOptions& options,
    const NcclReport& report
) {
  if (cases.empty()) {
    return;
  }
  NcclGroup group(library, cases.front().num_ranks);
  for (size_t i = 0; i < cases.size(); ++i) {
    report(i, Contest(group, cases[i], options).run());
  }
}

}  // namespace weft::bench
