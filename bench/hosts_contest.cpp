// SPDX-License-Identifier: Apache-2.0
#include "hosts_contest.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "core/env.hpp"
#include "core/gpu/device_memory.hpp"
#include "fabric_stream.hpp"
#include "group/control_plane.hpp"
#include "group/tcp/local_address.hpp"
#include "group/tcp/rendezvous.hpp"
#include "measure/bench_check.hpp"
#include "measure/measure.hpp"
#include "plan/random_routing.hpp"
#include "transport/ofi/fabric/fabric.hpp"
#include "weft/exchange.hpp"

namespace weft::bench {
namespace {

using namespace weft::program;

// Size of one write of the stream: large ones suit it best.
constexpr uint64_t kWriteBytes = 256 << 10;

// A matrix where the exchange works.
class Placed {
 public:
  Placed() = default;
  Placed(DType dtype, int64_t rows, int64_t cols, const Device& device)
      : tensor_{.dtype = dtype, .rows = rows, .cols = cols, .device = device} {
    memory_ = allocate_on(device, static_cast<uint64_t>(tensor_.num_bytes()));
    tensor_.data = memory_.get();
  }
  [[nodiscard]] const Tensor& tensor() const { return tensor_; }

 private:
  Tensor tensor_;
  std::shared_ptr<std::byte> memory_;
};

using Pair = std::array<int, 2>;

// The first rank of each of two hosts.
std::vector<Pair> one_pair(const Group& group) {
  const auto& domains = group.topology().domains;
  return {{domains[0].front(), domains[1].front()}};
}

// All ranks, each with one of another host.
std::vector<Pair> all_pairs(const Group& group) {
  const auto& domains = group.topology().domains;
  std::vector<Pair> pairs;
  for (size_t host = 0; host + 1 < domains.size(); host += 2) {
    const size_t ranks = std::min(domains[host].size(), domains[host + 1].size());
    for (size_t i = 0; i < ranks; ++i) {
      pairs.push_back({domains[host][i], domains[host + 1][i]});
    }
  }
  return pairs;
}

// Plain streams between pairs of ranks, all at once; the other ranks only wait.
class Streams {
 public:
  Streams(const Group& group, const std::vector<Pair>& pairs) : num_pairs_(pairs.size()) {
    Pair ranks = {-1, -1};
    for (const Pair& pair : pairs) {
      if (std::find(pair.begin(), pair.end(), group.rank()) != pair.end()) {
        ranks = pair;
      }
    }
    const auto place = std::find(ranks.begin(), ranks.end(), group.rank());
    // They meet on a port and with a secret that the first one draws.
    struct Meeting {
      std::array<char, 64> address = {};
      int32_t port = 0;
      std::array<char, 32> secret = {};
    } meeting;
    Socket listener;
    if (group.rank() == ranks[0]) {
      const std::string address = local_address(Env::read().fabric_address.value_or(std::string()));
      address.copy(meeting.address.data(), meeting.address.size() - 1);
      listener = listen_on(address, 0, Context{});
      meeting.port = port_of(listener);
      meeting.secret = random_value<std::array<char, 32>>();
    }
    const auto told = group.all_gather(std::as_bytes(std::span(&meeting, 1)));
    if (place == ranks.end()) {
      return;
    }
    std::memcpy(&meeting, told[static_cast<size_t>(ranks[0])].data(), sizeof meeting);
    Rendezvous rendezvous = {.rank = static_cast<int>(place - ranks.begin()), .num_ranks = 2};
    rendezvous.address = meeting.address.data();
    rendezvous.port = meeting.port;
    rendezvous.secret.assign(meeting.secret.begin(), meeting.secret.end());
    pair_.emplace(connect_group(rendezvous, std::move(listener)));
    ofi::Selection selection = ofi::select_provider(*pair_, "");
    fabric_.emplace(*selection.provider, std::move(selection.info), Context{});
    stream_.emplace(*pair_, *fabric_, 64 * kWriteBytes);
  }

  [[nodiscard]] std::string provider() const {
    return fabric_ ? std::string(fabric_->name()) : std::string();
  }

  // `bytes` of all streams together.
  void run(double bytes) {
    if (stream_) {
      const double writes = bytes / static_cast<double>(kWriteBytes * num_pairs_);
      const auto count = static_cast<uint64_t>(writes + 0.5);
      stream_->run(kWriteBytes, std::max<uint64_t>(count, 1));
    }
  }

