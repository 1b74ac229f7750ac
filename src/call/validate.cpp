// SPDX-License-Identifier: Apache-2.0
#include "call/validate.hpp"

#include <array>
#include <limits>
#include <string_view>

#include "call/nvfp4.hpp"
#include "call/payload.hpp"
#include "call/quantise.hpp"
#include "call/scale_layout.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"
#include "plan/build.hpp"

namespace weft {
namespace {

constexpr int64_t kRowAlignment = 16;             // bytes; vector loads of every executor
constexpr int kMaxThreads = 1024;                 // workers of a rank
constexpr int64_t kMaxTimeoutMs = 1'000'000'000;  // clocks overflow far above it

// One operation's checks: `op` is the verb of its messages.
class Checker {
 public:
  Checker(std::string_view op, const Validator& who)
      : tensor{op, who.context, who.config.device}, op_(op), who_(who) {}

  const TensorCheck tensor;

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

  void row_bytes(std::string_view name, const ConstTensor& rows) const {
    WEFT_CHECK_ARG(
        who_.context,
        rows.row_bytes() > 0 && rows.row_bytes() % kRowAlignment == 0,
        "{}: {} has rows of {} bytes (expected a positive multiple of {})",
        op_,
        name,
        rows.row_bytes(),
        kRowAlignment
    );
  }

  // Checks alignment, as kernels move so many bytes at a time.
  void aligned_on_gpu(
      std::string_view name, const ConstTensor& rows, int64_t alignment = kRowAlignment
  ) const {
    const auto address = reinterpret_cast<uintptr_t>(rows.data);
    WEFT_CHECK_ARG(
        who_.context,
        rows.device.kind == Device::Kind::kCpu || static_cast<int64_t>(address) % alignment == 0,
        "{}: {} begins at address {:#x} (expected a multiple of {})",
        op_,
        name,
        address,
        alignment
    );
  }

