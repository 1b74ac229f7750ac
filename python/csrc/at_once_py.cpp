// SPDX-License-Identifier: Apache-2.0
// Normal calls of weft/compat in the common case: each is one call of the core, with nothing beside
// it. An uncommon call, or a wrong argument, returns None or raises, with nothing begun, and goes
// on in steps, which have the messages.
#include <algorithm>
#include <array>
#include <nanobind/stl/optional.h>
#include <optional>
#include <span>

#include "checks_py.hpp"
#include "exchange_py.hpp"
#include "weft/exchange.hpp"

namespace weft::py {
namespace {

constexpr uint64_t kFloat32 = bit(ScalarType::kFloat32);
constexpr uint64_t kIntegers = bit(ScalarType::kInt32) | bit(ScalarType::kInt64);
constexpr uint64_t kFloats = kFloat32 | bit(ScalarType::kFloat16) | bit(ScalarType::kBFloat16);

// How a call runs, which Python knows.
struct Place {
  uintptr_t stream;
  int num_sms;

  void set(Options& options) const {
    options.stream = stream_of(stream);
    options.num_sms = num_sms;
  }
};

bool has_shape(nb::handle tensor, uint64_t types, int64_t rows, int64_t cols) {
  return suits(tensor, types, std::array{rows, cols});
}

// Returns whether an exchange carries x's rows as they are.
bool are_rows(Calls& calls, nb::handle x, int64_t num_rows) {
  const int64_t hidden = calls.exchange().config().hidden;
  // Types of which a row has a multiple of 16 bytes.
  const uint64_t whole = hidden % 8 == 0 ? kFloats : kFloat32;
  return hidden % 4 == 0 && has_shape(x, whole, num_rows, hidden);
}

nb::tuple sent_of(nb::handle x, nb::handle weights, nb::handle scales) {
  const nb::object none = nb::none();
  return nb::make_tuple(x, weights, scales, none, none, none, none);
}

// x as callers of deep_ep.Buffer give it: rows, or a pair of FP8 and its scales.
struct Rows {
  nb::object x;
  nb::object scales = nb::none();
  bool is_good = false;  // and plain

  // num_rows: -1 for any.
  Rows(Calls& calls, nb::handle given, int64_t num_rows) : x(nb::borrow(given)) {
    if (!nb::isinstance<nb::tuple>(given)) {
      is_good = are_rows(calls, x, num_rows);
      return;
    }
    constexpr uint64_t kBytes =
        bit(ScalarType::kUint8) | bit(ScalarType::kFloat8E4M3) | bit(ScalarType::kFloat8E5M2);
    constexpr uint64_t kScales = kFloat32 | bit(ScalarType::kInt32);
    const int64_t hidden = calls.exchange().config().hidden;
    const auto pair = nb::borrow<nb::tuple>(given);
    is_good = pair.size() == 2 && hidden % 16 == 0 && has_shape(pair[0], kBytes, num_rows, hidden);
    if (is_good) {
      x = pair[0];
      scales = pair[1];
      is_good = has_shape(scales, kScales, size_of(x, 0), -1) && size_of(scales, 1) > 0;
    }
  }

