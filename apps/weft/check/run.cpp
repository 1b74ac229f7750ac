// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "check/case.hpp"
#include "core/gpu/device_memory.hpp"
#include "core/half.hpp"
#include "exchange/reference/reference_exchange.hpp"
#include "measure/bench_check.hpp"
#include "plan/plan_data.hpp"
#include "plan/reference/reference_plan.hpp"
#include "weft/tensor.hpp"

namespace weft::program {
namespace {

// Value and bits: two numbers that print alike may still differ.
std::string element_text(DType dtype, const std::byte* place) {
  uint32_t bits = 0;
  std::memcpy(&bits, place, static_cast<size_t>(std::min<int64_t>(dtype_bytes(dtype), 4)));
  const auto half = static_cast<uint16_t>(bits & 0xffffU);
  switch (dtype) {
    case DType::kBFloat16:
      return fmt::format("{} (0x{:04x})", bf16_to_float(half), bits);
    case DType::kFloat16:
      return fmt::format("{} (0x{:04x})", fp16_to_float(half), bits);
    case DType::kFloat32:
      return fmt::format("{} (0x{:08x})", std::bit_cast<float>(bits), bits);
    default:
      return fmt::format("0x{:02x}", bits);
  }
}

// "slot 7 (rank 1, token 5, k 2)", or what else the row is for.
std::string slot_text(const PlanData& plan, int64_t slot) {
  for (size_t rank = 0; rank < plan.received.size(); ++rank) {
    const Arrivals& arrivals = plan.received[rank];
    for (size_t i = 0; i < arrivals.token.size(); ++i) {
      const auto begin = static_cast<size_t>(arrivals.route_begin[i]);
      const auto end = static_cast<size_t>(arrivals.route_begin[i + 1]);
      for (size_t j = begin; j < end; ++j) {
        if (arrivals.slot[j] == slot) {
          return fmt::format(
              "slot {} (rank {}, token {}, k {})", slot, rank, arrivals.token[i], arrivals.k[j]
          );
        }
      }
    }
  }
  const bool is_padding = std::ranges::any_of(plan.padding, [&](const auto& range) {
    return range.first <= slot && slot < range.second;
  });
  return fmt::format("slot {} ({})", slot, is_padding ? "padding" : "slack");
}

// Bit for bit. Both are contiguous and of one dtype; `row_text` names a row.
std::optional<std::string> first_difference(
    std::string_view what,
    const ConstTensor& actual,
    const ConstTensor& expected,
    const std::function<std::string(int64_t)>& row_text
) {
  if (actual.rows != expected.rows || actual.cols != expected.cols) {
    return fmt::format(
        "{}: [{}, {}] (expected [{}, {}])",
        what,
        actual.rows,
        actual.cols,
        expected.rows,
        expected.cols
    );
  }
  const auto* differing =
      std::mismatch(actual.data, actual.data + actual.num_bytes(), expected.data).first;
  if (differing == actual.data + actual.num_bytes()) {
    return std::nullopt;
  }
  const int64_t width = dtype_bytes(actual.dtype);
  const int64_t index = (differing - actual.data) / width;
  return fmt::format(
      "{}: {}, element {}: {}, expected {}",
      what,
      row_text(index / actual.cols),
      index % actual.cols,
      element_text(actual.dtype, actual.data + index * width),
      element_text(actual.dtype, expected.data + index * width)
  );
}

constexpr std::byte kUntouched{0x5a};
constexpr std::chrono::seconds kTimeout{20};

// A copy of a host matrix in the memory that an exchange works on, a CPU's or a GPU's.
class DeviceCopy {
 public:
  // A matrix that is not given stays so.
  DeviceCopy(const Device& device, const ConstTensor& host) {
    if (host.is_given()) {
      memory_ = allocate_on(device, static_cast<uint64_t>(host.num_bytes()));
      fill(device, memory_.get(), host);
    }
  }
  // A tensor in memory of the exchange.
  DeviceCopy(Exchange& exchange, const ConstTensor& host)
      : buffer_(exchange.allocate(host.rows, host.cols, host.dtype)) {
    fill(exchange.config().device, buffer_.tensor().data, host);
  }

  [[nodiscard]] const Tensor& tensor() const { return tensor_; }

  void read_back(const Tensor& host) const {
    copy_between(
        host.data, {}, tensor_.data, tensor_.device, static_cast<uint64_t>(tensor_.num_bytes())
    );
  }

 private:
  void fill(const Device& device, std::byte* data, const ConstTensor& host) {
    tensor_ = {data, host.dtype, host.rows, host.cols, -1, device};
    copy_between(data, device, host.data, {}, static_cast<uint64_t>(host.num_bytes()));
  }

  Tensor tensor_;
  std::shared_ptr<std::byte> memory_;
  Buffer buffer_;
};

// Output and what it should be, for one call on all ranks; only this rank's actual output exists.
struct PlanRun {
  std::vector<RankInput> inputs;  // by rank
  std::vector<Plan> expected;     // by rank
  std::optional<Plan> plan;       // this rank's, from the exchange
};

class CaseRun {
 public:
  CaseRun(const Group& group, const CheckCase& check_case, Exchange& exchange)
      : case_(check_case),
        rank_(static_cast<size_t>(group.rank())),
        domain_of_(group.topology().domain_of),
        device_(exchange.config().device),
        exchange_(exchange) {}

