// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "call/executor.hpp"
#include "cli/progress.hpp"
#include "core/check.hpp"
#include "core/gpu/devices.hpp"
#include "core/gpu/stream.hpp"
#include "cuda/memory/owners.hpp"
#include "measure/gpu_timer_cuda.hpp"
#include "measure/measure.hpp"
#include "measure/workload.hpp"
#include "survive_gpus.hpp"
#include "survivors/gpu_deaths.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"

namespace weft::bench {
namespace {

using program::rounded;
using Json = nlohmann::ordered_json;

constexpr int kDeathRanks = 4;
constexpr int kReturnsOfGroup = 8;  // whose processes begin together

int count_gpus_apart() {
  return run_forked(1, [](const Group&) { return static_cast<int>(list_gpus().gpus.size()); })[0];
}

struct CostCase {
  char name;
  int64_t tokens;  // of each rank
  Layout layout;
  int64_t rows_of_mean;  // the budget, in times of what a rank gets on average
  bool is_routed;        // plan and dispatch in one call
  int rounds;            // of a sample
};

constexpr int64_t kHidden = 7168;
constexpr int kExperts = 256;
constexpr int kTopk = 8;

// One rank's exchange with its data and stream. `domains`: as Topology::domains; empty: one.
class Contender {
 public:
  Contender(
      const Group& group,
      int gpu,
      const CostCase& shape,
      int64_t hidden,
      PeerLoss on_peer_loss,
      const std::vector<std::vector<int>>& domains = {}
  )
      : is_routed_(shape.is_routed), stream_(gpu) {
    const CudaDeviceGuard guard(gpu);
    ExchangeConfig config;
    config.hidden = hidden;
    config.max_tokens = shape.tokens;
    config.num_experts = kExperts;
    config.max_topk = kTopk;
    config.device = {Device::Kind::kCuda, gpu};
    config.on_peer_loss = on_peer_loss;
    exchange_ = std::make_unique<Exchange>(
        domains.empty() ? Exchange(group, config)
                        : Executor::exchange_by(make_cuda_exchange(group, config, domains))
    );
    program::Workload workload;
    workload.num_tokens.assign(static_cast<size_t>(group.num_ranks()), shape.tokens);
    workload.hidden = 16;
    workload.routing.num_experts = kExperts;
    workload.routing.topk = kTopk;
    const program::RankInput input = program::make_input(workload, group.rank());
    const ConstTensor idx = input.topk_idx.view();
    const auto bytes =
        static_cast<uint64_t>(idx.rows * idx.cols) * static_cast<uint64_t>(dtype_bytes(idx.dtype));
    idx_.create(bytes, nullptr, {});
    WEFT_CUDA(Context{}, cudaMemcpy(idx_.get(), idx.data, bytes, cudaMemcpyHostToDevice));
    const int64_t rows = shape.rows_of_mean * shape.tokens * kTopk;
    options_ = {.layout = shape.layout, .row_budget = rows};
    x_.create(static_cast<uint64_t>(shape.tokens * hidden) * 2, nullptr, {});
    out_.create(static_cast<uint64_t>(shape.tokens * hidden) * 2, nullptr, {});
    rows_ = exchange_->allocate(rows, hidden, DType::kBFloat16);
    tokens_ = {.dtype = DType::kBFloat16, .rows = shape.tokens, .cols = hidden};
    tokens_.device = config.device;
    indices_ = {.dtype = idx.dtype, .rows = shape.tokens, .cols = kTopk};
    indices_.device = config.device;
  }

  [[nodiscard]] cudaStream_t stream() const { return stream_.get(); }
  [[nodiscard]] const std::string& transport() const { return exchange_->config().transport; }

  // Queues plan, dispatch and combine.
  void run() {
    const CallOptions call = {.stream = stream_.get()};
    Tensor indices = indices_;
    indices.data = idx_.get();
    Tensor x = tokens_;
    x.data = x_.get();
    Tensor out = tokens_;
    out.data = out_.get();
    const Routing routing = {.topk_idx = indices};
    if (is_routed_) {
      plan_ = exchange_->dispatch(routing, options_, {.x = x}, {.rows = rows_.tensor()}, call);
    } else {
      plan_ = exchange_->plan(routing, options_, call);
      exchange_->dispatch(*plan_, {.x = x}, {.rows = rows_.tensor()}, call);
    }
    exchange_->combine(*plan_, {.rows = rows_.tensor()}, {.x = out}, call);
  }

