// SPDX-License-Identifier: Apache-2.0
// dispatch over several domains of GPUs: inter-node tokens go to their forwarders as messages,
// while this domain's executor moves the others; what arrives is dispatched here as if it
// were this rank's own. Previous in the data flow: plan.cpp; next: combine.cpp.
#include "call/validate.hpp"
#include "hosts/call.hpp"

namespace weft {
namespace {

class HostsDispatch : HostsCall {
 public:
  static constexpr Op kOp = Op::kDispatch;
  [[nodiscard]] static Call call_of(
      const PlanData& plan, const DispatchInput& in, const DispatchOutput& out
  ) {
    return {
        .op = kOp,
        .plan_number = static_cast<int64_t>(plan.call),
        .payload = payload_of(in, out, plan.shape.topk)};
  }
  // Returns the bytes that cross with a token.
  [[nodiscard]] static int64_t token_bytes(const PlanData& /*plan*/, const Call& call) {
    const PayloadFormat& payload = call.payload;
    return payload.row_bytes + payload.weight_bytes + payload.in_scale_bytes();
  }

  HostsDispatch(const HostsCallSite& site, const DispatchInput& in, const DispatchOutput& out)
      : HostsCall(kOp, site), in_(in), out_(out) {
    const PayloadFormat payload = payload_of(in, out, plan_.shape.topk);
    format_ = message_format(
        payload.row_bytes, payload.weight_bytes, payload.in_scale_bytes(), kChunkArrivals
    );
    areas_ = DispatchAreas(plan_, format_);
    check_room(areas_.room);
  }

  void run() {
    Call call = call_of(plan_, in_, out_);
    call.number = options_.number;
    const CallWord word = network_.new_word(call);
    std::vector<CallWord> to(static_cast<size_t>(network_.context().num_ranks), word);
    for (size_t i = 0; i < traffic_.forwarded.size(); ++i) {
      const ForwardedSource& forwarded = traffic_.forwarded[i];
      if (forwarded.crossings.size() > 0) {
        to[static_cast<size_t>(forwarded.source)].rows = network_.staging_at(areas_.staged[i]);
      }
    }
    const std::vector<CallWord> words = network_.swap(to);
    try {
      move(words);
    } catch (const std::exception& error) {
      refuse_rounds(next_round_, error.what());
      throw;
    }
    network_.count(Op::kDispatch, count_sent(plan_), format_.row_bytes + format_.scale_bytes);
  }

 private:
  void move(std::span<const CallWord> words) {
    let_copies_begin();
    Transfer rows;
    rows.format = format_;
    rows.what = "rows";
    rows.sends = pack_sent(words);
    rows.receives =
        from_sources([&](uint32_t source) { return network_.signals().crossing(source, 0); });
    const size_t transfer = start(std::move(rows));
    launch_own();
    tell_rows();
    // All ranks of the domain launch the rounds in the same order.
    while (next_round_ < device_.rounds().size()) {
      const size_t i = next_round_ - 1;
      if (i < areas_.forwarded.size()) {
        copy_forwarded(transfer, i);
      }
      follow_copies();
      const Plan& round = device_.rounds()[next_round_++];
      node().dispatch(round, forwarded_input(i), output_of_round(false), options_);
    }
    follow_copies();  // x is read there
  }

  // Packs each token once for every domain it goes to, for the forwarder there.
  std::vector<MessageSend> pack_sent(std::span<const CallWord> words) {
    std::vector<MessageSend> sends;
    const auto own = static_cast<size_t>(traffic_.domains->own());
    const uint32_t signal = network_.signals().crossing(static_cast<uint32_t>(plan_.shape.rank), 0);
    const size_t num_domains = traffic_.sent.size();
    for (size_t step = 1; step < num_domains; ++step) {
      const size_t domain = (own + step) % num_domains;
      if (num_sent(domain) == 0) {
        continue;
      }
      PackLaunch launch = weights_launch(in_.weights);
      launch.format = format_;
      launch.rows = in_.x.data;
      launch.scales = in_.scales.data;
      launch.index = device_.index().sent[domain];
      launch.count = num_sent(domain);
      const size_t to = forwarder_of(domain);
      sends.push_back(pack(launch, areas_.messages[domain], to, words[to].rows, signal));
    }
    return sends;
  }