 private:
  size_t num_pairs_;
  std::optional<Group> pair_;
  std::optional<ofi::Fabric> fabric_;
  std::optional<FabricStream> stream_;
};

class Contest {
 public:
  Contest(const Group& group, const ContestShape& shape)
      : group_(group), shape_(shape), routes_(make_routes()), exchange_(group, config()) {
    const RouteTable& mine = routes_[static_cast<size_t>(group.rank())];
    const Device device = config().device;
    topk_idx_ = {DType::kInt32, mine.num_tokens, mine.topk, device};
    const Tensor& idx = topk_idx_.tensor();
    const ConstTensor host = matrix(mine.expert.data(), idx.rows, idx.cols);
    copy_between(idx.data, device, host.data, {}, static_cast<uint64_t>(idx.num_bytes()));
    plan_.emplace(make_plan());
    x_ = {kDType, shape.num_tokens, shape.hidden, device};
    tokens_.fill(x_.tensor(), group.rank());
    y_ = {kDType, plan_->num_rows(), shape.hidden, device};
    expert_rows_.fill(y_.tensor(), group.rank());
    combined_ = {kDType, shape.num_tokens, shape.hidden, device};
    rows_ = exchange_.allocate(plan_->num_rows(), shape.hidden, kDType);
  }

  HostsContest run() {
    HostsContest result;
    result.crossing_bytes = crossing_bytes();
    const Verdict verdict = check();
    result.is_good = verdict.is_plan_good && verdict.is_dispatch_good && verdict.is_combine_good;
    Streams stream(group_, one_pair(group_));
    const std::vector<Pair> pairs = all_pairs(group_);
    Streams streams(group_, pairs);
    std::vector<double> stream_us;
    std::vector<double> streams_us;
    std::vector<double> plan_us;
    std::vector<double> dispatch_us;
    std::vector<double> combine_us;
    for (int i = -shape_.warmup; i < shape_.iterations; ++i) {
      const double streamed = time([&] { stream.run(result.crossing_bytes); });
      const double all_streamed = time([&] { streams.run(result.crossing_bytes); });
      const double planned = time([&] { static_cast<void>(make_plan()); });
      const double dispatched = time([&] { dispatch(); });
      const double combined = time([&] { combine(); });
      if (i >= 0) {
        stream_us.push_back(streamed);
        streams_us.push_back(all_streamed);
        plan_us.push_back(planned);
        dispatch_us.push_back(dispatched);
        combine_us.push_back(combined);
      }
    }
    result.provider = stream.provider();
    result.stream_us = percentile(slowest_of(group_, stream_us), 50);
    const Rival rival = {"fabric stream", result.stream_us};
    result.rows.push_back(row("dispatch", slowest_of(group_, dispatch_us), result.provider));
    result.rows.back().checked = verdict.is_dispatch_good;
    result.rows.push_back(row("combine", slowest_of(group_, combine_us), result.provider));
    result.rows.back().checked = verdict.is_combine_good;
    const double logical_bytes = all_logical_bytes();
    for (ResultRow& each : result.rows) {
      each.logical_bytes = logical_bytes;
      each.wire_bytes = result.crossing_bytes;
      each.rival = rival;
    }
    if (pairs.size() > 1) {
      const std::string name = fmt::format("{} fabric streams at once", pairs.size());
      result.rows.push_back(row(name, slowest_of(group_, streams_us), result.provider));
      result.rows.back().wire_bytes = result.crossing_bytes;
    }
    result.rows.push_back(row("plan", slowest_of(group_, plan_us), result.provider));
    result.rows.back().checked = verdict.is_plan_good;
    return result;
  }

 private:
  static constexpr DType kDType = DType::kBFloat16;

  [[nodiscard]] std::vector<RouteTable> make_routes() const {
    RandomRouting spec;
    spec.num_tokens = shape_.num_tokens;
    spec.num_experts = shape_.num_experts;
    spec.topk = shape_.topk;
    spec.with_weights = false;
    spec.seed = shape_.seed;
    std::vector<RouteTable> routes;
    for (int rank = 0; rank < group_.num_ranks(); ++rank) {
      routes.push_back(random_routing(spec, rank));
    }
    return routes;
  }

  [[nodiscard]] ExchangeConfig config() const {
    ExchangeConfig config;
    config.hidden = shape_.hidden;
    config.max_tokens = std::max<int64_t>(1, shape_.num_tokens);
    config.num_experts = shape_.num_experts;
    config.max_topk = shape_.topk;
    config.num_threads = shape_.num_threads;
    if (shape_.num_gpus > 0) {
      config.device = {Device::Kind::kCuda, group_.rank() % shape_.num_gpus};
    }
    return config;
  }

