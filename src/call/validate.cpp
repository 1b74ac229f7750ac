// SPDX-License-Identifier: Apache-2.0
#include "call/validate.hpp"

#include <string_view>

#include "call/payload.hpp"

namespace weft {
namespace {

constexpr int64_t kRowAlignment = 16;             // bytes; vector loads of every executor
constexpr int kMaxThreads = 1024;                 // workers of a rank
constexpr int64_t kMaxTimeoutMs = 1'000'000'000;  // clocks overflow far above it

bool is_float(DType dtype) {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat32;
}

std::string device_text(const Device& device) {
  return device.kind == Device::Kind::kCpu ? "cpu" : fmt::format("cuda {}", device.index);
}

struct Shape {
  int64_t rows;
  int64_t cols;
};

// One operation's checks: `op` is the verb of its messages.
class Checker {
 public:
  Checker(std::string_view op, const Validator& who) : op_(op), who_(who) {}

  void plan(const PlanData& plan) const {
    WEFT_CHECK_ARG(
        who_.context,
        plan.exchange_id == who_.exchange_id,
        "{}: plan belongs to {} (expected one that this exchange made)",
        op_,
        plan.exchange_id == 0 ? "no exchange: it was loaded from a file or built alone"
                              : "another exchange"
    );
  }

  // Present, on the CPU, contiguous, of this shape and dtype.
  void tensor(std::string_view name, const ConstTensor& tensor, Shape shape, DType dtype) const {
    WEFT_CHECK_ARG(who_.context, tensor.is_given(), "{}: {} is missing", op_, name);
    WEFT_CHECK(
        who_.context,
        tensor.device == who_.config.device,
        ErrorCode::kInvalidArgument,
        "{}: {} is on {} (the exchange is on {})",
        op_,
        name,
        device_text(tensor.device),
        device_text(who_.config.device)
    );
    WEFT_CHECK_ARG(
        who_.context,
        tensor.dtype == dtype,
        "{}: {} has dtype {} (expected {})",
        op_,
        name,
        dtype_name(tensor.dtype),
        dtype_name(dtype)
    );
    WEFT_CHECK_ARG(
        who_.context,
        tensor.rows == shape.rows && tensor.cols == shape.cols && tensor.cols >= 0,
        "{}: {} has shape [{}, {}] (expected [{}, {}])",
        op_,
        name,
        tensor.rows,
        tensor.cols,
        shape.rows,
        shape.cols
    );
    WEFT_CHECK_ARG(
        who_.context,
        tensor.is_contiguous(),
        "{}: {} has row stride {} (expected {}: rows must be adjacent)",
        op_,
        name,
        tensor.row_stride,
        tensor.cols
    );
    WEFT_CHECK_ARG(
        who_.context,
        tensor.data != nullptr || tensor.num_bytes() == 0,
        "{}: {} has a null pointer (shape [{}, {}])",
        op_,
        name,
        tensor.rows,
        tensor.cols
    );
  }

  void row_bytes(std::string_view name, const ConstTensor& tensor) const {
    WEFT_CHECK_ARG(
        who_.context,
        tensor.row_bytes() > 0 && tensor.row_bytes() % kRowAlignment == 0,
        "{}: {} has rows of {} bytes (expected a positive multiple of {})",
        op_,
        name,
        tensor.row_bytes(),
        kRowAlignment
    );
  }

  // Kernels load and store so many bytes at a time.
  void aligned_on_gpu(std::string_view name, const ConstTensor& tensor) const {
    const auto address = reinterpret_cast<uintptr_t>(tensor.data);
    WEFT_CHECK_ARG(
        who_.context,
        tensor.device.kind == Device::Kind::kCpu || address % kRowAlignment == 0,
        "{}: {} begins at address {:#x} (expected a multiple of {})",
        op_,
        name,
        address,
        kRowAlignment
    );
  }

