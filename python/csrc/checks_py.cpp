// SPDX-License-Identifier: Apache-2.0
// Checks made in every call of weft/compat: rules about routing and about blocks of low-latency
// calls. weft/compat/deep_ep/checks.py has the other rules, and the messages for tensors.
#include "checks_py.hpp"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <optional>
#include <span>
#include <string>

#include "call/quantise.hpp"
#include "weft/calls.hpp"
#include "weft/plan.hpp"
#include "weft/routing.hpp"

namespace weft::py {
namespace {

struct Python {
  nb::object bad_call = nb::module_::import_("weft.errors").attr("BadCall");
  nb::object checks = nb::module_::import_("weft.compat.deep_ep.checks");
  nb::object torch = nb::module_::import_("torch");
};

void check(bool is_good, const auto& problem) {
  if (!is_good) {
    PyErr_SetString(looked_up<Python>().bad_call.ptr(), std::string(problem()).c_str());
    throw nb::python_error();
  }
}

std::string text_of(int64_t number) {
  return std::to_string(number);
}

// Returns the truth of a value, like Python's `if`.
bool is_true(nb::handle value) {
  const int found = PyObject_IsTrue(value.ptr());
  if (found < 0) {
    throw nb::python_error();
  }
  return found == 1;
}

// One or two types of tensors: bits for suits(), and their names in torch.
struct Kinds {
  uint64_t bits;
  const char* first;
  const char* second = nullptr;

  [[nodiscard]] nb::tuple dtypes() const {
    const nb::object& torch = looked_up<Python>().torch;
    if (second == nullptr) {
      return nb::make_tuple(torch.attr(first));
    }
    return nb::make_tuple(torch.attr(first), torch.attr(second));
  }
};

constexpr Kinds kBFloat16 = {bit(ScalarType::kBFloat16), "bfloat16"};
constexpr Kinds kFloat32 = {bit(ScalarType::kFloat32), "float32"};
constexpr Kinds kInt32 = {bit(ScalarType::kInt32), "int32"};
constexpr Kinds kInt64 = {bit(ScalarType::kInt64), "int64"};
constexpr Kinds kBool = {bit(ScalarType::kBool), "bool"};
constexpr Kinds kIntegers = {kInt64.bits | kInt32.bits, "int64", "int32"};

// Size of one dimension: a number, or a name for any.
struct Size {
  int64_t number = -1;
  const char* name = nullptr;

  Size(int64_t wanted) : number(wanted) {}    // NOLINT: a shape reads as in Python
  Size(const char* called) : name(called) {}  // NOLINT

  [[nodiscard]] nb::object object() const {
    return name == nullptr ? nb::object(nb::int_(number)) : nb::object(nb::str(name));
  }
};

void check_tensor(
    const char* what, nb::handle tensor, const Kinds& kinds, std::initializer_list<Size> shape
) {
  constexpr size_t kMostDims = 3;
  std::array<int64_t, kMostDims> sizes{};
  std::ranges::transform(shape, sizes.begin(), &Size::number);
  if (suits(tensor, kinds.bits, std::span<const int64_t>(sizes.data(), shape.size()))) {
    return;
  }
  nb::list wanted;
  for (const Size& size : shape) {
    wanted.append(size.object());
  }
  looked_up<Python>().checks.attr("check_tensor")(what, tensor, kinds.dtypes(), wanted);
}

void check_optional(
    const char* what, nb::handle tensor, const Kinds& kinds, std::initializer_list<Size> shape
) {
  if (!tensor.is_none()) {
    check_tensor(what, tensor, kinds, shape);
  }
}

// Checks; gives K.
int64_t check_routing(nb::handle topk_idx, nb::handle topk_weights, const Size& num_tokens) {
  check_tensor("topk_idx", topk_idx, kIntegers, {num_tokens, "K"});
  const int64_t topk = size_of(topk_idx, 1);
  check(topk >= 1 && topk <= kMaxTopk, [&] {
    return "topk_idx has " + text_of(topk) + " columns (expected K <= " + text_of(kMaxTopk) + ")";
  });
  check_optional("topk_weights", topk_weights, kFloat32, {size_of(topk_idx, 0), topk});
  return topk;
}

}  // namespace

void check_experts(int64_t num_experts, int64_t num_ranks) {
  check(num_experts > 0 && num_experts % num_ranks == 0, [&] {
    return "num_experts = " + text_of(num_experts) + " (expected a positive multiple of " +
           text_of(num_ranks) + " ranks)";
  });
}

int64_t check_layout(
    const nb::tuple& layout, int64_t num_tokens, int64_t num_ranks, int64_t num_hosts
) {
  // Nothing else tells the number of experts.
  check_tensor("num_tokens_per_expert", layout[2], kInt32, {"E"});
  const int64_t num_experts = size_of(layout[2], 0);
  check_experts(num_experts, num_ranks);
  check_tensor("num_tokens_per_rank", layout[0], kInt32, {num_ranks});
  check_tensor("is_token_in_rank", layout[3], kBool, {num_tokens, num_ranks});
  if (num_hosts > 1) {
    check_optional("num_tokens_per_rdma_rank", layout[1], kInt32, {num_hosts});
  }
  return num_experts;
}

namespace {

// Formats that low_latency_dispatch may make of rows: its arguments of these names.
struct BlockFormats {
  bool use_fp8;
  bool round_scale;
  bool use_ue8m0;
  bool use_nvfp4;
  bool use_mxfp8;
  bool use_ue8m0_for_sf;  // of NVFP4

