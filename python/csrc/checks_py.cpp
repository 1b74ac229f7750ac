// SPDX-License-Identifier: Apache-2.0
// How calls of weft/compat are refused, where that is asked in every call: the rules about routing
// and about blocks of low-latency calls. weft/compat/deep_ep/checks.py has the other rules, and the
// words for tensors.
#include <nanobind/stl/string.h>
#include <string>

#include "call/quantise.hpp"
#include "torch_tensor.hpp"
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

// As Python's `if` has it.
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

constexpr uint64_t bit(ScalarType type) {
  return uint64_t{1} << static_cast<int>(type);
}
constexpr Kinds kBFloat16 = {bit(ScalarType::kBFloat16), "bfloat16"};
constexpr Kinds kFloat32 = {bit(ScalarType::kFloat32), "float32"};
constexpr Kinds kInt32 = {bit(ScalarType::kInt32), "int32"};
constexpr Kinds kInt64 = {bit(ScalarType::kInt64), "int64"};
constexpr Kinds kIntegers = {kInt64.bits | kInt32.bits, "int64", "int32"};

// `shape`: numbers, and names for any size.
void check_tensor(const char* what, nb::handle tensor, const Kinds& kinds, const nb::tuple& shape) {
  if (!suits(tensor, kinds.bits, shape)) {
    looked_up<Python>().checks.attr("check_tensor")(what, tensor, kinds.dtypes(), nb::list(shape));
  }
}

void check_optional(
    const char* what, nb::handle tensor, const Kinds& kinds, const nb::tuple& shape
) {
  if (!tensor.is_none()) {
    check_tensor(what, tensor, kinds, shape);
  }
}

// Returns K.
int64_t check_routing(nb::handle topk_idx, nb::handle topk_weights, nb::handle num_tokens) {
  check_tensor("topk_idx", topk_idx, kIntegers, nb::make_tuple(num_tokens, "K"));
  const int64_t topk = size_of(topk_idx, 1);
  check(topk >= 1 && topk <= kMaxTopk, [&] {
    return "topk_idx has " + text_of(topk) + " columns (expected K <= " + text_of(kMaxTopk) + ")";
  });
  const nb::tuple shape = nb::make_tuple(size_of(topk_idx, 0), topk);
  check_optional("topk_weights", topk_weights, kFloat32, shape);
  return topk;
}

void check_experts(int64_t num_experts, int64_t num_ranks) {
  check(num_experts > 0 && num_experts % num_ranks == 0, [&] {
    return "num_experts = " + text_of(num_experts) + " (expected a positive multiple of " +
           text_of(num_ranks) + " ranks)";
  });
}

// What low_latency_dispatch may make of rows: its arguments of these names.
struct BlockFormats {
  bool use_fp8;
  bool round_scale;
  bool use_ue8m0;
  bool use_nvfp4;
  bool use_mxfp8;

  explicit BlockFormats(const nb::tuple& given)
      : use_fp8(is_true(given[0])),
        round_scale(is_true(given[1])),
        use_ue8m0(is_true(given[2])),
        use_nvfp4(is_true(given[3])),
        use_mxfp8(is_true(given[4])) {
    check(!use_nvfp4 || !use_mxfp8, [] { return "use_mxfp8 beside use_nvfp4 (one of the two)"; });
    check(use_nvfp4 || use_mxfp8 || round_scale || !use_ue8m0, [] {
      return "use_ue8m0 without round_scale (it packs powers of two)";
    });
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

// What low_latency_dispatch asks of its tensors (x, topk_idx, topk_weights, statistics of counts
// and of waits, and x_global_scale), sizes and BlockFormats. Returns H and K.
nb::tuple check_block_dispatch(
    const nb::tuple& tensors,
    int64_t num_max,
    int64_t num_experts,
    int64_t num_ranks,
    const nb::tuple& formats
) {
  const nb::handle x = tensors[0];
  check_tensor("x", x, kBFloat16, nb::make_tuple("T", "H"));
  const int64_t num_tokens = size_of(x, 0);
  const int64_t hidden = size_of(x, 1);
  const int64_t multiple = BlockFormats(formats).row_multiple();
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
  const int64_t topk = check_routing(tensors[1], tensors[2], nb::int_(num_tokens));
  check_experts(num_experts, num_ranks);
  const nb::tuple of_experts = nb::make_tuple(num_experts / num_ranks);
  check_optional("cumulative_local_expert_recv_stats", tensors[3], kInt32, of_experts);
  const nb::tuple of_ranks = nb::make_tuple(num_ranks);
  check_optional("dispatch_wait_recv_cost_stats", tensors[4], kInt64, of_ranks);
  check_optional("x_global_scale", tensors[5], kFloat32, nb::make_tuple(1));
  return nb::make_tuple(hidden, topk);
}

// What low_latency_combine asks of its tensors: x, topk_idx, topk_weights, out, and statistics of
// waits. `hidden` and `stride`: of the plan's rows and blocks.
void check_block_combine(
    const nb::tuple& tensors, const Plan& plan, int64_t stride, int64_t hidden
) {
  const int64_t num_tokens = plan.num_tokens();
  const nb::tuple blocks = nb::make_tuple(plan.num_local_experts(), stride, hidden);
  const nb::tuple routes = nb::make_tuple(num_tokens, plan.topk());
  check_tensor("x", tensors[0], kBFloat16, blocks);
  check_tensor("topk_idx", tensors[1], kIntegers, routes);
  check_tensor("topk_weights", tensors[2], kFloat32, routes);
  check_optional("out", tensors[3], kBFloat16, nb::make_tuple(num_tokens, hidden));
  const nb::tuple of_ranks = nb::make_tuple(plan.num_ranks());
  check_optional("combine_wait_recv_cost_stats", tensors[4], kInt64, of_ranks);
}

}  // namespace

void bind_checks(nb::module_& m) {
  using nb::arg;
  m.attr("MAX_TOPK") = kMaxTopk;
  m.def(
      "check_routing",
      &check_routing,
      arg("topk_idx").none(),
      arg("topk_weights").none() = nb::none(),
      arg("num_tokens") = "T",
      "topk_idx holds integers [T, K] with K from 1 to 32, and the weights, if they are given, "
      "have its shape. num_tokens: the rows of x, where they are known. Returns K."
  );
  m.def("check_experts", &check_experts, arg("num_experts"), arg("num_ranks"));
  m.def(
      "check_block_dispatch",
      &check_block_dispatch,
      arg("tensors"),
      arg("num_max"),
      arg("num_experts"),
      arg("num_ranks"),
      arg("formats"),
      "Of low_latency_dispatch; tensors: x, topk_idx, topk_weights, statistics of counts and of "
      "waits, x_global_scale; formats: use_fp8, round_scale, use_ue8m0, use_nvfp4, use_mxfp8. "
      "Returns the hidden size and K."
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
