// SPDX-License-Identifier: Apache-2.0
#include "support/run_case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <functional>
#include <optional>
#include <thread>

#include "cpu/exchange.hpp"
#include "plan/build.hpp"
#include "support/case_memory.hpp"
#include "support/compare.hpp"
#include "support/stream.hpp"
#include "support/watch.hpp"

namespace weft::test {
namespace {

// A result and what it must be.
struct Expected {
  const char* what;
  const CaseMemory::Placed* actual;
  const Matrix* expected;
  bool is_sum;  // a GPU's NaN may have other bits
};

class CaseRun {
  static constexpr uint32_t kMark = 3;
  static constexpr int64_t kMarkedRows = 5;  // of a block

 public:
  CaseRun(Exchange& exchange, const CaseData& data, const CallOptions& options)
      : exchange_(exchange),
        data_(data),
        options_(options),
        rank_(static_cast<size_t>(exchange.rank())),
        random_(data.spec.seed + rank_),
        memory_(exchange) {
    options_.receives_later = data.spec.receives_later;
    place_all();
    if (!is_routed()) {
      be_late();
      plan_ = exchange_.plan(routing(), plan_options(), options_);
    }
  }

  void run_calls() {
    for (size_t i = 0; i < calls_.size(); ++i) {
      be_late();
      calls_[i]();
      const bool is_last = i + 1 == calls_.size();
      if (data_.spec.receives_later && (is_last || (data_.spec.seed + i) % 2 == 0)) {
        be_late();
        exchange_.receive(*plan_, options_);
      }
    }
  }

  // When all calls are done.
  void compare_all() {
    note(first_difference(*plan_, data_.plans[rank_]));
    memory_.download();
    for (const Expected& each : expected_) {
      if (!each.actual->tensor().is_given()) {
        continue;
      }
      const Matrix& actual = each.actual->result();
      const bool may_differ = each.is_sum && data_.setup.is_on_gpu();
      note((may_differ ? first_difference_but_nan : static_cast<Compare>(first_difference))(
          each.what, actual.view(), each.expected->view()
      ));
      if (!actual.has_guards_untouched()) {
        note(fmt::format("{}: bytes around the output were written", each.what));
      }
    }
  }

  [[nodiscard]] const std::string& failure() const { return failure_; }

 private:
  using Compare = std::string (*)(std::string_view, const ConstTensor&, const ConstTensor&);

  void place_all() {
    const RankRouting& routing = data_.routing[rank_];
    idx_ = &memory_.add(routing.topk_idx);
    map_ = &memory_.add(routing.map);
    weights_ = &memory_.add(routing.weights);
    for (size_t i = 0; i < data_.calls.size(); ++i) {
      const RankCall& call = data_.calls[i][rank_];
      data_.spec.calls[i] == 'd' ? place_dispatch(call) : place_combine(call);
    }
    memory_.upload();
  }

  [[nodiscard]] Routing routing() const {
    const bool ignores_unknown = data_.routing[rank_].ignores_unknown;
    return {idx_->tensor(), map_->tensor(), weights_->tensor(), ignores_unknown};
  }
  [[nodiscard]] bool is_routed() const {
    return data_.spec.is_routed && data_.spec.calls.starts_with('d') &&
           (has_given_rows() ||
            exchange_.writes_alone(routing(), plan_options(), first_input_(), options_));
  }
  [[nodiscard]] bool has_given_rows() const { return given_rows(plan_options(), 1).has_value(); }
  [[nodiscard]] const PlanOptions& plan_options() const { return data_.routing[rank_].options; }