 private:
  bool is_routed_;
  GpuStream stream_;
  std::unique_ptr<Exchange> exchange_;
  PlanOptions options_;
  CudaBuffer<std::byte> idx_;
  CudaBuffer<std::byte> x_;
  CudaBuffer<std::byte> out_;
  Buffer rows_;
  Tensor tokens_;
  Tensor indices_;
  std::optional<Plan> plan_;
};

constexpr std::array kContenders = {PeerLoss::kFail, PeerLoss::kShrink};

Json cost_row(
    const CostCase& shape,
    std::string_view transport,
    int num_ranks,
    int64_t hidden,
    const std::array<std::vector<double>, 2>& us
) {
  std::vector<double> more;
  std::ranges::transform(us[1], us[0], std::back_inserter(more), std::minus());
  const double us_fail = program::percentile(us[0], 50);
  const double us_more = program::percentile(more, 50);
  return {
      {"op", "shrink_cost"},
      {"executor", "cuda"},
      {"transport", transport},
      {"case", std::string(1, shape.name)},
      {"ranks", num_ranks},
      {"tokens", shape.tokens},
      {"hidden", hidden},
      {"experts", kExperts},
      {"topk", kTopk},
      {"dtype", "bfloat16"},
      {"samples", us[0].size()},
      {"us_p50", rounded(program::percentile(us[1], 50), 2)},
      {"us_p50_fail", rounded(us_fail, 2)},
      {"more_us", rounded(us_more, 2)},
      {"more_percent", rounded(100 * us_more / us_fail, 2)},
  };
}

// Exchanges of both kinds are made so often, each kind first in turn: where memory of the host
// happens to lie counts for more than what is measured.
constexpr int kMakings = 12;

// Measures with a thread for each rank, between two barriers: calls between domains wait on the
// host.
Json measure_between_domains(const CostCase& shape, int64_t hidden, int num_samples) {
  const auto num_gpus = static_cast<int>(list_gpus().gpus.size());
  const int num_ranks = std::max(2, num_gpus);
  std::vector<std::vector<int>> domains(2);
  for (int rank = 0; rank < num_ranks; ++rank) {
    domains[static_cast<size_t>(rank % 2)].push_back(rank);
  }
  std::array<std::vector<double>, 2> us;
  std::string transport;
  program::Progress progress(fmt::format("cost in case {}, two domains", shape.name));
  run_threads(num_ranks, [&](const Group& group) {
    std::array<std::unique_ptr<Contender>, 2> contenders;
    const auto make = [&](size_t which) {
      contenders[which] = std::make_unique<Contender>(
          group, group.rank() % num_gpus, shape, hidden, kContenders[which], domains
      );
    };
    const auto sample = [&](size_t which) {
      group.barrier();
      const program::Stopwatch watch;
      for (int round = 0; round < shape.rounds; ++round) {
        contenders[which]->run();
      }
      WEFT_CUDA(Context{}, cudaStreamSynchronize(contenders[which]->stream()));
      group.barrier();
      return 1e6 * watch.seconds() / shape.rounds;
    };
    const int each = std::max(1, num_samples / kMakings);
    for (size_t making = 0; making < kMakings; ++making) {
      contenders = {};
      group.barrier();
      make(making % 2);
      make((making + 1) % 2);
      for (int i = -3; i < each; ++i) {
        for (int turn = 0; turn < 2; ++turn) {
          const auto which = static_cast<size_t>((i + 3 + turn) % 2);
          const double time = sample(which);
          if (group.rank() == 0 && i >= 0) {
            us[which].push_back(time);
          }
        }
      }
      if (group.rank() == 0) {
        progress.update(static_cast<double>(making + 1) / kMakings);
        transport = contenders[1]->transport();
      }
      group.barrier();
    }
  });
  return cost_row(shape, transport, num_ranks, hidden, us);
}

// Both in turns, which of them is first too. The difference is the median over the pairs.
Json measure_case(const CostCase& shape, int64_t hidden, int num_samples) {
  const auto num_ranks = static_cast<int>(list_gpus().gpus.size());
  const auto num = static_cast<size_t>(num_ranks);
  std::array<std::vector<std::unique_ptr<Contender>>, 2> contenders;
  contenders[0].resize(num);
  contenders[1].resize(num);
  run_threads(num_ranks, [&](const Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    for (size_t which = 0; which < 2; ++which) {
      contenders[which][rank] =
          std::make_unique<Contender>(group, group.rank(), shape, hidden, kContenders[which]);
    }
  });
  std::vector<int> gpus;
  std::array<std::unique_ptr<program::GpuTimer>, 2> timers;
  for (int gpu = 0; gpu < num_ranks; ++gpu) {
    gpus.push_back(gpu);
  }
  for (size_t which = 0; which < 2; ++which) {
    std::vector<cudaStream_t> streams;
    for (const auto& contender : contenders[which]) {
      streams.push_back(contender->stream());
    }
    timers[which] = std::make_unique<program::GpuTimer>(gpus, streams);
  }
  const auto sample = [&](size_t which, int warmup) {
    const auto work = [&](int /*call*/) {
      for (int round = 0; round < shape.rounds; ++round) {
        for (const auto& contender : contenders[which]) {
          contender->run();
        }
      }
    };
    return timers[which]->measure(warmup, 1, work)[0] / shape.rounds;
  };
  program::Progress progress(fmt::format("cost in case {}", shape.name));
  std::array<std::vector<double>, 2> us;
  for (size_t which = 0; which < 2; ++which) {
    static_cast<void>(sample(which, 3));
  }
  for (int i = 0; i < num_samples; ++i) {
    progress.update(static_cast<double>(i) / num_samples);
    for (int turn = 0; turn < 2; ++turn) {
      const auto which = static_cast<size_t>((i + turn) % 2);
      us[which].push_back(sample(which, 0));
    }
  }
  return cost_row(shape, "peer", num_ranks, hidden, us);
}

// Deaths, and how many of them a new process came after, in calls of one kind.
class Tally {
 public:
  // `transport`: in the domain.
  Tally(bool is_replayed, const char* transport, std::vector<int> domain_of = {})
      : is_replayed_(is_replayed), transport_(transport), domain_of_(std::move(domain_of)) {}

