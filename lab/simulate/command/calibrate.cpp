// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#include "cli/progress.hpp"
#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "group/shared_memory.hpp"
#include "measure/facts.hpp"
#include "measure/limits.hpp"
#include "measure/measure.hpp"
#include "plan/build.hpp"
#include "plan/random_routing.hpp"
#include "report/json_text.hpp"
#include "simulate/command/command.hpp"
#include "simulate/model.hpp"
#include "transport/transport.hpp"
#include "weft/group.hpp"

namespace weft::program {
namespace {

constexpr int kNumExperts = 256;
constexpr int kTopk = 8;
constexpr int64_t kRowBytes = 14336;

// The least of many times: what the work takes when nothing disturbs it.
double least_us(int times, const std::function<void()>& work) {
  double least = std::numeric_limits<double>::max();
  for (int i = 0; i < times; ++i) {
    const Stopwatch watch;
    work();
    least = std::min(least, watch.microseconds());
  }
  return least;
}

using sim::PlanSample;

// The table of counts that a plan reads.
double num_counts(const PlanSample& sample) {
  return sample.num_ranks * (static_cast<double>(sample.num_experts) + sample.num_ranks);
}

PlanSample measure_plan(int num_ranks, int64_t num_tokens) {
  RandomRouting spec;
  spec.num_tokens = num_tokens;
  spec.num_experts = kNumExperts;
  spec.topk = kTopk;
  const PlanOptions options;
  std::vector<RankCounts> counts;
  const RouteTable own = random_routing(spec, 0);
  for (int rank = 0; rank < num_ranks; ++rank) {
    counts.push_back(count_routes(random_routing(spec, rank), kNumExperts, num_ranks, options));
  }
  const auto work = [&] {
    counts[0] = count_routes(own, kNumExperts, num_ranks, options);
    const PlanData plan = place_routes(own, counts, 0, options, {});
    for (const Arrivals& pair : plan.sent) {
      static_cast<void>(encode_records(pair));
    }
  };
  return {num_ranks, kNumExperts, num_tokens, rounded(least_us(50, work), 1)};
}

// Times that two processes measure together, in memory that both have.
struct MessageTimes {
  double put_us = 0;     // 64 B into a peer's memory, its signal included
  double gather_us = 0;  // all_gather of one byte over TCP on the loopback address
};

// Ranks report by what they leave in shared memory.
MessageTimes measure_messages() {
  const SharedMemory shared = SharedMemory::create(sizeof(MessageTimes));
  auto* const times = new (shared.data()) MessageTimes;
  const std::vector<int> status = run_forked(2, [&](Group& group) {
    const std::byte one = {};
    const double gather_us = least_us(200, [&] { static_cast<void>(group.all_gather({&one, 1})); });
    const auto transport = make_transport("shm", group, 1);
    const Region region = transport->allocate(64);
    const int peer = 1 - group.rank();
    const RegionRef peer_ref = gather(group, region.ref)[static_cast<size_t>(peer)];
    transport->import(peer, peer_ref);
    group.barrier();
    if (group.rank() == 0) {
      constexpr int kPuts = 1000;
      const std::array<std::byte, 64> bytes = {};
      const Put put = {.source = bytes.data(), .bytes = bytes.size(), .region = peer_ref.slot};
      const double puts_us = least_us(50, [&] {
        for (int i = 0; i < kPuts; ++i) {
          transport->put(peer, {&put, 1});
        }
      });
      *times = {puts_us / kPuts, gather_us};
    }
    group.barrier();
    return 0;
  });
  WEFT_CHECK(
      Context{},
      status[0] == 0 && status[1] == 0,
      ErrorCode::kInternal,
      "calibrate: the two processes that exchange messages ended with {} and {}",
      status[0],
      status[1]
  );
  return *times;
}

double slope(double x0, double y0, double x1, double y1) {
  return std::max(0.0, (y1 - y0) / (x1 - x0));
}

void set_plan(sim::Model& model, const std::vector<PlanSample>& samples) {
  const PlanSample& few = samples.front();
  const PlanSample& tokens = samples[1];
  const PlanSample& ranks = samples.back();
  const double token_us = slope(
      static_cast<double>(few.num_tokens), few.us, static_cast<double>(tokens.num_tokens), tokens.us
  );
  const double count_us = slope(num_counts(few), few.us, num_counts(ranks), ranks.us);
  const double rest =
      few.us - token_us * static_cast<double>(few.num_tokens) - count_us * num_counts(few);
  const std::string origin =
      fmt::format("measured: plans of 2 to {} ranks, {} experts", ranks.num_ranks, kNumExperts);
  sim::set_field(model, "plan_base_us", rounded(std::max(0.0, rest), 4), origin);
  sim::set_field(model, "plan_token_ns", rounded(token_us * 1e3, 4), origin);
  sim::set_field(model, "plan_count_ns", rounded(count_us * 1e3, 4), origin);
}

void set_messages(sim::Model& model, const MessageTimes& times) {
  sim::set_field(
      model, "post_us", rounded(times.put_us), "measured: puts of 64 B into shared memory"
  );
  sim::set_field(
      model,
      "card_latency_us",
      rounded(times.gather_us / 2),
      "measured: half of an all_gather of two processes over TCP on loopback"
  );
  sim::set_field(model, "call_us", 0, "assumed: words are counted by themselves");
}

void set_copies(sim::Model& model) {
  const int ranks = num_usable_cores();
  const CopyRates rates = copy_rates({.num_ranks = ranks, .row_bytes = kRowBytes});
  const double gbps = rounded(std::max(rates.scatter, rates.gather) / ranks, 2);
  const std::string origin = fmt::format("measured: {} ranks copying at once, of each", ranks);
  sim::set_field(model, "link_gbps", gbps, origin);
  sim::set_field(model, "copy_gbps", gbps, origin);
  sim::set_field(model, "link_latency_us", 0, "assumed: a store");
  sim::set_field(model, "link_signal_us", 0, "assumed: an atomic addition");
  sim::set_field(model, "one_mover", 1, "by design: worker threads do both");
}

std::string file_text(const sim::Model& model) {
  const nlohmann::ordered_json machine = machine_info();
  auto json = nlohmann::ordered_json::parse(sim::model_json(model));
  json["machine"] = {
      {"cpu", machine["cpu"]},
      {"usable_cores", machine["usable_cores"]},
      {"memory_bytes", machine["memory_bytes"]},
      {"system", machine["system"]}};
  return json_text(json) + "\n";
}

}  // namespace

sim::Model calibrate(const std::string& path) {
  sim::Model model = sim::h200_model();
  model.name = std::filesystem::path(path).stem();
  set_messages(model, measure_messages());  // forks, so before any thread
  {
    Progress progress("calibrate");
    constexpr std::array<std::pair<int, int64_t>, 8> kSamples = {
        {{2, 256}, {2, 4096}, {4, 256}, {8, 256}, {16, 256}, {32, 256}, {64, 4096}, {64, 256}}};
    for (const auto& [ranks, tokens] : kSamples) {
      progress.update(static_cast<double>(model.plan_samples.size()) / kSamples.size());
      model.plan_samples.push_back(measure_plan(ranks, tokens));
    }
    set_plan(model, model.plan_samples);
    set_copies(model);
  }
  write_file_atomically(path, file_text(model));
  return model;
}

}  // namespace weft::program
