// SPDX-License-Identifier: Apache-2.0
// Checks of what a caller of plan() passes: its options and its routing, which is brought into one
// form.
#include <algorithm>
#include <cstring>
#include <limits>

#include "plan/build.hpp"

namespace weft {
namespace {

// Slots, and indices of routes, are int32 throughout a plan.
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// Calls check(); errors become NoRoom if an exchange can pass it.
void check_room(bool can_be, const auto& check) {
  try {
    check();
  } catch (const Error& error) {
    if (can_be) {
      throw NoRoom(error);
    }
    throw;
  }
}

}  // namespace

void check_options(const PlanOptions& options, const Context& context) {
  const auto require =
      [&](bool is_good, std::string_view name, int64_t value, std::string_view problem) {
        WEFT_CHECK_ARG(context, is_good, "plan: {} = {} {}", name, value, problem);
      };
  const auto check_range = [&](std::string_view name, int64_t value, int64_t low) {
    if (value < low || value > kMaxInt32) {
      require(false, name, value, fmt::format("is out of range ({} to {})", low, kMaxInt32));
    }
  };
  const int64_t budget = options.row_budget.value_or(0);
  const auto overflow = static_cast<int64_t>(options.overflow);
  const auto layout = static_cast<int64_t>(options.layout);
  check_range("pad_multiple", options.pad_multiple, 1);
  check_range("expert_stride", options.expert_stride, 0);
  check_range("row_budget", budget, 0);
  require(options.overflow <= Overflow::kError, "overflow", overflow, "is unknown (0 or 1)");
  require(options.layout <= Layout::kExpertStrided, "layout", layout, "is unknown (0 to 2)");
  require(
      options.order <= SumOrder::kTopk,
      "order",
      static_cast<int64_t>(options.order),
      "is unknown (0 or 1)"
  );
  WEFT_CHECK_ARG(
      context,
      options.layout != Layout::kRankMajor || options.order == SumOrder::kRank,
      "plan: order = {} (must be rank with rank_major, whose rows are sums of a rank's experts)",
      order_name(options.order)
  );
  require(
      options.layout != Layout::kRankMajor || options.pad_multiple == 1,
      "pad_multiple",
      options.pad_multiple,
      "(must be 1 with rank_major, whose rows have no expert blocks)"
  );
  if (options.layout == Layout::kExpertStrided) {
    const std::string_view problem = "with expert_strided (its budget is expert_stride)";
    require(!options.row_budget, "row_budget", budget, problem);
  } else if (options.expert_stride != 0) {
    const std::string_view name = layout_name(options.layout);
    const std::string problem = fmt::format("with {} (only expert_strided has a stride)", name);
    require(false, "expert_stride", options.expert_stride, problem);
  }
}

void check_options_between_gpus(const PlanOptions& options, const Context& context) {
  WEFT_CHECK(
      context,
      options.balance.replicas == 0,
      ErrorCode::kUnsupported,
      "plan: balance with {} replicas among GPUs of several hosts (balance needs one host, or "
      "tensors of the CPU)",
      options.balance.replicas
  );
  WEFT_CHECK(
      context,
      options.order == SumOrder::kRank,
      ErrorCode::kUnsupported,
      "plan: order = {} among GPUs of several hosts (order topk needs one host, or tensors of the "
      "CPU)",
      order_name(options.order)
  );
}

std::optional<int64_t> given_rows(const PlanOptions& options, int num_local_experts) {
  if (options.overflow == Overflow::kError) {
    return std::nullopt;
  }
  if (options.layout == Layout::kExpertStrided) {
    return options.expert_stride > 0 ? std::optional(options.expert_stride * num_local_experts)
                                     : std::nullopt;
  }
  return options.row_budget;
}

// --- tensors ---

std::string device_text(const Device& device) {
  return device.kind == Device::Kind::kCpu ? "cpu" : fmt::format("cuda {}", device.index);
}

void TensorCheck::operator()(
    std::string_view name,
    const ConstTensor& tensor,
    std::initializer_list<DType> dtypes,
    TensorShape wanted
) const {
  const auto require = [&](bool is_good, const auto& problem) {
    WEFT_CHECK_ARG(context, is_good, "{}: {} {}", verb, name, problem());
  };
  const TensorShape shape = {tensor.rows, tensor.cols};
  require(tensor.is_given(), [] { return "is missing"; });
  require(tensor.device == device, [&] {
    return fmt::format(
        "is on {} (the exchange is on {})", device_text(tensor.device), device_text(device)
    );
  });
  require(std::ranges::find(dtypes, tensor.dtype) != dtypes.end(), [&] {
    std::vector<std::string_view> names;
    std::ranges::transform(dtypes, std::back_inserter(names), dtype_name);
    const std::string_view own = dtype_name(tensor.dtype);
    return fmt::format("has dtype {} (expected {})", own, fmt::join(names, " or "));
  });
  require(tensor.rows >= 0 && tensor.cols >= 0, [&] {
    return fmt::format("has shape {} (sizes cannot be negative)", shape.text());
  });
  require(wanted.rows < 0 || wanted == shape, [&] {
    return fmt::format("has shape {} (expected {})", shape.text(), wanted.text());
  });
  require(tensor.is_contiguous(), [&] {
    return fmt::format(
        "has row stride {} (expected {}: rows must be adjacent)", tensor.row_stride, tensor.cols
    );
  });
  require(tensor.data != nullptr || tensor.num_bytes() == 0, [&] {
    return fmt::format("has a null pointer (shape {})", shape.text());
  });
}

// --- routing ---

namespace {

// Calls visit(place, expert or -1) for each index; refuses others, unless they are ignored.
template <class Index, class Visit>
void for_each_index_of(
    const ConstTensor& indices,
    bool ignores_unknown,
    int num_experts,
    const Context& context,
    const Visit& visit
) {
  for (int64_t i = 0; i < indices.rows * indices.cols; ++i) {
    Index value;
    std::memcpy(&value, indices.data + i * static_cast<int64_t>(sizeof(Index)), sizeof(Index));
    const bool is_route = value >= 0 && value < num_experts;
    WEFT_CHECK_ARG(
        context,
        is_route || value == -1 || ignores_unknown,
        "plan: topk_idx[{}, {}] = {} is out of range (num_experts = {}, -1 = no route)",
        i / indices.cols,
        i % indices.cols,
        value,
        num_experts
    );
    visit(static_cast<size_t>(i), is_route ? static_cast<int32_t>(value) : -1);
  }
}

template <class Visit>
void for_each_index(
    const ConstTensor& indices,
    bool ignores_unknown,
    int num_experts,
    const Context& context,
    const Visit& visit
) {
  if (indices.dtype == DType::kInt64) {
    for_each_index_of<int64_t>(indices, ignores_unknown, num_experts, context, visit);
  } else {
    for_each_index_of<int32_t>(indices, ignores_unknown, num_experts, context, visit);
  }
}

void read_topk(
    const Routing& routing, const ExchangeConfig& limits, const Context& c, RouteTable& table
) {
  table.topk = static_cast<int>(routing.topk_idx.cols);
  table.expert.resize(static_cast<size_t>(table.num_tokens) * static_cast<size_t>(table.topk));
  const auto keep = [&](size_t place, int32_t expert) { table.expert[place] = expert; };
  for_each_index(routing.topk_idx, routing.ignores_unknown, limits.num_experts, c, keep);
  if (table.has_weights && !table.expert.empty()) {
    table.weight.resize(table.expert.size());
    std::memcpy(table.weight.data(), routing.weights.data, table.weight.size() * sizeof(float));
  }
}

// Finds set experts of a map row, ascending. Skips eight zero bytes at once: maps are sparse.
// Returns how many there are, of which at most `room` are written.
int64_t read_map_row(const std::byte* row, int num_experts, int32_t* out, int room) {
  int64_t found = 0;
  const auto visit = [&](int expert) {
    if (row[expert] != std::byte{0}) {
      if (found < room) {
        out[found] = expert;
      }
      ++found;
    }
  };
  int first = 0;
  for (; first + 8 <= num_experts; first += 8) {
    uint64_t eight;
    std::memcpy(&eight, row + first, sizeof(eight));
    for (int e = first; eight != 0 && e < first + 8; ++e) {
      visit(e);
    }
  }
  for (; first < num_experts; ++first) {
    visit(first);
  }
  return found;
}

void read_map(
    const Routing& routing, const ExchangeConfig& limits, const Context& c, RouteTable& table
) {
  if (routing.map_indices.is_given()) {
    for_each_index(routing.map_indices, false, limits.num_experts, c, [](size_t, int32_t) {});
  }
  table.topk = limits.max_topk;
  table.from_map = true;
  const auto topk = static_cast<size_t>(table.topk);
  const auto num_experts = static_cast<size_t>(limits.num_experts);
  const size_t num_routes = static_cast<size_t>(table.num_tokens) * topk;
  table.expert.assign(num_routes, -1);
  table.weight.assign(table.has_weights ? num_routes : 0, 0.0F);
  for (size_t t = 0; t < static_cast<size_t>(table.num_tokens); ++t) {
    int32_t* experts = table.expert.data() + t * topk;
    const std::byte* row = routing.map.data + t * num_experts;
    const int64_t found = read_map_row(row, limits.num_experts, experts, table.topk);
    check_room(found <= kMaxTopk, [&] {
      WEFT_CHECK_ARG(
          c,
          found <= limits.max_topk,
          "plan: map[{}] names {} experts (max_topk = {})",
          t,
          found,
          limits.max_topk
      );
    });
    for (size_t k = 0; table.has_weights && k < static_cast<size_t>(found); ++k) {
      const size_t place = t * num_experts + static_cast<size_t>(experts[k]);
      std::memcpy(
          &table.weight[t * topk + k], routing.weights.data + place * sizeof(float), sizeof(float)
      );
    }
  }
}

}  // namespace

RoutingShape check_routing(
    const Routing& routing, const ExchangeConfig& config, const Context& context
) {
  ExchangeConfig limits = config;
  limits.max_tokens = std::min(limits.max_tokens, kMaxInt32 / limits.max_topk);
  const bool is_topk = routing.topk_idx.is_given();
  const bool is_map = routing.map.is_given();
  WEFT_CHECK_ARG(
      context,
      is_topk != is_map,
      "plan: {} (exactly one is needed)",
      is_topk ? "topk_idx and map are both given" : "neither topk_idx nor map is given"
  );
  const TensorCheck check = {"plan", context, limits.device};
  if (is_topk) {
    check("topk_idx", routing.topk_idx, {DType::kInt64, DType::kInt32});
    const int64_t topk = routing.topk_idx.cols;
    check_room(topk >= 1 && topk <= kMaxTopk, [&] {
      WEFT_CHECK_ARG(
          context,
          topk >= 1 && topk <= limits.max_topk,
          "plan: topk_idx has {} columns (1 to max_topk = {})",
          topk,
          limits.max_topk
      );
    });
  } else {
    check("map", routing.map, {DType::kBool}, {routing.map.rows, limits.num_experts});
    if (const ConstTensor& indices = routing.map_indices; indices.is_given()) {
      const TensorShape shape = {routing.map.rows, indices.cols};
      check("map_indices", indices, {DType::kInt64, DType::kInt32}, shape);
    }
  }
  const ConstTensor& matrix = is_topk ? routing.topk_idx : routing.map;
  check_room(matrix.rows <= kMaxInt32 / limits.max_topk, [&] {
    WEFT_CHECK_ARG(
        context,
        matrix.rows <= limits.max_tokens,
        "plan: {} tokens are too many (max_tokens = {})",
        matrix.rows,
        limits.max_tokens
    );
  });
  if (routing.weights.is_given()) {
    check("weights", routing.weights, {DType::kFloat32}, {matrix.rows, matrix.cols});
  }
  return {matrix.rows, is_topk ? static_cast<int>(matrix.cols) : config.max_topk, is_map};
}

RouteTable read_routing(
    const Routing& routing,
    int num_experts,
    int max_topk,
    int64_t max_tokens,
    const Context& context
) {
  const ExchangeConfig limits = {
      .max_tokens = max_tokens, .num_experts = num_experts, .max_topk = max_topk};
  const RoutingShape shape = check_routing(routing, limits, context);
  RouteTable table;
  table.num_tokens = shape.num_tokens;
  table.has_weights = routing.weights.is_given();
  if (shape.from_map) {
    read_map(routing, limits, context, table);
  } else {
    read_topk(routing, limits, context, table);
  }
  return table;
}

}  // namespace weft