  void place_dispatch(const RankCall& call) {
    const bool is_mixed = data_.spec.output == OutputMemory::kMixed;
    const bool is_direct = is_mixed ? rank_ % 2 == 0 : data_.spec.output == OutputMemory::kDirect;
    const auto* x = &memory_.add(call.x);
    const auto* weights = &memory_.add(call.weights);
    const auto* scales = &memory_.add(call.scales);
    const auto* global_scale = &memory_.add(call.global_scale);
    const auto* rows = &memory_.add_output(call.rows, is_direct);
    const auto* row_weights = &memory_.add_output(call.row_weights);
    const auto* row_scales = &memory_.add_output(call.row_scales, is_direct != is_mixed);
    const auto* sources = &memory_.add_output(call.sources);
    const auto* experts = &memory_.add_output(call.experts);
    const auto* counts = &memory_.add_output(call.counts);
    const auto* sums = &memory_.add_output(call.count_sums);
    const ScaleLayout scale_layout = call.scale_layout;
    const auto input = [=, this]() -> DispatchInput {
      return {
          x->tensor(),
          weights->tensor(),
          scales->tensor(),
          quantise_of(data_.setup, data_.spec),
          data_.spec.scale_rule,
          global_scale->tensor()};
    };
    if (!first_input_) {
      first_input_ = input;
    }
    calls_.emplace_back([=, this] {
      const DispatchInput in = input();
      const DispatchOutput out = {
          rows->tensor(),
          row_weights->tensor(),
          row_scales->tensor(),
          sources->tensor(),
          experts->tensor(),
          counts->tensor(),
          sums->tensor(),
          scale_layout};
      if (plan_) {
        exchange_.dispatch(*plan_, in, out, options_);
      } else if (has_given_rows()) {
        plan_ = exchange_.dispatch(routing(), plan_options(), in, out, options_);
      } else {
        plan_and_place(in, out);
      }
    });
    expected_.push_back({"dispatch: rows", rows, &call.rows, false});
    expected_.push_back({"dispatch: weights", row_weights, &call.row_weights, false});
    expected_.push_back({"dispatch: scales", row_scales, &call.row_scales, false});
    expected_.push_back({"dispatch: sources", sources, &call.sources, false});
    expected_.push_back({"dispatch: experts", experts, &call.experts, false});
    expected_.push_back({"dispatch: counts", counts, &call.counts, false});
    expected_.push_back({"dispatch: count sums", sums, &call.count_sums, false});
  }

  // Into memory that is large enough, or is not, as nobody knows before.
  void plan_and_place(const DispatchInput& in, const DispatchOutput& out) {
    const int64_t num_rows = out.rows.rows;
    const int64_t room = num_rows * static_cast<int64_t>((data_.spec.seed + rank_) % 3) / 2;
    DispatchOutput ahead = out;
    for (Tensor* each :
         {&ahead.rows, &ahead.weights, &ahead.scales, &ahead.sources, &ahead.experts}) {
      if (each->is_given()) {
        each->rows = room;
      }
    }
    plan_ = exchange_.dispatch(routing(), plan_options(), in, ahead, options_);
    if (plan_->num_rows() > room) {
      exchange_.place_rows(*plan_, in, out, options_);
    }
  }

  void place_combine(const RankCall& call) {
    // Rows of combine may lie anywhere; here as often in the exchange's memory as not.
    const auto* rows = &memory_.add(call.rows, data_.spec.output != OutputMemory::kStaged);
    const auto* row_weights = &memory_.add(call.row_weights);
    const auto* source_weights = &memory_.add(call.source_weights);
    const auto* source_idx = &memory_.add(call.source_idx);
    const auto* x = &memory_.add_output(call.x);
    const auto* weights = &memory_.add_output(call.weights);
    const auto* marks = &memory_.add(marks_of(call.rows));
    calls_.emplace_back([=, this] {
      exchange_.combine(
          *plan_,
          {rows->tensor(),
           row_weights->tensor(),
           source_weights->tensor(),
           data_.spec.scale,
           source_idx->tensor(),
           {marks->tensor(), kMark, kMarkedRows},
           wire_of(data_.setup, data_.spec)},
          {x->tensor(), weights->tensor()},
          options_
      );
    });
    expected_.push_back({"combine: x", x, &call.x, true});
    expected_.push_back({"combine: weights", weights, &call.weights, false});
  }

  // One for each block of an expert's rows, if the case has marks.
  [[nodiscard]] Matrix marks_of(const Matrix& rows) const {
    if (!data_.spec.has_marks) {
      return {};
    }
    const int64_t experts = data_.plans[rank_].num_local_experts();
    const RowMarks shape = {.block_rows = kMarkedRows};
    Matrix marks(DType::kInt32, 1, experts * shape.num_blocks(rows.view().rows / experts));
    std::fill_n(marks.as<uint32_t>(), marks.view().cols, kMark);
    return marks;
  }

  void be_late() {
    if (data_.spec.is_late) {
      std::this_thread::sleep_for(std::chrono::milliseconds(random_.below(4)));
    }
  }

  void note(const std::string& difference) {
    if (failure_.empty() && !difference.empty()) {
      failure_ =
          fmt::format("rank {}: {} {}", rank_, difference, describe(data_.setup, data_.spec));
    }
  }