  explicit BlockFormats(const nb::tuple& given)
      : use_fp8(is_true(given[0])),
        round_scale(is_true(given[1])),
        use_ue8m0(is_true(given[2])),
        use_nvfp4(is_true(given[3])),
        use_mxfp8(is_true(given[4])),
        use_ue8m0_for_sf(is_true(given[5])) {
    check(!use_nvfp4 || !use_mxfp8, [] { return "use_mxfp8 beside use_nvfp4 (one of the two)"; });
    check(use_nvfp4 || use_mxfp8 || round_scale || !use_ue8m0, [] {
      return "use_ue8m0 without round_scale (it packs powers of two)";
    });
  }

  // How rows are stored.
  void set(Options& options) const {
    if (use_nvfp4) {
      options.quantise = Quantise::kNvfp4;
      options.scale_rule = use_ue8m0_for_sf ? ScaleRule::kUe8m0 : ScaleRule::kExact;
      options.scale_layout = ScaleLayout::kInTiles;
    } else if (use_mxfp8) {
      options.quantise = Quantise::kMxfp8;
      options.scale_layout = ScaleLayout::kByColumn;
    } else if (use_fp8) {
      options.quantise = Quantise::kE4M3;
      options.scale_rule = use_ue8m0     ? ScaleRule::kUe8m0
                           : round_scale ? ScaleRule::kPowerOfTwo
                                         : ScaleRule::kClamped;
      options.scale_layout = ScaleLayout::kByColumn;
    }
  }