  // Returns what came of x in its form: rows, or rows and their scales.
  [[nodiscard]] nb::object of(const nb::tuple& out) const {
    return scales.is_none() ? nb::object(out[0]) : nb::make_tuple(out[0], out[2]);
  }
};

// Lists counts, rounded up to `alignment`.
nb::list list_of(std::span<const int64_t> counts, int64_t alignment) {
  nb::list rounded;
  for (const int64_t count : counts) {
    rounded.append((count + alignment - 1) / alignment * alignment);
  }
  return rounded;
}

// Returns the result of a call whose dispatch is still to be made: what plan_and_dispatch()
// returns, what is known of the counts, and what was sent.
nb::object planned(const nb::tuple& found, const nb::object& counts, const nb::tuple& sent) {
  return nb::make_tuple(found[0], found[1], found[2], counts, sent);
}

// Dispatches for deep_ep.Buffer by top-k. tensors: x, topk_idx, topk_weights. layout: what
// get_dispatch_layout returns, or E without a layout. Counts: a list of routes to each expert here,
// rounded up to `alignment`, or without a layout int64 [El] on the CPU.
nb::object dispatch_rows(
    Calls& calls,
    const nb::tuple& tensors,
    nb::handle layout,
    int64_t alignment,
    uintptr_t stream,
    int num_sms,
    nb::handle pool_of
) {
  const Exchange& exchange = calls.exchange();
  const ExchangeConfig& config = exchange.config();
  const nb::object none = nb::none();
  const Rows rows(calls, tensors[0], -1);
  if (!rows.is_good || tensors[2].is_none() || alignment < 1) {
    return none;
  }
  const int64_t num_tokens = size_of(rows.x, 0);
  const int64_t topk = check_routing(tensors[1], tensors[2], num_tokens);
  const bool has_layout = nb::isinstance<nb::tuple>(layout);
  int64_t num_experts = 0;
  if (has_layout) {
    num_experts = check_layout(nb::borrow<nb::tuple>(layout), num_tokens, exchange.num_ranks(), 1);
  } else {
    num_experts = nb::cast<int64_t>(layout);
    check_experts(num_experts, exchange.num_ranks());
  }
  const RoutingGiven routes(nb::make_tuple(tensors[1], none, none, none));
  const nb::tuple sent = sent_of(rows.x, tensors[2], rows.scales);
  const SentGiven given(sent, true);
  if (given.x.tensor.device != config.device || num_experts != config.num_experts ||
      topk > config.max_topk) {
    return none;
  }
  Options options;
  options.layout = Layout::kRankMajor;
  options.ignores_unknown = true;
  Place{stream, num_sms}.set(options);
  const nb::tuple found = plan_and_dispatch(calls, routes, given, options, {pool_of, {}, false});
  const auto& plan = nb::cast<const Plan&>(found[0]);
  const std::span<const int64_t> counts = plan.rows_per_expert();
  return planned(found, has_layout ? list_of(counts, alignment) : tensor_of(counts, none), sent);
}

// Does dispatch_with_permute of deep_ep.HybridEPBuffer by a new routing, with as many rows as come.
// tensors: hidden, topk_idx, topk_weights, routing_map, probs. num_experts: E, or None where the
// map says it. Makes no counts: the caller asks the plan.
nb::object dispatch_routes(
    Calls& calls,
    const nb::tuple& tensors,
    std::optional<int64_t> num_experts,
    int64_t pad_multiple,
    uintptr_t stream,
    int num_sms,
    nb::handle pool_of
) {
  const ExchangeConfig& config = calls.exchange().config();
  const nb::object none = nb::none();
  if (!are_rows(calls, tensors[0], -1)) {
    return none;
  }
  const int64_t num_tokens = size_of(tensors[0], 0);
  const bool has_map = !tensors[3].is_none();
  const nb::handle probs = has_map ? tensors[4] : tensors[2];
  if (!has_map && !suits(tensors[1], kIntegers, std::array<int64_t, 2>{num_tokens, -1})) {
    return none;
  }
  const int64_t cols = has_map ? config.num_experts : size_of(tensors[1], 1);
  const bool is_good =
      num_experts.value_or(has_map ? config.num_experts : 0) == config.num_experts &&
      (!has_map || has_shape(tensors[3], bit(ScalarType::kBool), num_tokens, cols)) &&
      (probs.is_none() || has_shape(probs, kFloat32, num_tokens, cols)) &&
      (has_map || !probs.is_none() || tensors[4].is_none());
  if (!is_good) {
    return none;
  }
  nb::object map = nb::borrow(tensors[3]);
  nb::object dense = nb::borrow(probs);
  if (!has_map) {
    const nb::tuple spread = spread_routing(tensors[1], probs, config.num_experts, stream);
    map = spread[0];
    dense = spread[1];
  }
  const nb::object indices = has_map ? none : nb::borrow(tensors[1]);
  const RoutingGiven routes(nb::make_tuple(none, map, none, indices));
  const nb::tuple sent = sent_of(tensors[0], dense, none);
  const SentGiven given(sent, false);
  if (given.x.tensor.device != config.device) {
    return none;
  }
  Options options;
  options.pad_multiple = pad_multiple;
  options.overflow = Overflow::kError;
  Place{stream, num_sms}.set(options);
  return planned(
      plan_and_dispatch(calls, routes, given, options, {pool_of, {}, false}), none, sent
  );
}

// Dispatches for deep_ep.Buffer by a handle's plan.
nb::object dispatch_rows_again(
    Calls& calls, nb::handle x, const Plan& plan, uintptr_t stream, int num_sms, nb::handle pool
) {
  const Rows rows(calls, x, plan.num_tokens());
  if (!rows.is_good) {
    return nb::none();
  }
  Options options;
  Place{stream, num_sms}.set(options);
  const nb::tuple sent = sent_of(rows.x, nb::none(), rows.scales);
  return rows.of(dispatch(calls, plan, sent, false, options, pool));
}

// Combines for deep_ep.Buffer, and combine_with_unpermute; returns tokens, and sums of weights or
// None.
nb::object combine_rows(
    Calls& calls, nb::handle x, nb::handle weights, const Plan& plan, uintptr_t stream, int num_sms
) {
  const int64_t num_rows = plan.num_rows();
  const bool is_good =
      has_shape(x, kFloats, num_rows, calls.exchange().config().hidden) &&
      (weights.is_none() || has_shape(weights, kFloat32, num_rows, plan.row_weight_cols()) ||
       (plan.layout() == Layout::kExpertMajor && suits(weights, kFloat32, std::array{num_rows})));
  if (!is_good) {
    return nb::none();
  }
  Options options;
  Place{stream, num_sms}.set(options);
  const nb::object none = nb::none();
  return combine(calls, plan, nb::make_tuple(x, weights, none, none, none), none, options);
}

}  // namespace

void bind_at_once(nb::class_<Calls>& exchange) {
  using nb::arg;
  exchange
      .def(
          "dispatch_rows",
          &dispatch_rows,
          arg("tensors"),
          arg("layout"),
          arg("alignment"),
          arg("stream"),
          arg("num_sms"),
          arg("pool_of").none(),
          "dispatch of deep_ep.Buffer by top-k: what it asks of x, topk_idx and topk_weights, and "
          "of a layout or the number of experts; what plan_and_dispatch returns; the counts of "
          "experts; and what `dispatch` has still to send if there is no room yet. None where it "
          "is more than this."
      )
      .def(
          "dispatch_routes",
          &dispatch_routes,
          arg("tensors"),
          arg("num_experts").none(),
          arg("pad_multiple"),
          arg("stream"),
          arg("num_sms"),
          arg("pool_of").none(),
          "The same of dispatch_with_permute of deep_ep.HybridEPBuffer; tensors: hidden, topk_idx, "
          "topk_weights, routing_map, probs. The counts are None."
      )
      .def(
          "dispatch_rows_again",
          &dispatch_rows_again,
          arg("x").none(),
          arg("plan"),
          arg("stream"),
          arg("num_sms"),
          arg("pool").none(),
          "dispatch of deep_ep.Buffer by the plan of a handle: rows, or FP8 and scales. None where "
          "it is more."
      )
      .def(
          "combine_rows",
          &combine_rows,
          arg("x").none(),
          arg("weights").none(),
          arg("plan"),
          arg("stream"),
          arg("num_sms"),
          "combine of deep_ep.Buffer without a bias, or combine_with_unpermute: the tokens and the "
          "weights. None where it is more."
      );
}

}  // namespace weft::py