  // Checks that both are given or neither is; returns whether they are.
  [[nodiscard]] bool both(
      std::string_view name, const ConstTensor& output, const ConstTensor& input
  ) const {
    WEFT_CHECK_ARG(
        who_.context,
        output.is_given() == input.is_given(),
        "{0}: output {1} is {2} while input {1} is {3} (give both or neither)",
        op_,
        name,
        output.is_given() ? "given" : "missing",
        input.is_given() ? "given" : "missing"
    );
    return input.is_given();
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

TensorShape source_weights_shape(const PlanData& plan) {
  return {
      plan.shape.num_tokens,
      plan.shape.from_map ? plan.shape.num_chosen_experts() : plan.shape.topk};
}

TensorShape scales_shape(const PlanData& plan, const DispatchOutput& out, int64_t cols) {
  const int64_t stride = plan.shape.options.expert_stride;
  return {num_scale_rows(out.scale_layout, plan.num_rows, stride), cols};
}

TensorShape row_weights_shape(const PlanData& plan) {
  return {plan.num_rows, plan.shape.options.layout == Layout::kRankMajor ? plan.shape.topk : 1};
}

}  // namespace

void Validator::dispatch(const PlanData& plan, const DispatchInput& in, const DispatchOutput& out)
    const {
  const Checker check("dispatch", *this);
  check.plan(plan);
  const int64_t num_tokens = plan.shape.num_tokens;
  const int64_t cols = in.x.dtype == DType::kByte ? in.x.cols : config.hidden;
  check.tensor(
      "x",
      in.x,
      {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kByte},
      {num_tokens, cols}
  );
  check.row_bytes("x", in.x);
  const bool is_quantised = in.quantise != Quantise::kNone;
  if (is_quantised) {
    quantised(plan, in, out);
  }
  WEFT_CHECK_ARG(
      context,
      !in.global_scale.is_given() || in.quantise == Quantise::kNvfp4,
      "dispatch: global_scale is given (which NVFP4 alone has)"
  );
  const int64_t per_byte =
      is_quantised ? stored_format(in.quantise, in.scale_rule).elements_per_byte : 1;
  check.tensor(
      "rows", out.rows, {is_quantised ? DType::kByte : in.x.dtype}, {plan.num_rows, cols / per_byte}
  );
  check.apart("rows", out.rows, "x", in.x);
  if (check.both("weights", out.weights, in.weights)) {
    check.tensor("input weights", in.weights, {DType::kFloat32}, source_weights_shape(plan));
    check.tensor("output weights", out.weights, {DType::kFloat32}, row_weights_shape(plan));
  }
  if (!is_quantised && check.both("scales", out.scales, in.scales)) {
    const DType dtype = in.scales.dtype;
    check.tensor("input scales", in.scales, {dtype}, {num_tokens, in.scales.cols});
    check.tensor("output scales", out.scales, {dtype}, scales_shape(plan, out, in.scales.cols));
    check.apart("output scales", out.scales, "input scales", in.scales);
  }
  check.aligned_on_gpu("x", in.x);
  check.aligned_on_gpu("rows", out.rows);
  beside(plan, out);
}

void Validator::beside(const PlanData& plan, const DispatchOutput& out) const {
  const Checker check("dispatch", *this);
  const auto integers = [&](std::string_view name, const ConstTensor& given, TensorShape shape) {
    if (given.is_given()) {
      check.tensor(name, given, {DType::kInt32}, shape);
    }
  };
  integers("sources", out.sources, {plan.num_rows, 2});
  const Layout layout = plan.shape.options.layout;
  if (out.experts.is_given()) {
    WEFT_CHECK_ARG(
        context,
        layout == Layout::kRankMajor,
        "dispatch: experts of rows with {} (whose rows belong to one expert each)",
        layout_name(layout)
    );
    check.tensor("experts", out.experts, {DType::kInt64}, {plan.num_rows, plan.shape.topk});
  }
  WEFT_CHECK_ARG(
      context,
      layout != Layout::kRankMajor || !(out.counts.is_given() || out.count_sums.is_given()),
      "dispatch: counts of rows with rank_major (whose rows belong to no one expert)"
  );
  integers("counts", out.counts, {1, plan.shape.num_local_experts()});
  integers("count_sums", out.count_sums, {1, plan.shape.num_local_experts()});
  if (out.scale_layout == ScaleLayout::kByRow) {
    return;
  }
  WEFT_CHECK_ARG(
      context,
      layout == Layout::kExpertStrided && out.scales.row_bytes() % kScaleWord == 0,
      "dispatch: scales {}, of {} bytes a row with {} (expected a multiple of {} with {})",
      out.scale_layout == ScaleLayout::kInTiles ? "in tiles" : "by column",
      out.scales.row_bytes(),
      layout_name(layout),
      kScaleWord,
      layout_name(Layout::kExpertStrided)
  );
  check.aligned_on_gpu("output scales", out.scales, kScaleWord);
}

void Validator::quantised(const PlanData& plan, const DispatchInput& in, const DispatchOutput& out)
    const {
  const Checker check("dispatch", *this);
  WEFT_CHECK_ARG(
      context,
      in.quantise <= Quantise::kNvfp4,
      "dispatch: quantise = {} is unknown (0 to {})",
      static_cast<int>(in.quantise),
      static_cast<int>(Quantise::kNvfp4)
  );
  const StoredFormat format = stored_format(in.quantise, in.scale_rule);
  WEFT_CHECK_ARG(
      context,
      in.x.dtype == DType::kBFloat16 && config.hidden % format.row_multiple == 0,
      "dispatch: quantise of {} rows of {} elements (bfloat16 and a multiple of {})",
      dtype_name(in.x.dtype),
      config.hidden,
      format.row_multiple
  );
  WEFT_CHECK_ARG(
      context,
      !in.scales.is_given(),
      "dispatch: input scales are given beside quantise (which makes them)"
  );
  WEFT_CHECK_ARG(
      context,
      in.scale_rule <= ScaleRule::kUe8m0,
      "dispatch: scale_rule = {} is unknown (0 to 3)",
      static_cast<int>(in.scale_rule)
  );
  WEFT_CHECK_ARG(
      context,
      has_scale_rule(in.quantise, in.scale_rule),
      "dispatch: scale_rule = {} with {} (which has {})",
      static_cast<int>(in.scale_rule),
      in.quantise == Quantise::kMxfp8 ? "MXFP8" : "NVFP4",
      in.quantise == Quantise::kMxfp8 ? "exact alone" : "exact and ue8m0"
  );
  if (in.global_scale.is_given()) {
    check.tensor("global_scale", in.global_scale, {DType::kFloat32}, {1, 1});
    if (in.global_scale.device.kind == Device::Kind::kCpu) {
      const float scale = *reinterpret_cast<const float*>(in.global_scale.data);
      WEFT_CHECK_ARG(
          context,
          is_global_scale(scale),
          "dispatch: global_scale = {} (expected more than 0, and finite)",
          scale
      );
    }
  }
  const DType dtype = format.scale_bytes == 1 ? DType::kByte : DType::kFloat32;
  const TensorShape shape = scales_shape(plan, out, config.hidden / format.group);
  check.tensor("output scales", out.scales, {dtype}, shape);
}

void Validator::combine(const PlanData& plan, const CombineInput& in, const CombineOutput& out)
    const {
  const Checker check("combine", *this);
  check.plan(plan);
  check.tensor(
      "rows",
      in.rows,
      {DType::kBFloat16, DType::kFloat16, DType::kFloat32},
      {plan.num_rows, config.hidden}
  );
  check.row_bytes("rows", in.rows);
  const bool is_coded = codes_output(in, out);
  const int64_t cols = is_coded ? wire_row_bytes(in.wire, config.hidden) : config.hidden;
  const DType dtype = is_coded ? DType::kByte : in.rows.dtype;
  check.tensor("x", out.x, {dtype}, {plan.shape.num_tokens, cols});
  check.apart("x", out.x, "rows", in.rows);
  if (check.both("weights", out.weights, in.weights)) {
    check.tensor("input weights", in.weights, {DType::kFloat32}, row_weights_shape(plan));
    check.tensor("output weights", out.weights, {DType::kFloat32}, source_weights_shape(plan));
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
    check.tensor(
        "source_weights", in.source_weights, {DType::kFloat32}, source_weights_shape(plan)
    );
  }
  if (in.source_idx.is_given()) {
    WEFT_CHECK_ARG(
        context,
        needs_weights && !plan.shape.from_map,
        "combine: source_idx is given ({})",
        needs_weights ? "the routing was a map" : "scale does not use it"
    );
    const TensorShape shape = source_weights_shape(plan);
    check.tensor("source_idx", in.source_idx, {DType::kInt64, DType::kInt32}, shape);
  }
  if (in.ready.marks.is_given()) {
    marks(plan, in.ready);
  }
  wire(plan, in);
  check.aligned_on_gpu("rows", in.rows);
  check.aligned_on_gpu("x", out.x);
}

void Validator::marks(const PlanData& plan, const RowMarks& ready) const {
  const Checker check("combine", *this);
  const Layout layout = plan.shape.options.layout;
  WEFT_CHECK_ARG(
      context,
      layout == Layout::kExpertStrided,
      "combine: marks of rows with {} (expected {}, whose blocks are of one size)",
      layout_name(layout),
      layout_name(Layout::kExpertStrided)
  );
  WEFT_CHECK_ARG(
      context, ready.block_rows >= 0, "combine: marks of {} rows (at least 0)", ready.block_rows
  );
  const int64_t experts = plan.shape.num_local_experts();
  const int64_t blocks = ready.num_blocks(plan.num_rows / experts);
  check.tensor("marks", ready.marks, {DType::kInt32}, {1, experts * blocks});
}

void Validator::wire(const PlanData& plan, const CombineInput& in) const {
  WEFT_CHECK_ARG(
      context,
      in.wire <= Wire::kLogFmt10,
      "combine: wire = {} is unknown (0 to 2)",
      static_cast<int>(in.wire)
  );
  if (in.wire == Wire::kNone) {
    return;
  }
  WEFT_CHECK_ARG(
      context,
      in.rows.dtype == DType::kBFloat16 && config.hidden % kQuantiseGroup == 0,
      "combine: wire of {} rows of {} elements (bfloat16 and a multiple of {})",
      dtype_name(in.rows.dtype),
      config.hidden,
      kQuantiseGroup
  );
  WEFT_CHECK_ARG(
      context,
      plan.shape.options.order == SumOrder::kRank,
      "combine: wire with a plan of order {} (expected {}, where sums travel)",
      order_name(plan.shape.options.order),
      order_name(SumOrder::kRank)
  );
}

void validate_config(const ExchangeConfig& config, const Context& context) {
  const auto check = [&](std::string_view name, int64_t value, int64_t low, int64_t high) {
    WEFT_CHECK_ARG(
        context,
        value >= low && value <= high,
        "exchange: {} = {} (expected {} to {})",
        name,
        value,
        low,
        high
    );
  };
  constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  check("hidden", config.hidden, 1, kMaxInt32);
  check("max_tokens", config.max_tokens, 0, (1 << 30) - 1);
  check("num_experts", config.num_experts, 1, kMaxInt32);
  WEFT_CHECK_ARG(
      context,
      config.num_experts % context.num_ranks == 0,
      "exchange: num_experts = {} (expected a multiple of num_ranks = {})",
      config.num_experts,
      context.num_ranks
  );
  check("max_topk", config.max_topk, 1, kMaxTopk);
  check("num_threads", config.num_threads, 0, kMaxThreads);
  check("timeout", config.timeout.count(), 1, kMaxTimeoutMs);
  check("num_sms", config.num_sms, 0, kMaxInt32);
  check("device.index", config.device.index, 0, kMaxInt32);
}

void check_masked(std::span<const int> ranks, const Context& context) {
  for (const int rank : ranks) {
    WEFT_CHECK_ARG(
        context,
        rank >= 0 && rank < context.num_ranks && rank != context.rank,
        "mask: rank {} (expected others of the {} ranks)",
        rank,
        context.num_ranks
    );
  }
}

void refuse_to_grow(const ExchangeConfig& config, const Context& context) {
  WEFT_RAISE(
      context,
      ErrorCode::kUnsupported,
      "grow: an exchange on GPUs that goes on without lost ranks keeps its size (max_tokens = {}, "
      "max_topk = {})",
      config.max_tokens,
      config.max_topk
  );
}

void agree_on_config(
    const Group& group, const ExchangeConfig& config, const std::function<void()>& more_checks
) {
  agree(group, [&] {
    validate_config(config, {.num_ranks = group.num_ranks()});
    if (more_checks) {
      more_checks();
    }
  });
  static constexpr std::array<std::string_view, 7> kNames = {
      "hidden",
      "max_tokens",
      "num_experts",
      "max_topk",
      "device is a GPU",
      "copy_engines",
      "on_peer_loss"};
  using Fields = std::array<int64_t, kNames.size()>;
  const Fields own = {
      config.hidden,
      config.max_tokens,
      config.num_experts,
      config.max_topk,
      config.device.kind == Device::Kind::kCuda,
      config.copy_engines,
      static_cast<int64_t>(config.on_peer_loss)};
  const std::vector<Bytes> blocks = group.all_gather(std::as_bytes(std::span(own)));
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    const auto theirs = block_value<Fields>(blocks[rank], rank, context_of(group));
    for (size_t i = 0; i < own.size(); ++i) {
      WEFT_CHECK_ARG(
          context_of(group),
          own[i] == theirs[i],
          "exchange: {} = {} here and {} on rank {} (must be equal on all ranks)",
          kNames[i],
          own[i],
          theirs[i],
          rank
      );
    }
  }
}

}  // namespace weft