  // Elements of which a row has a multiple.
  [[nodiscard]] int64_t row_multiple() const {
    constexpr int64_t kWhole = 8;   // in bf16 they have 16 bytes
    constexpr int64_t kPacked = 4;  // bytes of scales in a word
    if (use_nvfp4 || use_mxfp8) {
      const Quantise kind = use_nvfp4 ? Quantise::kNvfp4 : Quantise::kMxfp8;
      return kPacked * stored_format(kind, ScaleRule::kExact).group;
    }
    return !use_fp8 ? kWhole : use_ue8m0 ? kPacked * kQuantiseGroup : int64_t{kQuantiseGroup};
  }
};

}  // namespace

int64_t check_routing(nb::handle topk_idx, nb::handle topk_weights, int64_t num_tokens) {
  return check_routing(topk_idx, topk_weights, Size(num_tokens));
}

BlockDispatch check_block_dispatch(
    const nb::tuple& tensors, const BlockSizes& sizes, const nb::tuple& formats
) {
  const int64_t num_max = sizes.num_max;
  const int64_t num_experts = sizes.num_experts;
  const int64_t num_ranks = sizes.num_ranks;
  const nb::handle x = tensors[0];
  check_tensor("x", x, kBFloat16, {"T", "H"});
  const int64_t num_tokens = size_of(x, 0);
  const int64_t hidden = size_of(x, 1);
  const BlockFormats stored(formats);
  const int64_t multiple = stored.row_multiple();
  check(hidden > 0 && hidden % multiple == 0, [&] {
    return "x has " + text_of(hidden) + " columns (expected a positive multiple of " +
           text_of(multiple) + ")";
  });
  check(num_max >= 1, [&] {
    return "num_max_dispatch_tokens_per_rank = " + text_of(num_max) + " (expected at least 1)";
  });
  check(num_tokens <= num_max, [&] {
    return "x has " + text_of(num_tokens) +
           " rows (expected at most num_max_dispatch_tokens_per_rank = " + text_of(num_max) + ")";
  });
  const int64_t topk = check_routing(tensors[1], tensors[2], num_tokens);
  check_experts(num_experts, num_ranks);
  const int64_t num_local = num_experts / num_ranks;
  check_optional("cumulative_local_expert_recv_stats", tensors[3], kInt32, {num_local});
  check_optional("dispatch_wait_recv_cost_stats", tensors[4], kInt64, {num_ranks});
  check_optional("x_global_scale", tensors[5], kFloat32, {int64_t{1}});
  Options options;
  options.layout = Layout::kExpertStrided;
  options.expert_stride = num_ranks * num_max;
  options.blocks = true;
  options.ignores_unknown = true;
  stored.set(options);
  return {hidden, topk, options};
}

void check_block_combine(
    const nb::tuple& tensors, const Plan& plan, int64_t stride, int64_t hidden
) {
  const int64_t num_tokens = plan.num_tokens();
  const int64_t topk = plan.topk();
  const int64_t num_local = plan.num_local_experts();
  const int64_t num_ranks = plan.num_ranks();
  check_tensor("x", tensors[0], kBFloat16, {num_local, stride, hidden});
  check_tensor("topk_idx", tensors[1], kIntegers, {num_tokens, topk});
  check_tensor("topk_weights", tensors[2], kFloat32, {num_tokens, topk});
  check_optional("out", tensors[3], kBFloat16, {num_tokens, hidden});
  check_optional("combine_wait_recv_cost_stats", tensors[4], kInt64, {num_ranks});
}

void bind_checks(nb::module_& m) {
  using nb::arg;
  m.attr("MAX_TOPK") = kMaxTopk;
  m.def(
      "check_routing",
      [](nb::handle topk_idx, nb::handle topk_weights, std::optional<int64_t> num_tokens) {
        const Size tokens = num_tokens ? Size(*num_tokens) : Size("T");
        return check_routing(topk_idx, topk_weights, tokens);
      },
      arg("topk_idx").none(),
      arg("topk_weights").none() = nb::none(),
      arg("num_tokens").none() = nb::none(),
      "topk_idx holds integers [T, K] with K from 1 to 32, and the weights, if they are given, "
      "have its shape. num_tokens: the rows of x, where they are known. Returns K."
  );
  m.def("check_experts", &check_experts, arg("num_experts"), arg("num_ranks"));
  m.def(
      "check_layout",
      &check_layout,
      arg("layout"),
      arg("num_tokens"),
      arg("num_ranks"),
      arg("num_hosts"),
      "The layout is that of get_dispatch_layout, given back. Returns the number of experts."
  );
  m.def(
      "check_block_dispatch",
      [](const nb::tuple& tensors,
         int64_t num_max,
         int64_t num_experts,
         int64_t num_ranks,
         const nb::tuple& formats) {
        const BlockDispatch call =
            check_block_dispatch(tensors, {num_max, num_experts, num_ranks}, formats);
        return nb::make_tuple(call.hidden, call.topk, call.options);
      },
      arg("tensors"),
      arg("num_max"),
      arg("num_experts"),
      arg("num_ranks"),
      arg("formats"),
      "Of low_latency_dispatch; tensors: x, topk_idx, topk_weights, statistics of counts and of "
      "waits, x_global_scale; formats: use_fp8, round_scale, use_ue8m0, use_nvfp4, use_mxfp8, "
      "use_ue8m0_for_sf. Returns the hidden size, K, and the options of Exchange.dispatch_blocks."
  );
  m.def(
      "check_block_combine",
      &check_block_combine,
      arg("tensors"),
      arg("plan"),
      arg("stride"),
      arg("hidden"),
      "Of low_latency_combine; tensors: x, topk_idx, topk_weights, out, statistics of waits."
  );
}

}  // namespace weft::py
