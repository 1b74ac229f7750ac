// SPDX-License-Identifier: Apache-2.0
// combine over several domains of GPUs: each domain adds up what its ranks have for a token, its
// forwarder sends the sum back, and the token's rank adds the domains' sums. Previous in the data
// flow: the caller's experts.
#include <algorithm>

#include "call/validate.hpp"
#include "core/check.hpp"
#include "hosts/call.hpp"

namespace weft {
namespace {

class HostsCombine : HostsCall {
 public:
  static constexpr Op kOp = Op::kCombine;
  [[nodiscard]] static Call call_of(
      const PlanData& plan, const CombineInput& in, const CombineOutput& /*out*/
  ) {
    return {
        .op = kOp,
        .plan_number = static_cast<int64_t>(plan.call),
        .payload = payload_of(in, plan.shape.topk),
        .scale = in.scale};
  }
  // Returns the bytes that cross with a token; weights cross both ways.
  [[nodiscard]] static int64_t token_bytes(const PlanData& plan, const Call& call) {
    return call.payload.wire_bytes + 2 * kWeightBytes * plan.shape.topk;
  }

  HostsCombine(const HostsCallSite& site, const CombineInput& in, const CombineOutput& out)
      : HostsCall(kOp, site), in_(in), out_(out), topk_(plan_.shape.topk) {
    const int64_t weight_bytes = topk_ * kWeightBytes;
    sums_ = message_format(
        returned_row_bytes(in), in.weights.is_given() ? weight_bytes : 0, 0, kChunkArrivals
    );
    // One message holds all weights that a domain gets.
    weights_ = {
        .weight_bytes = in.source_weights.is_given() ? weight_bytes : 0,
        .rows = std::max<int64_t>(site.owner.config().max_tokens, 1)};
    areas_ = CombineAreas(plan_, sums_, weights_);
    check_room(areas_.room);
  }

  void run() {
    const std::vector<CallWord> words = network_.swap(own_words());
    try {
      let_copies_begin();
      if (in_.source_weights.is_given()) {
        swap_weights(words);
      }
      swap_sums(sum_forwarded(words));
    } catch (const std::exception& error) {
      refuse_rounds(num_launched_, error.what());
      throw;
    }
    follow_copies();
    add_parts();
    network_.count(kOp, count_forwarded(plan_), sums_.row_bytes);
  }

 private:
  [[nodiscard]] std::vector<CallWord> own_words() const {
    Call call = call_of(plan_, in_, out_);
    call.number = options_.number;
    const CallWord word = network_.new_word(call);
    std::vector<CallWord> to(static_cast<size_t>(network_.context().num_ranks), word);
    for (size_t domain = 0; domain < traffic_.sent.size(); ++domain) {
      if (num_sent(domain) > 0) {
        to[forwarder_of(domain)].rows = network_.staging_at(areas_.staged_sums[domain]);
      }
    }
    for (size_t i = 0; i < traffic_.forwarded.size(); ++i) {
      const ForwardedSource& forwarded = traffic_.forwarded[i];
      if (in_.source_weights.is_given() && forwarded.crossings.size() > 0) {
        to[static_cast<size_t>(forwarded.source)].source_weights =
            network_.staging_at(areas_.staged_weights[i]);
      }
    }
    return to;
  }

  // Sends the source weights of inter-node tokens to their forwarders before any round, and takes
  // in those of tokens that this rank forwards.
  void swap_weights(std::span<const CallWord> words) {
    const auto signal = [&](uint32_t source) { return network_.signals().source_weights(source); };
    Transfer weights;
    weights.format = weights_;
    weights.what = "weights";
    for (size_t domain = 0; domain < traffic_.sent.size(); ++domain) {
      if (num_sent(domain) == 0) {
        continue;
      }
      PackLaunch launch = weights_launch(in_.source_weights);
      launch.format = weights_;
      launch.index = device_.index().sent[domain];
      launch.count = num_sent(domain);
      const size_t to = forwarder_of(domain);
      weights.sends.push_back(pack(
          launch,
          areas_.weight_messages[domain],
          to,
          words[to].source_weights,
          signal(static_cast<uint32_t>(plan_.shape.rank))
      ));
    }
    weights.receives = from_sources(signal);
    const size_t transfer = start(std::move(weights));
    for (size_t i = 0; i < traffic_.forwarded.size(); ++i) {
      const int64_t count = traffic_.forwarded[i].crossings.size();
      if (count > 0) {
        let_copies_await(transfer, i, 0);
        copy_in(
            areas_.forwarded[i].extra,
            network_.staging() + areas_.staged_weights[i],
            count * weights_.weight_bytes
        );
      }
    }
  }

  // Adds up this domain's sums for the tokens of other domains, and packs their messages.
  std::vector<MessageSend> sum_forwarded(std::span<const CallWord> words) {
    std::vector<MessageSend> sends;
    const uint32_t signal = network_.signals().crossing(static_cast<uint32_t>(plan_.shape.rank), 0);
    follow_copies();
    for (size_t round = 1; round < device_.rounds().size(); ++round) {
      const size_t i = round - 1;
      const bool is_forwarded = i < areas_.forwarded.size();
      const ForwardedArea at = is_forwarded ? areas_.forwarded[i] : ForwardedArea();
      const int64_t count = is_forwarded ? traffic_.forwarded[i].crossings.size() : 0;
      CombineInput in = in_;
      if (in_.source_weights.is_given()) {
        in.source_weights = weights_view(at.extra, count);
      }
      const CombineOutput out = launch_round(round, in, at.rows, at.weights, count);
      if (count == 0) {
        continue;
      }
      PackLaunch launch;
      launch.format = sums_;
      launch.rows = out.x.data;
      launch.weights = reinterpret_cast<const float*>(out.weights.data);
      launch.topk = topk_;
      launch.weight_cols = topk_;
      launch.count = count;
      let_copies_follow();
      const auto to = static_cast<size_t>(traffic_.forwarded[i].source);
      sends.push_back(pack(launch, areas_.sum_messages[i], to, words[to].rows, signal));
    }
    return sends;
  }