  [[nodiscard]] int num_deaths() const { return num_deaths_; }
  [[nodiscard]] int num_returns() const { return num_returns_; }
  void run(int num_gpus, uint64_t seed, int num_returns) {
    const auto group = test::run_deaths(
        {.num_ranks = kDeathRanks,
         .num_gpus = num_gpus,
         .seed = seed,
         .is_replayed = is_replayed_,
         .num_returns = num_returns,
         .transport = transport_,
         .domain_of = domain_of_}
    );
    num_deaths_ += num_returns > 0 ? num_returns : kDeathRanks - 1;
    num_returns_ += num_returns;
    num_wrong_ += group.num_wrong;
    num_hung_ += group.num_hung;
    ms_.insert(ms_.end(), group.ms.begin(), group.ms.end());
    return_ms_.insert(return_ms_.end(), group.return_ms.begin(), group.return_ms.end());
  }
  void add_to(Json& rows) const {
    if (num_deaths_ > 0) {
      rows.push_back(row("death", "deaths", num_deaths_, ms_));
    }
    if (num_returns_ > 0) {
      rows.push_back(row("readmission", "readmissions", num_returns_, return_ms_));
    }
  }

 private:
  [[nodiscard]] Json row(const char* op, const char* what, int count, const std::vector<double>& ms)
      const {
    return {
        {"op", op},
        {"executor", "cuda"},
        {"transport", domain_of_.empty() ? transport_ : "peer+ofi"},
        {"mode", is_replayed_ ? "graph" : "eager"},
        {"ranks", kDeathRanks},
        {what, count},
        {"wrong", num_wrong_},
        {"hung", num_hung_},
        {"ms_p50", rounded(program::percentile(ms, 50), 1)},
        {"ms_p99", rounded(program::percentile(ms, 99), 1)}};
  }

  bool is_replayed_;
  const char* transport_;
  std::vector<int> domain_of_;
  int num_deaths_ = 0;
  int num_returns_ = 0;
  int num_wrong_ = 0;
  int num_hung_ = 0;
  std::vector<double> ms_;
  std::vector<double> return_ms_;
};

}  // namespace

void measure_gpu_deaths(const DeathCounts& counts, uint64_t seed, const TellRows& tell) {
  const int num_gpus = count_gpus_apart();
  WEFT_CHECK(Context{}, num_gpus > 0, ErrorCode::kNotAvailable, "survive_bench: no GPU is visible");
  std::vector<Tally> tallies;
  if (counts.are_in_domains) {
    tallies.emplace_back(false, "ipc", std::vector{0, 0, 1, 1});
  } else {
    tallies.emplace_back(false, "ipc");
    // Graphs stay right when a new process comes where its memory has the old addresses.
    tallies.emplace_back(true, "vmm");
  }
  const int all = counts.deaths + counts.returns;
  const auto is_through = [&](const Tally& tally) { return tally.num_deaths() >= all; };
  const program::Stopwatch watch;
  program::Progress progress("deaths");
  for (size_t turn = 0; !std::ranges::all_of(tallies, is_through); ++turn) {
    Tally& tally = tallies[turn % tallies.size()];
    if (is_through(tally)) {
      continue;
    }
    if (watch.seconds() > counts.seconds) {
      break;
    }
    double done = 0;
    for (const Tally& one : tallies) {
      done += static_cast<double>(one.num_deaths()) / all;
    }
    progress.update(done / static_cast<double>(tallies.size()));
    const int left = counts.returns - tally.num_returns();
    tally.run(num_gpus, seed++, std::min(left, kReturnsOfGroup));
    Json rows = Json::array();
    for (const Tally& one : tallies) {
      one.add_to(rows);
    }
    tell(rows);
  }
}

Json measure_gpu_cost(int num_samples, bool is_small, bool are_in_domains) {
  const int64_t hidden = is_small ? 256 : kHidden;
  const auto measure = are_in_domains ? measure_between_domains : measure_case;
  return {
      measure({'A', 4096, Layout::kExpertMajor, 2, false, 1}, hidden, num_samples),
      measure({'D', 128, Layout::kExpertMajor, 2, true, 20}, hidden, num_samples)};
}

}  // namespace weft::bench