  // An output beside an input that is given, and none beside one that is not.
  void both(std::string_view output, bool has_output, std::string_view input, bool has_input)
      const {
    WEFT_CHECK_ARG(
        who_.context,
        has_output == has_input,
        "{}: {} is {} while {} is {} (give both or neither)",
        op_,
        output,
        has_output ? "given" : "missing",
        input,
        has_input ? "given" : "missing"
    );
  }

  void apart(
      std::string_view name_a, const ConstTensor& a, std::string_view name_b, const ConstTensor& b
  ) const {
    const bool is_apart = a.num_bytes() == 0 || b.num_bytes() == 0 ||
                          a.data + a.num_bytes() <= b.data || b.data + b.num_bytes() <= a.data;
    WEFT_CHECK_ARG(who_.context, is_apart, "{}: {} overlaps {}", op_, name_a, name_b);
  }

 private:
  std::string_view op_;
  const Validator& who_;
};

Shape source_weights_shape(const PlanData& plan) {
  return {plan.shape.num_tokens, plan.shape.from_map ? plan.shape.num_experts : plan.shape.topk};
}

Shape row_weights_shape(const PlanData& plan) {
  return {plan.num_rows, plan.shape.options.layout == Layout::kRankMajor ? plan.shape.topk : 1};
}

}  // namespace

void Validator::dispatch(const PlanData& plan, const DispatchInput& in, const DispatchOutput& out)
    const {
  const Checker check("dispatch", *this);
  check.plan(plan);
  const int64_t num_tokens = plan.shape.num_tokens;
  WEFT_CHECK_ARG(
      context,
      is_float(in.x.dtype) || in.x.dtype == DType::kByte,
      "dispatch: x has dtype {} (expected bfloat16, float16, float32 or byte)",
      dtype_name(in.x.dtype)
  );
  const int64_t cols = in.x.dtype == DType::kByte ? in.x.cols : config.hidden;
  check.tensor("x", in.x, {num_tokens, cols}, in.x.dtype);
  check.row_bytes("x", in.x);
  if (in.quantise != Quantise::kNone) {
    quantised(plan, in, out);
  }
  const DType row_dtype = in.quantise == Quantise::kNone ? in.x.dtype : DType::kByte;
  check.tensor("rows", out.rows, {plan.num_rows, cols}, row_dtype);
  check.apart("rows", out.rows, "x", in.x);
  check.both("output weights", out.weights.is_given(), "input weights", in.weights.is_given());
  if (in.weights.is_given()) {
    check.tensor("input weights", in.weights, source_weights_shape(plan), DType::kFloat32);
    check.tensor("output weights", out.weights, row_weights_shape(plan), DType::kFloat32);
  }
  if (in.quantise == Quantise::kNone) {
    check.both("output scales", out.scales.is_given(), "input scales", in.scales.is_given());
  }
  if (in.scales.is_given()) {
    check.tensor("input scales", in.scales, {num_tokens, in.scales.cols}, in.scales.dtype);
    check.tensor("output scales", out.scales, {plan.num_rows, in.scales.cols}, in.scales.dtype);
    check.apart("output scales", out.scales, "input scales", in.scales);
  }
  check.aligned_on_gpu("x", in.x);
  check.aligned_on_gpu("rows", out.rows);
}

void Validator::quantised(const PlanData& plan, const DispatchInput& in, const DispatchOutput& out)
    const {
  const Checker check("dispatch", *this);
  WEFT_CHECK(
      context,
      config.device.kind == Device::Kind::kCuda,
      ErrorCode::kUnsupported,
      "dispatch: quantise is asked for on {} (GPUs do that)",
      device_text(config.device)
  );
  WEFT_CHECK_ARG(
      context,
      in.x.dtype == DType::kBFloat16 && config.hidden % kQuantiseGroup == 0,
      "dispatch: quantise of {} rows of {} elements (bfloat16 and a multiple of {})",
      dtype_name(in.x.dtype),
      config.hidden,
      kQuantiseGroup
  );
  WEFT_CHECK_ARG(
      context,
      !in.scales.is_given(),
      "dispatch: input scales are given beside quantise (which makes them)"
  );
  const Shape shape = {plan.num_rows, config.hidden / kQuantiseGroup};
  check.tensor("output scales", out.scales, shape, DType::kFloat32);
}

void Validator::combine(const PlanData& plan, const CombineInput& in, const CombineOutput& out)
    const {
  const Checker check("combine", *this);
  check.plan(plan);
  WEFT_CHECK_ARG(
      context,
      is_float(in.rows.dtype),
      "combine: rows has dtype {} (expected bfloat16, float16 or float32)",
      dtype_name(in.rows.dtype)
  );
  check.tensor("rows", in.rows, {plan.num_rows, config.hidden}, in.rows.dtype);
  check.row_bytes("rows", in.rows);
  check.tensor("x", out.x, {plan.shape.num_tokens, config.hidden}, in.rows.dtype);
  check.apart("x", out.x, "rows", in.rows);
  check.both("output weights", out.weights.is_given(), "input weights", in.weights.is_given());
  if (in.weights.is_given()) {
    check.tensor("input weights", in.weights, row_weights_shape(plan), DType::kFloat32);
    check.tensor("output weights", out.weights, source_weights_shape(plan), DType::kFloat32);
  }
  WEFT_CHECK_ARG(
      context,
      in.scale == CombineScale::kNone || plan.shape.options.layout != Layout::kRankMajor,
      "combine: rows cannot be scaled in layout rank_major (a row belongs to several routes)"
  );
  WEFT_CHECK_ARG(
      context,
      in.scale != CombineScale::kPlanWeights || plan.shape.has_weights,
      "combine: scale asks for the plan's weights (the plan's routing had none)"
  );
  const bool needs_weights = in.scale == CombineScale::kSourceWeights;
  WEFT_CHECK_ARG(
      context,
      in.source_weights.is_given() == needs_weights,
      "combine: source_weights is {} (scale {} it)",
      needs_weights ? "missing" : "given",
      needs_weights ? "needs" : "does not use"
  );
  if (needs_weights) {
    check.tensor("source_weights", in.source_weights, source_weights_shape(plan), DType::kFloat32);
  }
  check.aligned_on_gpu("rows", in.rows);
  check.aligned_on_gpu("x", out.x);
}

void validate_config(const ExchangeConfig& config, const Context& context) {
  const auto require =
      [&](bool is_good, std::string_view name, int64_t value, const std::string& want) {
        WEFT_CHECK_ARG(context, is_good, "exchange: {} = {} (expected {})", name, value, want);
      };
  require(config.hidden >= 1, "hidden", config.hidden, "at least 1");
  require(config.hidden < int64_t{1} << 31, "hidden", config.hidden, "below 2^31");
  require(config.max_tokens >= 0, "max_tokens", config.max_tokens, "at least 0");
  require(config.max_tokens < 1 << 30, "max_tokens", config.max_tokens, "below 2^30");
  require(config.num_experts >= 1, "num_experts", config.num_experts, "at least 1");
  require(
      config.num_experts % context.num_ranks == 0,
      "num_experts",
      config.num_experts,
      fmt::format("a multiple of num_ranks = {}", context.num_ranks)
  );
  require(
      config.max_topk >= 1 && config.max_topk <= kMaxTopk,
      "max_topk",
      config.max_topk,
      fmt::format("1 to {}", kMaxTopk)
  );
  require(
      config.num_threads >= 0 && config.num_threads <= kMaxThreads,
      "num_threads",
      config.num_threads,
      fmt::format("0 to {}", kMaxThreads)
  );
  const int64_t timeout = config.timeout.count();
  require(timeout > 0 && timeout <= kMaxTimeoutMs, "timeout", timeout, "1 to 10^9 ms");
  require(config.num_sms >= 0, "num_sms", config.num_sms, "at least 0");
  require(config.device.index >= 0, "device.index", config.device.index, "at least 0");
}

}  // namespace weft