  // Runs round 0 last, as other domains wait for the rounds before it.
  void sum_own() {
    CombineInput in = in_;
    in.source_weights = weights_by_k(in_.source_weights, areas_.own_weights);
    launch_round(0, in, areas_.parts, areas_.part_weights, plan_.shape.num_tokens);
  }

  // Launches a round that sums for `count` tokens, into the areas `rows` and `weights`.
  CombineOutput launch_round(
      size_t round, const CombineInput& in, uint64_t rows, uint64_t weights, int64_t count
  ) {
    const bool is_coded = in_.wire != Wire::kNone;
    const DType dtype = is_coded ? DType::kByte : in_.rows.dtype;
    const int64_t cols = is_coded ? sums_.row_bytes : in_.rows.cols;
    CombineOutput out = {.x = view(rows, dtype, count, cols), .weights = {}};
    if (in_.weights.is_given()) {
      out.weights = weights_view(weights, count);
    }
    ++num_launched_;
    node().combine(device_.rounds()[round], in, out, options_);
    return out;
  }

  // Sends `sends`, and receives the sums of other domains next to this one's.
  void swap_sums(std::vector<MessageSend> sends) {
    Transfer sums;
    sums.format = sums_;
    sums.what = "sums";
    sums.sends = std::move(sends);
    std::vector<size_t> domains;
    for (size_t domain = 0; domain < traffic_.sent.size(); ++domain) {
      if (num_sent(domain) > 0) {
        const auto from = static_cast<uint32_t>(forwarder_of(domain));
        domains.push_back(domain);
        sums.receives.push_back(
            {.from = static_cast<int>(from),
             .count = num_sent(domain),
             .first_signal = network_.signals().crossing(from, 0)}
        );
      }
    }
    const size_t transfer = start(std::move(sums));
    sum_own();
    for (size_t i = 0; i < domains.size(); ++i) {
      for (int64_t c = 0; c < sums_.num_chunks(num_sent(domains[i])); ++c) {
        let_copies_await(transfer, i, c);
        copy_sums(domains[i], c);
      }
    }
  }

  // Copies message c of a domain's sums to its part.
  void copy_sums(size_t domain, int64_t c) const {
    const int64_t num = sums_.num_rows(c, num_sent(domain));
    const int64_t first = areas_.first_part[domain] + sums_.first_row(c);
    const std::byte* message =
        network_.staging() + areas_.staged_sums[domain] + static_cast<uint64_t>(c * sums_.stride());
    const auto copy = [&](uint64_t area, int64_t each, int64_t from) {
      copy_in(area + static_cast<uint64_t>(first * each), message + from, num * each);
    };
    copy(areas_.parts, sums_.row_bytes, 0);
    copy(areas_.part_weights, sums_.weight_bytes, sums_.weights_at(num));
  }

  void add_parts() const {
    const InterNodeArrays<const int32_t*>& index = device_.index();
    SumPartsLaunch launch;
    launch.dtype = in_.rows.dtype;
    launch.wire = in_.wire;
    launch.parts = work_ + areas_.parts;
    launch.begin = index.part_begin;
    launch.row = index.part_row;
    launch.out = out_.x.data;
    launch.row_bytes = in_.rows.row_bytes();
    launch.part_bytes = sums_.row_bytes;
    launch.num_tokens = plan_.shape.num_tokens;
    if (in_.weights.is_given()) {
      launch.part_weights = reinterpret_cast<const float*>(work_ + areas_.part_weights);
      launch.weight_row = index.weight_row;
      launch.weight_column = index.weight_column;
      launch.out_weights = reinterpret_cast<float*>(out_.weights.data);
      launch.topk = topk_;
      launch.weight_cols = static_cast<int32_t>(out_.weights.cols);
    }
    launch_sum_parts(launch, stream_);
  }

  [[nodiscard]] Tensor weights_view(uint64_t area, int64_t rows) const {
    return view(area, DType::kFloat32, rows, topk_);
  }

  const CombineInput& in_;
  const CombineOutput& out_;
  int32_t topk_;
  MessageFormat sums_;     // messages of sums
  MessageFormat weights_;  // messages of source weights
  CombineAreas areas_;
  size_t num_launched_ = 0;
};

}  // namespace

void HostsExchange::combine(
    const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
) {
  const auto validate = [&](const PlanData& header) {
    const Validator validator = network_->validator(settings_);
    validator.combine(header, in, out);
    WEFT_CHECK(
        validator.context,
        !in.source_idx.is_given(),
        ErrorCode::kUnsupported,
        "combine: source_idx is given between domains of GPUs (leave the weights out before)"
    );
    WEFT_CHECK(
        context(),
        !in.ready.marks.is_given(),
        ErrorCode::kUnsupported,
        "combine: marks of rows between domains of GPUs (call it when the rows are whole)"
    );
    WEFT_CHECK(
        context(),
        !codes_output(in, out),
        ErrorCode::kUnsupported,
        "combine: x has dtype byte between domains of GPUs (expected bfloat16)"
    );
  };
  run_call<HostsCombine>(plan, validate, in, out, call);
}

}  // namespace weft