  [[nodiscard]] static PlanOptions options() { return {.layout = Layout::kExpertMajor}; }

  // Returns the bytes that have to cross between domains, whatever really does.
  [[nodiscard]] double crossing_bytes() const {
    const auto& domain_of = group_.topology().domain_of;
    const int per_rank = shape_.num_experts / group_.num_ranks();
    int64_t num_rows = 0;
    for (size_t rank = 0; rank < routes_.size(); ++rank) {
      const RouteTable& table = routes_[rank];
      for (int64_t token = 0; token < table.num_tokens; ++token) {
        std::vector<bool> is_met(group_.topology().domains.size());
        is_met[static_cast<size_t>(domain_of[rank])] = true;
        for (int k = 0; k < table.topk; ++k) {
          const int expert = table.expert[static_cast<size_t>(token * table.topk + k)];
          if (expert >= 0) {
            const int domain = domain_of[static_cast<size_t>(expert / per_rank)];
            num_rows += is_met[static_cast<size_t>(domain)] ? 0 : 1;
            is_met[static_cast<size_t>(domain)] = true;
          }
        }
      }
    }
    return static_cast<double>(num_rows * shape_.hidden * dtype_bytes(kDType));
  }

  [[nodiscard]] double all_logical_bytes() const {
    const int64_t mine = plan_->logical_bytes(shape_.hidden * dtype_bytes(kDType));
    double sum = 0;
    for (const Bytes& block : group_.all_gather(std::as_bytes(std::span(&mine, 1)))) {
      int64_t theirs = 0;
      std::memcpy(&theirs, block.data(), sizeof theirs);
      sum += static_cast<double>(theirs);
    }
    return sum;
  }

  [[nodiscard]] Plan make_plan() {
    return exchange_.plan({.topk_idx = topk_idx_.tensor()}, options());
  }

  void dispatch() { exchange_.dispatch(*plan_, {.x = x_.tensor()}, {.rows = rows_.tensor()}); }

  void combine() { exchange_.combine(*plan_, {.rows = y_.tensor()}, {.x = combined_.tensor()}); }

  // Collective.
  Verdict check() {
    dispatch();
    combine();
    const auto plans = expected_plans(routes_, shape_.num_experts, options());
    const auto rank = static_cast<size_t>(group_.rank());
    const auto& domain_of = group_.topology().domain_of;
    constexpr int64_t kAll = std::numeric_limits<int32_t>::max();
    Verdict mine;
    mine.is_plan_good = *plan_ == plans[rank];
    mine.is_dispatch_good = rows_are_right(rows_.tensor(), plans, rank, tokens_, kAll);
    mine.is_combine_good =
        sums_are_right(combined_.tensor(), plans[rank], domain_of, expert_rows_, kAll);
    return verdict_of_all(group_, mine);
  }

  template <class Run>
  double time(const Run& run) {
    group_.barrier();
    const Stopwatch watch;
    run();
    return watch.microseconds();
  }

  [[nodiscard]] ResultRow row(
      const std::string& op, const std::vector<double>& samples_us, const std::string& provider
  ) const {
    ResultRow row;
    row.op = op;
    row.executor = shape_.num_gpus > 0 ? "cuda" : "cpu";
    row.transport = exchange_.config().transport;
    row.layout = layout_name(options().layout);
    row.dtype = dtype_name(kDType);
    row.ranks = group_.num_ranks();
    row.tokens = shape_.num_tokens;
    row.hidden = shape_.hidden;
    row.experts = shape_.num_experts;
    row.topk = shape_.topk;
    row.mode =
        fmt::format("exact direct, {} hosts over {}", group_.topology().domains.size(), provider);
    row.us_p50 = percentile(samples_us, 50);
    row.us_p99 = percentile(samples_us, 99);
    return row;
  }

  const Group& group_;
  const ContestShape& shape_;
  std::vector<RouteTable> routes_;  // by rank
  Exchange exchange_;
  std::optional<Plan> plan_;
  Placed topk_idx_;
  Placed x_;
  Placed y_;
  Placed combined_;
  Buffer rows_;
  MadeUpRows tokens_ = {mix_seed(shape_.seed, 1)};
  MadeUpRows expert_rows_ = {mix_seed(shape_.seed, 2)};
};

}  // namespace

HostsContest run_hosts_contest(const Group& group, const ContestShape& shape) {
  return Contest(group, shape).run();
}

}  // namespace weft::bench