  Exchange& exchange_;
  const CaseData& data_;
  CallOptions options_;
  size_t rank_;
  RandomSource random_;
  CaseMemory memory_;
  const CaseMemory::Placed* idx_ = nullptr;
  const CaseMemory::Placed* map_ = nullptr;
  const CaseMemory::Placed* weights_ = nullptr;
  std::optional<Plan> plan_;
  std::function<DispatchInput()> first_input_;
  std::vector<std::function<void()>> calls_;
  std::vector<Expected> expected_;
  std::string failure_;
};

std::string run_all(const Group& group, std::span<const CaseData> cases, Watch* watch = nullptr) {
  const auto enter = [&](const char* step) {
    if (watch != nullptr) {
      watch->enter(static_cast<size_t>(group.rank()), step);
    }
  };
  try {
    enter("makes its exchange");
    Exchange exchange = make_exchange(group, cases[0].setup);
    enter("runs its cases");
    return run_cases(exchange, cases, &group);
  } catch (const std::exception& error) {
    return fmt::format("{} {}", error.what(), describe(cases[0].setup, cases[0].spec));
  }
}

}  // namespace

std::vector<std::vector<int>> domains_of(const ExchangeSetup& setup) {
  std::vector<std::vector<int>> domains;
  for (int rank = 0; rank < setup.num_ranks; ++rank) {
    const auto domain = static_cast<size_t>(setup.domain_of[static_cast<size_t>(rank)]);
    domains.resize(std::max(domains.size(), domain + 1));
    domains[domain].push_back(rank);
  }
  return domains;
}

Exchange make_exchange(const Group& group, const ExchangeSetup& setup) {
  return make_exchange(group, setup, setup.config(group.rank()));
}

Exchange make_exchange(
    const Group& group, const ExchangeSetup& setup, const ExchangeConfig& config
) {
  if (setup.domain_of.empty() || setup.domain_of == group.topology().domain_of) {
    return Exchange(group, config);
  }
  if (setup.is_on_gpu()) {
    return Executor::exchange_by(make_cuda_exchange(group, config, domains_of(setup)));
  }
  return Executor::exchange_by(
      std::make_unique<CpuExchange>(group, config, CpuPlace{.domains = domains_of(setup)})
  );
}

std::string run_cases(Exchange& exchange, std::span<const CaseData> cases, const Group* group) {
  std::optional<TestStream> stream;
  if (cases[0].setup.has_own_stream) {
    stream.emplace(exchange.config().device);
  }
  std::deque<CaseRun> runs;  // whose addresses stay
  for (const CaseData& data : cases) {
    CallOptions options = {.stream = stream ? stream->get() : nullptr};
    options.copy_engines = data.setup.copy_engines;
    runs.emplace_back(exchange, data, options);
  }
  std::for_each(runs.rbegin(), runs.rend(), [](CaseRun& run) { run.run_calls(); });
  if (stream) {
    stream->wait();
    exchange.check();
  }
  std::string failure;
  for (CaseRun& run : runs) {
    run.compare_all();
    failure = failure.empty() ? run.failure() : failure;
  }
  if (group != nullptr) {
    group->barrier();
  }
  return failure;
}

std::string run_cases_on_threads(std::span<const CaseData> cases) {
  const int num_ranks = cases[0].setup.num_ranks;
  std::vector<std::string> failures(static_cast<size_t>(num_ranks));
  std::optional<Watch> watch;
  if (cases[0].setup.is_on_gpu()) {
    watch.emplace(num_ranks);
  }
  run_threads(num_ranks, [&](const Group& group) {
    auto& failure = failures[static_cast<size_t>(group.rank())];
    failure = run_all(group, cases, watch ? &*watch : nullptr);
  });
  std::string all;
  for (const std::string& failure : failures) {
    all += failure.empty() ? "" : failure + "\n";
  }
  return all;
}

std::vector<int> run_cases_on_processes(std::span<const CaseData> cases) {
  return run_forked(cases[0].setup.num_ranks, [&](const Group& group) {
    const std::string failure = run_all(group, cases);
    if (!failure.empty()) {
      fmt::print(stderr, "{}\n", failure);
    }
    return failure.empty() ? 0 : 1;
  });
}

std::string run_on_threads(const ExchangeSetup& setup, const Case& spec) {
  const CaseData data = make_case_data(setup, spec);
  return run_cases_on_threads({&data, 1});
}

}  // namespace weft::test