  // Copies a source's messages, each once it has come, to where its tokens are dispatched from.
  void copy_forwarded(size_t transfer, size_t i) const {
    const int64_t count = traffic_.forwarded[i].crossings.size();
    for (int64_t c = 0; c < format_.num_chunks(count); ++c) {
      let_copies_await(transfer, i, c);
      const int64_t num = format_.num_rows(c, count);
      const int64_t first = format_.first_row(c);
      const std::byte* message =
          network_.staging() + areas_.staged[i] + static_cast<uint64_t>(c * format_.stride());
      const auto copy = [&](uint64_t area, int64_t each, int64_t from) {
        copy_in(area + static_cast<uint64_t>(first * each), message + from, num * each);
      };
      copy(areas_.forwarded[i].rows, format_.row_bytes, 0);
      copy(areas_.forwarded[i].weights, format_.weight_bytes, format_.weights_at(num));
      copy(areas_.forwarded[i].extra, format_.scale_bytes, format_.scales_at(num));
    }
  }

  void launch_own() {
    DispatchInput own = in_;
    own.weights = weights_by_k(in_.weights, areas_.own_weights);
    next_round_ = 1;
    node().dispatch(device_.rounds()[0], own, output_of_round(true), options_);
  }

  // Leaves out sources, which a round knows by its own numbers alone; its counts are of all rounds.
  [[nodiscard]] DispatchOutput output_of_round(bool is_first) const {
    DispatchOutput out = out_;
    out.sources = out.experts = {};
    if (!is_first) {
      out.counts = {};
      out.count_sums = {};
    }
    return out;
  }

  void tell_rows() const {
    if (!out_.sources.is_given() && !out_.experts.is_given()) {
      return;
    }
    TellRowsLaunch launch;
    launch.count = num_used_rows(plan_);
    launch.list = device_.index().row_sources;
    launch.sources = reinterpret_cast<int32_t*>(out_.sources.data);
    launch.row_experts = device_.index().row_experts;
    launch.experts = reinterpret_cast<int64_t*>(out_.experts.data);
    launch.num_rows = plan_.num_rows;
    launch.topk = plan_.shape.topk;
    launch_tell_rows(launch, stream_);
  }

  [[nodiscard]] DispatchInput forwarded_input(size_t i) const {
    const bool is_forwarded = i < areas_.forwarded.size();
    const ForwardedArea tokens = is_forwarded ? areas_.forwarded[i] : ForwardedArea();
    const int64_t count = is_forwarded ? traffic_.forwarded[i].crossings.size() : 0;
    DispatchInput in;
    in.x = view(tokens.rows, in_.x.dtype, count, in_.x.cols);
    if (in_.weights.is_given()) {
      in.weights = view(tokens.weights, DType::kFloat32, count, plan_.shape.topk);
    }
    if (in_.scales.is_given()) {
      in.scales = view(tokens.extra, in_.scales.dtype, count, in_.scales.cols);
    }
    in.quantise = in_.quantise;
    in.scale_rule = in_.scale_rule;
    in.global_scale = in_.global_scale;
    return in;
  }

  const DispatchInput& in_;
  const DispatchOutput& out_;
  MessageFormat format_;
  DispatchAreas areas_;
  size_t next_round_ = 0;
};

}  // namespace

void HostsExchange::dispatch(
    const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
) {
  const auto validate = [&](const PlanData& header) {
    network_->validator(settings_).dispatch(header, in, out);
  };
  run_call<HostsDispatch>(plan, validate, in, out, call);
}

}  // namespace weft
