// SPDX-License-Identifier: Apache-2.0
// plan, dispatch and combine with rows given beforehand, captured once in a CUDA graph and replayed
// with other routing and rows in the same memory.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <span>

#include "core/gpu/check.hpp"
#include "core/gpu/device_memory.hpp"
#include "gpu/epochs.hpp"
#include "gpu/gpu_test.hpp"
#include "support/case_memory.hpp"
#include "support/compare.hpp"
#include "support/run_case.hpp"
#include "support/stream.hpp"
#include "support/watch.hpp"

namespace weft::test {
namespace {

constexpr uint64_t kNumCases = 20;

// What the calls of `work` put into a stream, to be run again and again.
class Graph {
 public:
  Graph(const TestStream& stream, const std::function<void()>& work)
      : stream_(static_cast<cudaStream_t>(stream.get())) {
    cudaGraph_t graph = nullptr;
    WEFT_CUDA(Context{}, cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    try {
      work();
    } catch (...) {
      static_cast<void>(cudaStreamEndCapture(stream_, &graph));
      throw;
    }
    WEFT_CUDA(Context{}, cudaStreamEndCapture(stream_, &graph));
    WEFT_CUDA(Context{}, cudaGraphInstantiate(&graph_, graph, 0));
    WEFT_CUDA(Context{}, cudaGraphDestroy(graph));
    // Else the first launch does it, and may wait for the whole GPU, where kernels of other ranks
    // wait for this one.
    WEFT_CUDA(Context{}, cudaGraphUpload(graph_, stream_));
    stream.wait();
  }
  ~Graph() { static_cast<void>(cudaGraphExecDestroy(graph_)); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() const { WEFT_CUDA(Context{}, cudaGraphLaunch(graph_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t graph_ = nullptr;
};

// One rank's tensors, whose content changes while their places stay.
class GraphRank {
 public:
  GraphRank(Exchange& exchange, const CaseData& first)
      : exchange_(exchange), rank_(static_cast<size_t>(exchange.rank())), memory_(exchange) {
    const RankCall& dispatch = first.calls[0][rank_];
    const RankCall& combine = first.calls[1][rank_];
    idx_ = &memory_.add(first.routing[rank_].topk_idx);
    weights_ = &memory_.add(first.routing[rank_].weights);
    x_ = &memory_.add(dispatch.x);
    x_weights_ = &memory_.add(dispatch.weights);
    rows_ = &memory_.add_output(dispatch.rows, first.spec.output == OutputMemory::kDirect);
    row_weights_ = &memory_.add_output(dispatch.row_weights);
    y_ = &memory_.add(combine.rows);
    y_weights_ = &memory_.add(combine.row_weights);
    sums_ = &memory_.add_output(combine.x);
    sum_weights_ = &memory_.add_output(combine.weights);
    memory_.upload();
  }

  void make_calls(const CaseData& data, void* stream) {
    CallOptions call = {.stream = stream};
    call.copy_engines = data.setup.copy_engines;  // but not in a capture
    const Routing routing = {.topk_idx = idx_->tensor(), .weights = weights_->tensor()};
    plan_.reset();
    plan_.emplace(exchange_.plan(routing, data.routing[rank_].options, call));
    exchange_.dispatch(
        *plan_,
        {.x = x_->tensor(), .weights = x_weights_->tensor()},
        {.rows = rows_->tensor(), .weights = row_weights_->tensor()},
        call
    );
    exchange_.combine(
        *plan_,
        {.rows = y_->tensor(), .weights = y_weights_->tensor(), .scale = data.spec.scale},
        {.x = sums_->tensor(), .weights = sum_weights_->tensor()},
        call
    );
  }

  void load(const CaseData& data) {
    const RankCall& dispatch = data.calls[0][rank_];
    const RankCall& combine = data.calls[1][rank_];
    memory_.replace(*idx_, data.routing[rank_].topk_idx);
    memory_.replace(*weights_, data.routing[rank_].weights);
    memory_.replace(*x_, dispatch.x);
    memory_.replace(*x_weights_, dispatch.weights);
    memory_.replace(*y_, combine.rows);
    memory_.replace(*y_weights_, combine.row_weights);
    for (const CaseMemory::Placed* out : {rows_, row_weights_, sums_, sum_weights_}) {
      const ConstTensor view = out->result().view();
      memory_.replace(*out, Matrix(view.dtype, view.rows, view.cols));
    }
    memory_.upload();
  }

  [[nodiscard]] std::string difference(const CaseData& data) {
    memory_.download();
    const RankCall& dispatch = data.calls[0][rank_];
    const RankCall& combine = data.calls[1][rank_];
    for (const std::string& text :
         {shape_difference(data.plans[rank_]),
          first_difference("rows", rows_->result().view(), dispatch.rows.view()),
          first_difference("weights", row_weights_->result().view(), dispatch.row_weights.view()),
          first_difference_but_nan("x", sums_->result().view(), combine.x.view()),
          first_difference("x weights", sum_weights_->result().view(), combine.weights.view())}) {
      if (!text.empty()) {
        return fmt::format("rank {}: {} {}", rank_, text, describe(data.setup, data.spec));
      }
    }
    return {};
  }

 private:
  template <class T>
  [[nodiscard]] T read(const T* from) const {
    T value;
    copy_between(
        reinterpret_cast<std::byte*>(&value),
        {},
        reinterpret_cast<const std::byte*>(from),
        exchange_.config().device,
        sizeof value
    );
    return value;
  }

  // What the device says of the output's shape.
  [[nodiscard]] std::string shape_difference(const Plan& expected) const {
    const Plan::OnDevice device = plan_->on_device();
    const std::span<const int32_t> placement = expected.placement();
    for (size_t i = 0; i < placement.size(); ++i) {
      if (const int32_t expert = read(device.placement + i); expert != placement[i]) {
        return fmt::format("replica {} is of {}, expected {}", i, expert, placement[i]);
      }
    }
    if (read(device.num_rows) != expected.num_rows()) {
      return fmt::format("{} rows, expected {}", read(device.num_rows), expected.num_rows());
    }
    if (read(device.overflow) != static_cast<int32_t>(expected.overflow())) {
      return fmt::format("overflow is {}", read(device.overflow));
    }
    for (int i = 0; i < expected.num_local_experts(); ++i) {
      const int64_t rows = read(device.rows_per_expert + i);
      const int64_t wanted = expected.rows_per_expert()[static_cast<size_t>(i)];
      if (expected.layout() != Layout::kRankMajor && rows != wanted) {
        return fmt::format("expert {} has {} rows, expected {}", i, rows, wanted);
      }
    }
    return {};
  }

  Exchange& exchange_;
  size_t rank_;
  CaseMemory memory_;
  std::optional<Plan> plan_;
  const CaseMemory::Placed* idx_;
  const CaseMemory::Placed* weights_;
  const CaseMemory::Placed* x_;
  const CaseMemory::Placed* x_weights_;
  const CaseMemory::Placed* rows_;
  const CaseMemory::Placed* row_weights_;
  const CaseMemory::Placed* y_;
  const CaseMemory::Placed* y_weights_;
  const CaseMemory::Placed* sums_;
  const CaseMemory::Placed* sum_weights_;
};

// Cases that differ in everything that a replay may change.
std::vector<CaseData> graph_cases(
    const ExchangeSetup& setup, Layout layout, OutputMemory output, const Balancing& balance = {}
) {
  std::vector<CaseData> cases;
  for (uint64_t i = 0; i < kNumCases + 1; ++i) {
    Case spec;
    spec.seed = 100 + i;
    spec.num_tokens.assign(static_cast<size_t>(setup.num_ranks), 40);
    spec.num_tokens.back() = 17;
    spec.topk = 3;
    spec.layout = layout;
    spec.output = output;
    spec.pad_multiple = layout == Layout::kRankMajor ? 1 : 4;
    spec.hole_fraction = i % 4 == 1 ? 0.5 : 0;
    spec.popularity = i % 5 == 2 ? Popularity::kOneExpert : Popularity::kUniform;
    spec.repeat_experts = true;
    spec.rows = layout == Layout::kExpertStrided ? 12 : 90;  // not always enough
    spec.scale = layout == Layout::kRankMajor ? CombineScale::kNone : CombineScale::kPlanWeights;
    spec.dtype = DType::kBFloat16;
    spec.balance = balance;
    cases.push_back(make_case_data(setup, spec));
  }
  return cases;
}

// All ranks go on, or none.
bool are_all_good(const Group& group, const std::string& failure) {
  const std::byte is_bad{failure.empty() ? uint8_t{0} : uint8_t{1}};
  const auto blocks = group.all_gather({&is_bad, 1});
  return std::all_of(blocks.begin(), blocks.end(), [](const Bytes& block) {
    return block[0] == std::byte{0};
  });
}

// With `epochs` so many calls pass between two replays as far as the GPUs know.
std::string replay_all(
    const Group& group, const std::vector<CaseData>& cases, Watch& watch, uint64_t epochs = 0
) {
  static const uint64_t num_replays = number_from_env("WEFT_GRAPH_REPLAYS", kNumCases);
  const auto own = static_cast<size_t>(group.rank());
  watch.enter(own, "makes its exchange");
  Exchange exchange(group, cases[0].setup.config(group.rank()));
  watch.enter(own, "makes its tensors");
  const TestStream stream(exchange.config().device);
  GraphRank rank(exchange, cases[0]);
  watch.enter(own, "makes its first calls");
  rank.make_calls(cases[0], stream.get());  // all memory that the calls need
  watch.enter(own, "waits for its first calls");
  stream.wait();
  exchange.check();
  std::string failure = rank.difference(cases[0]);
  watch.enter(own, "makes its graph");
  const Graph graph(stream, [&] { rank.make_calls(cases[0], stream.get()); });
  for (uint64_t i = 1; i <= num_replays; ++i) {
    watch.enter(own, "waits for the others' hosts");
    if (!are_all_good(group, failure)) {
      break;
    }
    const CaseData& data = cases[1 + (i - 1) % kNumCases];
    watch.enter(own, "loads");
    rank.load(data);
    if (epochs > 0) {
      set_epoch(exchange, i * epochs - 2);
      group.barrier();
    }
    watch.enter(own, "launches");
    graph.launch();
    watch.enter(own, "waits for its stream");
    stream.wait();
    exchange.check();
    watch.enter(own, "compares");
    failure = rank.difference(data);
    if (i % 7 == 0) {  // ordinary calls in between
      watch.enter(own, "makes ordinary calls");
      const std::string between = run_cases(exchange, {cases.data(), 1});
      failure = failure.empty() ? between : failure;
    }
  }
  return failure;
}

class GpuGraphTest : public GpuParamTest<int> {};

TEST_P(GpuGraphTest, ReplaysWithChangingRouting) {
  FailureCount failures;
  for (const int gpus : gpu_counts()) {
    for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
      for (const OutputMemory output : {OutputMemory::kDirect, OutputMemory::kStaged}) {
        ExchangeSetup setup = gpu_setup(GetParam(), gpus);
        setup.mover = output == OutputMemory::kDirect ? movers_here().back() : Mover::kVector;
        setup.copy_engines = output == OutputMemory::kStaged;
        const auto cases = graph_cases(setup, layout, output);
        std::vector<std::string> texts(static_cast<size_t>(setup.num_ranks));
        Watch watch(setup.num_ranks);
        run_threads(setup.num_ranks, [&](const Group& group) {
          auto& text = texts[static_cast<size_t>(group.rank())];
          try {
            text = replay_all(group, cases, watch);
          } catch (const Error& error) {
            text = fmt::format("{} {}", error.what(), describe(setup, cases[0].spec));
          }
        });
        for (const std::string& text : texts) {
          failures.add(text);
        }
        if (failures.are_too_many()) {
          return;
        }
      }
    }
  }
}

// Other experts are popular each time, so that replicas come and go.
TEST_P(GpuGraphTest, ReplaysWithReplicas) {
  FailureCount failures;
  for (const int gpus : gpu_counts()) {
    for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
      const ExchangeSetup setup = gpu_setup(GetParam(), gpus);
      Balancing balance = {.replicas = 2};
      if (layout == Layout::kExpertMajor) {  // the first expert of the next rank, and none
        for (int rank = 0; rank < setup.num_ranks; ++rank) {
          const int next = (rank + 1) % setup.num_ranks;
          balance.placement.push_back(next == rank ? -1 : 4 * next);
          balance.placement.push_back(-1);
        }
      }
      const auto cases = graph_cases(setup, layout, OutputMemory::kStaged, balance);
      Watch watch(setup.num_ranks);
      std::vector<std::string> texts(static_cast<size_t>(setup.num_ranks));
      run_threads(setup.num_ranks, [&](const Group& group) {
        auto& text = texts[static_cast<size_t>(group.rank())];
        try {
          text = replay_all(group, cases, watch);
        } catch (const Error& error) {
          text = fmt::format("{} {}", error.what(), describe(setup, cases[0].spec));
        }
      });
      for (const std::string& text : texts) {
        failures.add(text);
      }
      if (failures.are_too_many()) {
        return;
      }
    }
  }
}

// Every replay crosses a multiple of 2^28 calls, so that 2^31 and 2^32 are among them.
TEST_P(GpuGraphTest, ReplaysWhereEpochsComeRound) {
  const ExchangeSetup setup = gpu_setup(GetParam(), num_gpus());
  const auto cases = graph_cases(setup, Layout::kExpertMajor, OutputMemory::kStaged);
  Watch watch(setup.num_ranks);
  run_threads(setup.num_ranks, [&](const Group& group) {
    EXPECT_EQ(replay_all(group, cases, watch, uint64_t{1} << 28), "");
  });
}

INSTANTIATE_TEST_SUITE_P(All, GpuGraphTest, testing::Values(1, 2, 4));

}  // namespace
}  // namespace weft::test