  std::optional<std::string> run() {
    std::vector<PlanRun> runs;
    for (int version = 0; version < case_.num_plans; ++version) {
      runs.push_back(make_plan(static_cast<uint64_t>(version)));
    }
    std::reverse(runs.begin(), runs.end());
    for (const PlanRun& run : runs) {
      check_dispatch(run);
      if (case_.workload.dtype != DType::kByte) {
        check_combine(run);
      }
    }
    // At the end: a plan on a GPU is fetched, which may wait for kernels of other ranks there.
    for (const PlanRun& run : runs) {
      if (!(*run.plan == run.expected[rank_])) {
        note(fmt::format("plan: {} rows, differs from the reference plan", run.plan->num_rows()));
      }
    }
    return failure_;
  }

 private:
  [[nodiscard]] CallOptions call() const { return {.copy_engines = case_.copy_engines}; }

  // Keeps the first failure. All ranks go on, since the calls that follow are collective.
  void note(std::optional<std::string> difference) {
    if (difference && !failure_) {
      failure_ = std::move(difference);
    }
  }

  [[nodiscard]] std::vector<PlanOptions> options_by_rank(std::span<const RouteTable> tables) const {
    std::vector<PlanOptions> options(tables.size(), case_.options);
    if (case_.room == Room::kExact) {
      return options;
    }
    const int64_t more = case_.room == Room::kSpare ? 3 : -1;
    const auto exact = reference_plans(tables, case_.workload.routing.num_experts, case_.options);
    for (size_t rank = 0; rank < tables.size(); ++rank) {
      if (case_.options.layout == Layout::kExpertStrided) {
        options[rank].expert_stride =
            std::max<int64_t>(1, exact[rank].shape.options.expert_stride + more);
      } else {
        options[rank].row_budget = std::max<int64_t>(0, exact[rank].required_rows + more);
      }
    }
    return options;
  }

  PlanRun make_plan(uint64_t version) {
    PlanRun run;
    for (int rank = 0; rank < case_.workload.num_ranks(); ++rank) {
      run.inputs.push_back(make_input(case_.workload, rank, version));
    }
    const auto tables = route_tables(case_.workload, run.inputs);
    const auto options = options_by_rank(tables);
    std::vector<int64_t> budgets;
    for (const PlanOptions& each : options) {
      if (each.row_budget) {
        budgets.push_back(*each.row_budget);
      }
    }
    run.expected = expected_plans(tables, case_.workload.routing.num_experts, options[0], budgets);
    const Routing host = run.inputs[rank_].routing();
    const DeviceCopy idx(device_, host.topk_idx);
    const DeviceCopy map(device_, host.map);
    const DeviceCopy weights(device_, host.weights);
    run.plan = exchange_.plan({idx.tensor(), map.tensor(), weights.tensor()}, options[rank_]);
    return run;
  }

  // Memory for one rank's dispatch output, filled so that an untouched row can be told.
  struct Rows {
    Matrix rows;
    Matrix weights;
    Matrix scales;
    DispatchOutput views() {
      return {.rows = rows.view(), .weights = weights.view(), .scales = scales.view()};
    }
  };
  [[nodiscard]] Rows make_output(const Plan& plan) const {
    const int64_t n = plan.num_rows();
    return {
        Matrix(case_.workload.dtype, n, case_.workload.hidden, kUntouched),
        Matrix(DType::kFloat32, n, plan.row_weight_cols(), kUntouched),
        Matrix(DType::kFloat32, n, case_.workload.scale_cols, kUntouched),
    };
  }

  void check_dispatch(const PlanRun& run) {
    std::vector<Rows> expected;
    std::vector<DispatchInput> inputs;
    std::vector<DispatchOutput> outputs;
    for (size_t rank = 0; rank < run.expected.size(); ++rank) {
      const RankInput& input = run.inputs[rank];
      inputs.push_back(
          {.x = input.x.view(), .weights = input.weights.view(), .scales = input.scales.view()}
      );
      expected.push_back(make_output(run.expected[rank]));
      outputs.push_back(expected.back().views());
    }
    reference_dispatch(run.expected, inputs, outputs);

    Rows actual = make_output(*run.plan);
    const DispatchOutput out = actual.views();
    const DispatchInput& in = inputs[rank_];
    const DeviceCopy x(device_, in.x);
    const DeviceCopy weights(device_, in.weights);
    const DeviceCopy scales(device_, in.scales);
    const DeviceCopy rows =
        case_.is_direct ? DeviceCopy(exchange_, out.rows) : DeviceCopy(device_, out.rows);
    const DeviceCopy row_weights(device_, out.weights);
    const DeviceCopy row_scales(device_, out.scales);
    exchange_.dispatch(
        *run.plan,
        {x.tensor(), weights.tensor(), scales.tensor()},
        {rows.tensor(), row_weights.tensor(), row_scales.tensor()},
        call()
    );
    rows.read_back(out.rows);
    row_weights.read_back(out.weights);
    row_scales.read_back(out.scales);

    const auto row_text = [&](int64_t slot) {
      return slot_text(contents_of(run.expected[rank_]), slot);
    };
    note(first_difference("dispatch rows", out.rows, outputs[rank_].rows, row_text));
    note(first_difference("dispatch weights", out.weights, outputs[rank_].weights, row_text));
    note(first_difference("dispatch scales", out.scales, outputs[rank_].scales, row_text));
  }

