// SPDX-License-Identifier: Apache-2.0
#include "mpi/contest.hpp"

#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <sched.h>
#include <utility>

#include "core/half.hpp"
#include "measure/limits.hpp"
#include "measure/measure.hpp"
#include "measure/workload.hpp"
#include "plan/random_routing.hpp"
#include "weft/exchange.hpp"

namespace weft::bench {
namespace {

using namespace weft::program;

constexpr size_t kNumVersions = 4;

// One way of doing an operation, and its slowest rank's time in each sample.
struct Contender {
  std::string name;
  std::function<void(size_t version)> run;
  std::vector<double> us = {};
};

double slowest(double us) {
  double most = 0;
  MPI_Allreduce(&us, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return most;
}

double sum_of_ranks(double value) {
  double sum = 0;
  MPI_Allreduce(&value, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  return sum;
}

bool on_all_ranks(bool is_true) {
  return slowest(is_true ? 0 : 1) == 0;
}

// All cores while it lives: the launcher may have bound this process to one.
class AllCores {
 public:
  AllCores() {
    sched_getaffinity(0, sizeof(before_), &before_);
    cpu_set_t all;
    std::memset(&all, 0xff, sizeof(all));
    sched_setaffinity(0, sizeof(all), &all);
  }
  AllCores(const AllCores&) = delete;
  AllCores& operator=(const AllCores&) = delete;
  ~AllCores() { sched_setaffinity(0, sizeof(before_), &before_); }

 private:
  cpu_set_t before_ = {};
};

class Contest {
 public:
  Contest(const Group& group, const ContestOptions& options)
      : group_(group), options_(options), exchange_(group, config(options)) {
    rivals_.push_back(std::make_unique<PerRouteRival>(options.shape));
    rivals_.push_back(std::make_unique<PerRankRival>(options.shape));
    const RivalShape& shape = options.shape;
    RandomRouting spec;
    spec.num_tokens = shape.max_tokens;
    spec.num_experts = shape.num_experts;
    spec.topk = shape.topk;
    spec.popularity = options.skew > 0 ? Popularity::kZipf : Popularity::kUniform;
    spec.zipf_exponent = options.skew;
    spec.with_weights = false;
    for (size_t version = 0; version < kNumVersions; ++version) {
      spec.seed = mix_seed(options.seed, version);
      routes_.push_back(random_routing(spec, group.rank()));
      plans_.push_back(exchange_.plan(routing(version), plan_options()));
      max_rows_ = std::max(max_rows_, plans_.back().num_rows());
    }
    const uint64_t seed = mix_seed(options.seed, 100 + static_cast<uint64_t>(group.rank()));
    x_ = make_rows(shape.dtype, shape.max_tokens, shape.hidden, mix_seed(seed, 1));
    y_ = make_rows(shape.dtype, max_rows_, shape.hidden, mix_seed(seed, 2));
    combined_ = Matrix(shape.dtype, shape.max_tokens, shape.hidden);
    rows_ = exchange_.allocate(max_rows_, shape.hidden, shape.dtype);
    rival_rows_ = Matrix(shape.dtype, max_rows_, shape.hidden);
    rival_combined_ = Matrix(shape.dtype, shape.max_tokens, shape.hidden);
  }

  std::vector<ResultRow> run() {
    check();
    measure_limit();
    std::vector<ResultRow> rows;
    for (const char* op : {"plan", "dispatch", "plan+dispatch", "combine"}) {
      auto contenders = contenders_of(op);
      take_samples(op, contenders);
      for (size_t rival = 1; rival < contenders.size(); ++rival) {
        rows.push_back(row_of(op, contenders[0], contenders[rival]));
      }
    }
    return rows;
  }

  [[nodiscard]] const CopyRates& rates() const { return rates_; }

 private:
  static ExchangeConfig config(const ContestOptions& options) {
    ExchangeConfig config;
    config.hidden = options.shape.hidden;
    config.max_tokens = options.shape.max_tokens;
    config.num_experts = options.shape.num_experts;
    config.max_topk = options.shape.topk;
    config.num_threads = options.shape.num_threads;
    return config;
  }

  [[nodiscard]] PlanOptions plan_options() const {
    PlanOptions options;
    options.layout = Layout::kExpertMajor;
    options.pad_multiple = options_.shape.pad_multiple;
    return options;
  }

  [[nodiscard]] Routing routing(size_t version) const {
    const RouteTable& routes = routes_[version];
    Routing routing;
    routing.topk_idx = matrix(routes.expert.data(), routes.num_tokens, routes.topk);
    return routing;
  }

  template <class View>
  static View head(View view, int64_t rows) {
    view.rows = rows;
    return view;
  }

  void dispatch(const Plan& plan) {
    exchange_.dispatch(
        plan, {.x = std::as_const(x_).view()}, {.rows = head(rows_.tensor(), plan.num_rows())}
    );
  }

  void combine(const Plan& plan) {
    exchange_.combine(
        plan, {.rows = head(std::as_const(y_).view(), plan.num_rows())}, {.x = combined_.view()}
    );
  }

  // Weft first, then the rivals. What an operation needs beforehand is done by prepare().
  std::vector<Contender> contenders_of(const std::string& op) {
    const bool has_plan = op.starts_with("plan");
    const bool has_dispatch = op.ends_with("dispatch");
    std::vector<Contender> contenders;
    contenders.push_back({"weft", [=, this](size_t version) {
                            const Plan plan = has_plan
                                                  ? exchange_.plan(routing(version), plan_options())
                                                  : plans_[version];
                            if (has_dispatch) {
                              dispatch(plan);
                            } else if (!has_plan) {
                              combine(plan);
                            }
                          }});
    for (const auto& rival : rivals_) {
      contenders.push_back({rival->name(), [=, this, &rival](size_t version) {
                              if (has_plan) {
                                rival->plan(routes_[version].expert);
                              }
                              if (has_dispatch) {
                                rival->dispatch(x_.view().data, rival_rows_.view().data);
                              } else if (!has_plan) {
                                rival->combine(y_.view().data, rival_combined_.view().data);
                              }
                            }});
    }
    return contenders;
  }

  // The contenders in turn, each sample on the next routing.
  void take_samples(const std::string& op, std::vector<Contender>& contenders) {
    for (int i = -options_.warmup; i < options_.iterations; ++i) {
      const auto version = static_cast<size_t>(i + options_.warmup) % kNumVersions;
      if (!op.starts_with("plan")) {
        for (const auto& rival : rivals_) {
          rival->plan(routes_[version].expert);
        }
      }
      for (Contender& contender : contenders) {
        MPI_Barrier(MPI_COMM_WORLD);
        const Stopwatch watch;
        contender.run(version);
        const double us = slowest(watch.microseconds());
        if (i >= 0) {
          contender.us.push_back(us);
        }
      }
    }
  }

  // Dispatch has one right answer. The sums of one row per route are rounded once where Weft and
  // the sums of one row per rank are rounded per hop too.
  void check() {
    const RivalShape& shape = options_.shape;
    const Plan& plan = plans_[0];
    const auto num_bytes = static_cast<size_t>(plan.num_rows() * x_.view().row_bytes());
    dispatch(plan);
    combine(plan);
    for (const auto& rival : rivals_) {
      rival->plan(routes_[0].expert);
      std::memset(rival_rows_.view().data, 0x5a, num_bytes);
      rival->dispatch(x_.view().data, rival_rows_.view().data);
      rival->combine(y_.view().data, rival_combined_.view().data);
      const bool is_equal =
          rival->num_rows() == plan.num_rows() &&
          std::memcmp(rows_.tensor().data, rival_rows_.view().data, num_bytes) == 0;
      is_dispatch_good_ = on_all_ranks(is_dispatch_good_ && is_equal);
      const double tolerance = rival == rivals_[0] ? 0x1p-6 * shape.topk : 0;
      const bool is_close = largest_difference() <= tolerance;
      is_combine_good_ = on_all_ranks(is_combine_good_ && is_close);
    }
  }

  double largest_difference() {
    const auto* mine = reinterpret_cast<const uint16_t*>(combined_.view().data);
    const auto* theirs = reinterpret_cast<const uint16_t*>(rival_combined_.view().data);
    double most = 0;
    for (int64_t i = 0; i < combined_.rows() * combined_.cols(); ++i) {
      const double difference = bf16_to_float(mine[i]) - bf16_to_float(theirs[i]);
      most = std::max(most, std::abs(difference));
    }
    return most;
  }

  // Rank 0 measures; the others sleep in the group's barrier, where MPI's would spin.
  void measure_limit() {
    const auto row_bytes = static_cast<double>(x_.view().row_bytes());
    ExchangeBytes mine;
    for (const Plan& plan : plans_) {
      mine.logical += static_cast<double>(plan.logical_bytes(1)) * row_bytes / kNumVersions;
      mine.wire += static_cast<double>(plan.wire_bytes(1)) * row_bytes / kNumVersions;
    }
    mine.tokens = static_cast<double>(x_.rows()) * row_bytes;
    bytes_ = {sum_of_ranks(mine.logical), sum_of_ranks(mine.wire), sum_of_ranks(mine.tokens)};
    if (group_.rank() == 0) {
      const AllCores all_cores;
      CopyShape shape;
      shape.num_ranks = group_.num_ranks();
      shape.threads_per_rank = options_.shape.num_threads;
      shape.row_bytes = x_.view().row_bytes();
      shape.source_bytes = x_.view().num_bytes();
      shape.copies = std::max(1, static_cast<int>(bytes_.logical / bytes_.tokens + 0.5));
      rates_ = copy_rates(shape);
    }
    group_.barrier();
    MPI_Bcast(&rates_, sizeof(rates_), MPI_BYTE, 0, MPI_COMM_WORLD);
  }

  ResultRow row_of(const std::string& op, const Contender& weft, const Contender& rival) const {
    ResultRow row;
    row.op = op;
    row.transport = exchange_.config().transport;
    row.layout = layout_name(Layout::kExpertMajor);
    row.dtype = dtype_name(options_.shape.dtype);
    row.ranks = group_.num_ranks();
    row.tokens = options_.shape.max_tokens;
    row.hidden = options_.shape.hidden;
    row.experts = options_.shape.num_experts;
    row.topk = options_.shape.topk;
    row.pad = options_.shape.pad_multiple;
    row.mode = "exact direct";
    row.us_p50 = percentile(weft.us, 50);
    row.us_p99 = percentile(weft.us, 99);
    row.checked = op == "combine" ? is_combine_good_ : is_dispatch_good_;
    row.rival = Rival{rival.name, percentile(rival.us, 50)};
    if (op != "plan") {
      row.wire_bytes = bytes_.wire;
      row.logical_bytes = bytes_.logical;
      const Op kind = op == "combine" ? Op::kCombine : Op::kDispatch;
      row.limit_us = rates_.limit_us(kind, bytes_.logical);
    }
    return row;
  }

  const Group& group_;
  const ContestOptions& options_;
  Exchange exchange_;
  std::vector<std::unique_ptr<MpiRival>> rivals_;
  std::vector<RouteTable> routes_;  // by version
  std::vector<Plan> plans_;         // by version
  int64_t max_rows_ = 0;
  Matrix x_;
  Matrix y_;
  Matrix combined_;
  Buffer rows_;
  Matrix rival_rows_;
  Matrix rival_combined_;
  ExchangeBytes bytes_;
  CopyRates rates_;
  bool is_dispatch_good_ = true;
  bool is_combine_good_ = true;
};

}  // namespace

ContestResult run_contest(const Group& group, const ContestOptions& options) {
  Contest contest(group, options);
  ContestResult result;
  result.rows = contest.run();
  result.rates = contest.rates();
  return result;
}

}  // namespace weft::bench
