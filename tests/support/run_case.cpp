// SPDX-License-Identifier: Apache-2.0
#include "support/run_case.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "support/compare.hpp"

namespace weft::test {
namespace {

// Where an output goes: the caller's memory or the exchange's, inside guard rows either way.
class Output {
 public:
  Output(Exchange& exchange, const ConstTensor& like, bool is_direct) {
    if (!like.is_given()) {
      return;
    }
    if (!is_direct) {
      own_ = Matrix(like.dtype, like.rows, like.cols);
      tensor_ = own_.view();
      return;
    }
    buffer_ = exchange.allocate(like.rows + 2 * kGuardRows, like.cols, like.dtype);
    tensor_ = buffer_.tensor();
    fill_canary(tensor_);
    tensor_.data += kGuardRows * like.row_bytes();
    tensor_.rows = like.rows;
    is_direct_ = true;
  }

  [[nodiscard]] const Tensor& tensor() const { return tensor_; }
  [[nodiscard]] bool has_guards_untouched() const {
    if (!is_direct_) {
      return own_.has_guards_untouched();
    }
    Tensor guard = buffer_.tensor();
    guard.rows = kGuardRows;
    const bool is_front_good = is_canary(guard);
    guard.data = tensor_.data + tensor_.num_bytes();
    return is_front_good && is_canary(guard);
  }

 private:
  Tensor tensor_;
  Matrix own_;
  Buffer buffer_;
  bool is_direct_ = false;
};

class CaseRun {
 public:
  CaseRun(Exchange& exchange, const CaseData& data)
      : exchange_(exchange),
        data_(data),
        rank_(static_cast<size_t>(exchange.rank())),
        random_(data.spec.seed + rank_),
        plan_(make_plan()) {
    note(first_difference(plan_, data.plans[rank_]));
  }

  void run_calls() {
    for (size_t i = 0; i < data_.calls.size(); ++i) {
      const RankCall& call = data_.calls[i][rank_];
      data_.spec.calls[i] == 'd' ? dispatch(call) : combine(call);
    }
  }

  [[nodiscard]] const std::string& failure() const { return failure_; }

 private:
  Plan make_plan() {
    be_late();
    const RankRouting& routing = data_.routing[rank_];
    return exchange_.plan(routing.routing(), routing.options);
  }

  void dispatch(const RankCall& call) {
    const bool is_mixed = data_.spec.output == OutputMemory::kMixed;
    const bool is_direct = is_mixed ? rank_ % 2 == 0 : data_.spec.output == OutputMemory::kDirect;
    Output rows(exchange_, call.rows.view(), is_direct);
    Output weights(exchange_, call.row_weights.view(), false);
    Output scales(exchange_, call.row_scales.view(), is_direct != is_mixed);
    be_late();
    exchange_.dispatch(
        plan_, call.dispatch_input(), {rows.tensor(), weights.tensor(), scales.tensor()}
    );
    compare("dispatch: rows", rows, call.rows);
    compare("dispatch: weights", weights, call.row_weights);
    compare("dispatch: scales", scales, call.row_scales);
  }

  void combine(const RankCall& call) {
    // Rows of combine may lie anywhere; here as often in the exchange's memory as not.
    Output rows(exchange_, call.rows.view(), data_.spec.output != OutputMemory::kStaged);
    const ConstTensor source = call.rows.view();
    std::copy_n(source.data, source.num_bytes(), rows.tensor().data);
    CombineInput in = call.combine_input(data_.spec.scale);
    in.rows = rows.tensor();
    Output x(exchange_, call.x.view(), false);
    Output weights(exchange_, call.weights.view(), false);
    be_late();
    exchange_.combine(plan_, in, {x.tensor(), weights.tensor()});
    compare("combine: x", x, call.x);
    compare("combine: weights", weights, call.weights);
  }

  void compare(const char* what, const Output& actual, const Matrix& expected) {
    if (!actual.tensor().is_given()) {
      return;
    }
    note(first_difference(what, actual.tensor(), expected.view()));
    if (!actual.has_guards_untouched()) {
      note(fmt::format("{}: bytes around the output were written", what));
    }
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
  size_t rank_;
  RandomSource random_;
  std::string failure_;
  Plan plan_;
};

std::string run_all(const Group& group, std::span<const CaseData> cases) {
  try {
    Exchange exchange(group, cases[0].setup.config());
    return run_cases(exchange, cases);
  } catch (const std::exception& error) {
    return fmt::format("{} {}", error.what(), describe(cases[0].setup, cases[0].spec));
  }
}

}  // namespace

std::string run_cases(Exchange& exchange, std::span<const CaseData> cases) {
  std::vector<CaseRun> runs;
  runs.reserve(cases.size());
  for (const CaseData& data : cases) {
    runs.emplace_back(exchange, data);
  }
  std::string failure;
  for (size_t i = runs.size(); i > 0; --i) {
    runs[i - 1].run_calls();
    failure = failure.empty() ? runs[i - 1].failure() : failure;
  }
  return failure;
}

std::string run_cases_on_threads(std::span<const CaseData> cases) {
  const int num_ranks = cases[0].setup.num_ranks;
  std::vector<std::string> failures(static_cast<size_t>(num_ranks));
  run_threads(num_ranks, [&](const Group& group) {
    failures[static_cast<size_t>(group.rank())] = run_all(group, cases);
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
