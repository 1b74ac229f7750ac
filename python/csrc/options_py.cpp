// SPDX-License-Identifier: Apache-2.0
#include "options_py.hpp"

#include <chrono>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/env.hpp"
#include "survival_py.hpp"
#include "tensors_py.hpp"

namespace weft::py {
namespace {

const Names<Wire>& wire_names() {
  static const Names<Wire> names = {
      {"none", Wire::kNone}, {"fp8", Wire::kFp8}, {"logfmt10", Wire::kLogFmt10}};
  return names;
}

// Makes a setter for a named value.
template <class Part, class Choice>
auto by_name(const char* what, Choice Part::*member, const Names<Choice>& names) {
  return
      [=](Options& options, std::string_view name) { options.*member = choose(what, name, names); };
}

}  // namespace

Wire wire_by_name(std::string_view name) {
  return choose("wire", name, wire_names());
}

void bind_config(nb::module_& m) {
  const auto set_timeout = [](ExchangeConfig& config, double seconds) {
    // INT64_MAX stands for what is no number or too large: the exchange refuses it by its bounds.
    const double most = 1e12;
    config.timeout =
        std::chrono::milliseconds(seconds < most ? static_cast<int64_t>(seconds * 1e3) : INT64_MAX);
  };
  const auto set_gpu = [](ExchangeConfig& config, int index) {
    config.device = {Device::Kind::kCuda, index};
  };
  const auto set_peer_loss = [](ExchangeConfig& config, std::string_view name) {
    const Names<PeerLoss> names = {
        {"fail", PeerLoss::kFail}, {"shrink", PeerLoss::kShrink}, {"repeat", PeerLoss::kRepeat}};
    config.on_peer_loss = choose("on_peer_loss", name, names);
  };
  nb::class_<ExchangeConfig>(m, "ExchangeConfig", "Names are those of weft.Exchange's arguments.")
      .def(nb::init<>())
      .def_rw("hidden", &ExchangeConfig::hidden)
      .def_rw("max_tokens", &ExchangeConfig::max_tokens)
      .def_rw("num_experts", &ExchangeConfig::num_experts)
      .def_rw("max_topk", &ExchangeConfig::max_topk)
      .def_prop_rw("gpu", nullptr, set_gpu, "Of all tensors; not set: the CPU.")
      .def_rw("transport", &ExchangeConfig::transport)
      .def_rw("num_threads", &ExchangeConfig::num_threads)
      .def_rw("num_sms", &ExchangeConfig::num_sms)
      .def_rw("copy_engines", &ExchangeConfig::copy_engines)
      .def_prop_rw("timeout", nullptr, set_timeout)
      .def_prop_rw("on_peer_loss", nullptr, set_peer_loss)
      .def_prop_rw("on_loss", nullptr, &set_on_loss, "Called with what `Exchange.report` returns.");
  m.def(
      "call_timeout",
      [](double usual) {
        using Seconds = std::chrono::duration<double>;
        const auto found = Env::read().call_timeout;
        return found ? Seconds(*found).count() : usual;
      },
      nb::arg("usual"),
      "Seconds of every wait where a program says none: WEFT_CALL_TIMEOUT_S, else `usual`."
  );
}

void bind_options(nb::module_& m) {
  const Names<Layout> layouts = {
      {"rank_major", Layout::kRankMajor},
      {"expert_major", Layout::kExpertMajor},
      {"expert_strided", Layout::kExpertStrided}};
  const Names<Overflow> overflows = {{"drop", Overflow::kDrop}, {"error", Overflow::kError}};
  const Names<SumOrder> orders = {{"rank", SumOrder::kRank}, {"topk", SumOrder::kTopk}};
  const Names<Quantise> kinds = {
      {"none", Quantise::kNone},
      {"e4m3", Quantise::kE4M3},
      {"e5m2", Quantise::kE5M2},
      {"mxfp8", Quantise::kMxfp8},
      {"nvfp4", Quantise::kNvfp4}};
  const Names<ScaleRule> rules = {
      {"exact", ScaleRule::kExact},
      {"clamped", ScaleRule::kClamped},
      {"power_of_two", ScaleRule::kPowerOfTwo},
      {"ue8m0", ScaleRule::kUe8m0}};
  const Names<ScaleLayout> scale_layouts = {
      {"row", ScaleLayout::kByRow},
      {"column", ScaleLayout::kByColumn},
      {"tile", ScaleLayout::kInTiles}};
  const Names<CombineScale> scales = {
      {"none", CombineScale::kNone},
      {"plan", CombineScale::kPlanWeights},
      {"source", CombineScale::kSourceWeights}};
  const auto set_stream = [](Options& options, uintptr_t stream) {
    options.stream = stream_of(stream);
  };
  // (replicas, min_rows, block_rows, replica_rows, placement, empty if it is to be planned)
  using GivenBalance = std::tuple<int, int64_t, int64_t, int64_t, std::vector<int32_t>>;
  const auto set_balance = [](Options& options, GivenBalance balance) {
    auto& [replicas, min_rows, block_rows, replica_rows, placement] = balance;
    options.balance = {replicas, min_rows, std::move(placement), block_rows, replica_rows};
  };
  nb::class_<Options>(m, "Options", "Of one call; names are those of weft.Exchange's arguments.")
      .def(nb::init<>())
      .def_prop_rw("layout", nullptr, by_name("layout", &Options::layout, layouts))
      .def_rw("pad_multiple", &Options::pad_multiple)
      .def_rw("expert_stride", &Options::expert_stride)
      .def_rw("row_budget", &Options::row_budget, nb::arg().none())
      .def_prop_rw("overflow", nullptr, by_name("overflow", &Options::overflow, overflows))
      .def_prop_rw("order", nullptr, by_name("order", &Options::order, orders))
      .def_prop_rw("balance", nullptr, set_balance)
      .def_prop_rw("quantise", nullptr, by_name("quantise", &Options::quantise, kinds))
      .def_prop_rw("scale_rule", nullptr, by_name("scale_rule", &Options::scale_rule, rules))
      .def_prop_rw(
          "scale_layout", nullptr, by_name("scale_layout", &Options::scale_layout, scale_layouts)
      )
      .def_rw("blocks", &Options::blocks)
      .def_rw("ignores_unknown", &Options::ignores_unknown)
      .def_prop_rw("scale", nullptr, by_name("scale", &Options::scale, scales))
      .def_prop_rw(
          "mark_wanted",
          nullptr,
          [](Options& options, uint32_t wanted) { options.ready.wanted = wanted; }
      )
      .def_prop_rw(
          "mark_rows",
          nullptr,
          [](Options& options, int64_t rows) { options.ready.block_rows = rows; }
      )
      .def_prop_rw("wire", nullptr, by_name("wire", &Options::wire, wire_names()))
      .def_prop_rw("stream", nullptr, set_stream)
      .def_rw("num_sms", &Options::num_sms)
      .def_rw("copy_engines", &Options::copy_engines)
      .def_rw("receives_later", &Options::receives_later)
      .def_rw("number", &Options::number);
}

}  // namespace weft::py