  void check_combine(const PlanRun& run) {
    std::vector<Matrix> rows;
    std::vector<Matrix> row_weights;
    std::vector<Matrix> x;
    std::vector<Matrix> weights;
    std::vector<CombineInput> inputs;
    std::vector<CombineOutput> outputs;
    for (size_t rank = 0; rank < run.expected.size(); ++rank) {
      const Plan& plan = run.expected[rank];
      const auto [dtype, hidden] = std::pair(case_.workload.dtype, case_.workload.hidden);
      const uint64_t seed = mix_seed(case_.workload.routing.seed, 100 + rank);
      const ConstTensor source = run.inputs[rank].weights.view();
      rows.push_back(make_rows(dtype, plan.num_rows(), hidden, mix_seed(seed, 1)));
      row_weights.push_back(
          make_rows(DType::kFloat32, plan.num_rows(), plan.row_weight_cols(), mix_seed(seed, 2))
      );
      x.emplace_back(dtype, plan.num_tokens(), hidden, kUntouched);
      weights.emplace_back(DType::kFloat32, plan.num_tokens(), source.cols, kUntouched);
      const bool has_source = case_.scale == CombineScale::kSourceWeights;
      inputs.push_back(
          {.rows = std::as_const(rows.back()).view(),
           .weights = std::as_const(row_weights.back()).view(),
           .source_weights = has_source ? source : ConstTensor{},
           .scale = case_.scale}
      );
      outputs.push_back({.x = x.back().view(), .weights = weights.back().view()});
    }
    reference_combine(run.expected, inputs, outputs, domain_of_);

    Matrix actual_x(case_.workload.dtype, x[rank_].rows(), x[rank_].cols(), kUntouched);
    Matrix actual_weights(
        DType::kFloat32, weights[rank_].rows(), weights[rank_].cols(), kUntouched
    );
    const CombineInput& in = inputs[rank_];
    const DeviceCopy in_rows(device_, in.rows);
    const DeviceCopy in_weights(device_, in.weights);
    const DeviceCopy source_weights(device_, in.source_weights);
    const DeviceCopy out_x(device_, actual_x.view());
    const DeviceCopy out_weights(device_, actual_weights.view());
    exchange_.combine(
        *run.plan,
        {in_rows.tensor(), in_weights.tensor(), source_weights.tensor(), in.scale},
        {out_x.tensor(), out_weights.tensor()},
        call()
    );
    out_x.read_back(actual_x.view());
    out_weights.read_back(actual_weights.view());
    const auto row_text = [&](int64_t token) {
      return fmt::format("rank {}, token {}", rank_, token);
    };
    note(first_difference("combine x", actual_x.view(), x[rank_].view(), row_text));
    note(first_difference("combine weights", actual_weights.view(), weights[rank_].view(), row_text)
    );
  }

  const CheckCase& case_;
  size_t rank_;
  std::vector<int> domain_of_;
  Device device_;
  Exchange& exchange_;
  std::optional<std::string> failure_;
};

ExchangeConfig config_of(
    const CheckCase& check_case, const CheckSettings& settings, const Device& device
) {
  const Workload& workload = check_case.workload;
  return {
      .hidden = workload.hidden,
      .max_tokens = std::max<int64_t>(1, std::ranges::max(workload.num_tokens)),
      .num_experts = workload.routing.num_experts,
      .max_topk = workload.routing.topk,
      .device = device,
      .transport = settings.transport,
      .num_threads = settings.num_threads,
      .mover = check_case.mover,
      .copy_engines = check_case.copy_engines,
      .timeout = kTimeout};
}

// Returns whether two configurations of one run are the same.
bool is_same(const ExchangeConfig& a, const ExchangeConfig& b) {
  const auto varied = [](const ExchangeConfig& config) {
    return std::tie(
        config.hidden,
        config.max_tokens,
        config.num_experts,
        config.max_topk,
        config.mover,
        config.copy_engines
    );
  };
  return varied(a) == varied(b);
}

}  // namespace

std::optional<std::string> run_case(
    const Group& group,
    const CheckCase& check_case,
    const CheckSettings& settings,
    std::optional<SharedExchange>& shared
) {
  const auto wanted = config_of(check_case, settings, settings.device.device(group.rank()));
  if (!shared || !is_same(shared->wanted, wanted)) {
    shared.reset();
    shared.emplace(SharedExchange{wanted, Exchange(group, wanted)});
  }
  return CaseRun(group, check_case, shared->exchange).run();
}

}  // namespace weft::program
