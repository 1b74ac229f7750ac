// SPDX-License-Identifier: Apache-2.0
// combine over several domains of GPUs: each domain adds up what its ranks have for a token, its
// carrier sends the sum back, and the token's rank adds the domains' sums. Previous in the data
// flow: the caller's experts.
#include "exchange/combine_areas.hpp"
#include "exchange/domains_call_cuda.hpp"
#include "exchange/validate.hpp"

namespace weft {
namespace {

class CombineAcross : DomainsCall {
 public:
  CombineAcross(
      DomainsCudaExchange& owner,
      const DomainsPlan& device,
      const CombineInput& in,
      const CombineOutput& out,
      cudaStream_t stream,
      const CallOptions& options
  )
      : DomainsCall("combine", owner, device, stream, options),
        in_(in),
        out_(out),
        topk_(plan_.shape.topk) {
    const int64_t weight_bytes = topk_ * kWeightBytes;
    sums_ = crossing_chunk(
        in.rows.row_bytes(), in.weights.is_given() ? weight_bytes : 0, 0, kChunkArrivals
    );
    // All that a domain gets, in one message.
    weights_ = {
        .weight_bytes = in.source_weights.is_given() ? weight_bytes : 0,
        .rows = std::max<int64_t>(owner.settings.max_tokens, 1)};
    areas_ = CombineAreas(plan_, sums_, weights_);
    check_room(areas_.room);
  }

  void run() {
    const std::vector<CallWord> words = far_.board->swap(own_words(), {});
    far_.import_targets(words);
    try {
      let_copies_begin();
      if (in_.source_weights.is_given()) {
        swap_weights(words);
      }
      swap_sums(sum_carried(words));
    } catch (...) {
      owner_.refuse_rounds(DeviceOp::kCombine, num_launched_, device_.rounds.size(), stream_);
      throw;
    }
    owner_.let_follow_copies(stream_);
    add_parts();
    ++far_.counters.num_combines;
    far_.count_crossings(count_carried(plan_), sums_.row_bytes);
  }

 private:
  [[nodiscard]] int64_t weights_bytes(int64_t count) const { return count * weights_.weight_bytes; }
  [[nodiscard]] std::vector<CallWord> own_words() const {
    CallWord word = far_.new_word(Op::kCombine);
    word.signature = {
        static_cast<int64_t>(plan_.call),
        static_cast<int64_t>(in_.rows.dtype),
        in_.rows.row_bytes(),
        static_cast<int64_t>(in_.scale),
        in_.weights.is_given()};
    std::vector<CallWord> to(static_cast<size_t>(far_.context.num_ranks), word);
    for (size_t domain = 0; domain < traffic_.sent.size(); ++domain) {
      if (num_sent(domain) > 0) {
        to[carrier_of(domain)].rows = far_.staging_at(areas_.staged_sums[domain]);
      }
    }
    for (size_t i = 0; i < traffic_.carried.size(); ++i) {
      const CarriedSource& carried = traffic_.carried[i];
      if (in_.source_weights.is_given() && carried.crossings.size() > 0) {
        to[static_cast<size_t>(carried.source)].source_weights =
            far_.staging_at(areas_.staged_weights[i]);
      }
    }
    return to;
  }

  // The weights of crossing tokens go to their carriers, and those of carried tokens come.
  void swap_weights(std::span<const CallWord> words) {
    const uint32_t number = ++owner_.number;
    Transfer weights;
    weights.chunk = weights_;
    weights.what = "weights";
    for (size_t domain = 0; domain < traffic_.sent.size(); ++domain) {
      if (num_sent(domain) == 0) {
        continue;
      }
      PackLaunch launch = weights_launch();
      launch.index = device_.index.sent[domain];
      launch.count = num_sent(domain);
      launch.messages = owner_.messages->get() + areas_.weight_messages[domain];
      launch.done = owner_.done->get() + areas_.weight_chunks[domain];
      launch.number = number;
      launch_pack(launch, owner_.copies.get());
      weights.sends.push_back(
          {.to = static_cast<int>(carrier_of(domain)),
           .count = num_sent(domain),
           .target = words[carrier_of(domain)].source_weights,
           .first_signal = far_.signals.source_weights(static_cast<uint32_t>(plan_.shape.rank)),
           .messages = launch.messages,
           .done = launch.done,
           .number = number}
      );
    }
    for (const CarriedSource& carried : traffic_.carried) {
      weights.receives.push_back(
          {.from = carried.source,
           .count = carried.crossings.size(),
           .first_signal = far_.signals.source_weights(static_cast<uint32_t>(carried.source))}
      );
    }
    const size_t transfer = start(std::move(weights));
    for (size_t i = 0; i < traffic_.carried.size(); ++i) {
      const int64_t count = traffic_.carried[i].crossings.size();
      if (count > 0) {
        let_copies_await(transfer, i, 0);
        copy_in(
            areas_.carried[i].source_weights,
            far_.staging.data + areas_.staged_weights[i],
            weights_bytes(count)
        );
      }
    }
  }

  [[nodiscard]] PackLaunch weights_launch() const {
    PackLaunch launch;
    launch.chunk = weights_;
    launch.weights = reinterpret_cast<const float*>(in_.source_weights.data);
    launch.weight_column = device_.index.weight_column;
    launch.topk = topk_;
    launch.weight_cols = static_cast<int32_t>(in_.source_weights.cols);
    return launch;
  }

  // This domain's sums for the tokens of others, and their messages.
  std::vector<CrossingSend> sum_carried(std::span<const CallWord> words) {
    const uint32_t number = ++owner_.number;
    std::vector<CrossingSend> sends;
    owner_.let_follow_copies(stream_);
    for (size_t round = 1; round < device_.rounds.size(); ++round) {
      const size_t i = round - 1;
      const bool is_carried = i < areas_.carried.size();
      const CarriedSums at = is_carried ? areas_.carried[i] : CarriedSums();
      const int64_t count = is_carried ? traffic_.carried[i].crossings.size() : 0;
      CombineInput in = in_;
      CombineOutput out = {.x = rows_view(at.rows, count), .weights = {}};
      if (in_.weights.is_given()) {
        out.weights = weights_view(at.weights, count);
      }
      if (in_.source_weights.is_given()) {
        in.source_weights = weights_view(at.source_weights, count);
      }
      launch_round(round, in, out);
      if (count == 0) {
        continue;
      }
      const auto source = static_cast<size_t>(traffic_.carried[i].source);
      PackLaunch launch;
      launch.chunk = sums_;
      launch.rows = out.x.data;
      launch.weights = reinterpret_cast<const float*>(out.weights.data);
      launch.topk = topk_;
      launch.weight_cols = topk_;
      launch.count = count;
      launch.messages = owner_.messages->get() + areas_.sum_messages[i];
      launch.done = owner_.done->get() + areas_.sum_chunks[i];
      launch.number = number;
      owner_.let_copies_follow(stream_);
      launch_pack(launch, owner_.copies.get());
      sends.push_back(
          {.to = static_cast<int>(source),
           .count = count,
           .target = words[source].rows,
           .first_signal = far_.signals.crossing(static_cast<uint32_t>(plan_.shape.rank), 0),
           .messages = launch.messages,
           .done = launch.done,
           .number = number}
      );
    }
    return sends;
  }

  // The last round, though its number is the first: others wait for the rounds before.
  void sum_own() {
    CombineInput in = in_;
    if (plan_.shape.from_map && in_.source_weights.is_given()) {  // rounds know weights by k
      PackLaunch launch = weights_launch();
      launch.chunk.rows = std::max<int64_t>(plan_.shape.num_tokens, 1);
      launch.count = plan_.shape.num_tokens;
      launch.messages = work_ + areas_.own_weights;
      launch_pack(launch, stream_);
      in.source_weights = weights_view(areas_.own_weights, plan_.shape.num_tokens);
    }
    CombineOutput out = {.x = rows_view(areas_.parts, plan_.shape.num_tokens), .weights = {}};
    if (in_.weights.is_given()) {
      out.weights = weights_view(areas_.part_weights, plan_.shape.num_tokens);
    }
    launch_round(0, in, out);
  }

  void launch_round(size_t round, const CombineInput& in, const CombineOutput& out) {
    ++num_launched_;
    owner_.near->combine(device_.rounds[round], in, out, options_);
  }

  // The sums of other domains come in beside this one's.
  void swap_sums(std::vector<CrossingSend> sends) {
    Transfer sums;
    sums.chunk = sums_;
    sums.what = "sums";
    sums.sends = std::move(sends);
    std::vector<size_t> domains;
    for (size_t domain = 0; domain < traffic_.sent.size(); ++domain) {
      if (num_sent(domain) > 0) {
        domains.push_back(domain);
        sums.receives.push_back(
            {.from = static_cast<int>(carrier_of(domain)),
             .count = num_sent(domain),
             .first_signal = far_.signals.crossing(static_cast<uint32_t>(carrier_of(domain)), 0)}
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

  // Message c of a domain.
  void copy_sums(size_t domain, int64_t c) const {
    const int64_t num = sums_.num_rows(c, num_sent(domain));
    const int64_t first = areas_.first_part[domain] + sums_.first_row(c);
    const std::byte* message =
        far_.staging.data + areas_.staged_sums[domain] + static_cast<uint64_t>(c * sums_.stride());
    copy_in(
        areas_.parts + static_cast<uint64_t>(first * sums_.row_bytes),
        message,
        num * sums_.row_bytes
    );
    copy_in(
        areas_.part_weights + static_cast<uint64_t>(first * sums_.weight_bytes),
        message + sums_.weights_at(num),
        num * sums_.weight_bytes
    );
  }

  void add_parts() const {
    SumPartsLaunch launch;
    launch.dtype = in_.rows.dtype;
    launch.parts = work_ + areas_.parts;
    launch.begin = device_.index.part_begin;
    launch.row = device_.index.part_row;
    launch.out = out_.x.data;
    launch.row_bytes = sums_.row_bytes;
    launch.num_tokens = plan_.shape.num_tokens;
    if (in_.weights.is_given()) {
      launch.part_weights = reinterpret_cast<const float*>(work_ + areas_.part_weights);
      launch.weight_row = device_.index.weight_row;
      launch.weight_column = device_.index.weight_column;
      launch.out_weights = reinterpret_cast<float*>(out_.weights.data);
      launch.topk = topk_;
      launch.weight_cols = static_cast<int32_t>(out_.weights.cols);
    }
    launch_sum_parts(launch, stream_);
  }

  [[nodiscard]] Tensor rows_view(uint64_t area, int64_t rows) const {
    return view(area, in_.rows.dtype, rows, in_.rows.cols);
  }
  [[nodiscard]] Tensor weights_view(uint64_t area, int64_t rows) const {
    return view(area, DType::kFloat32, rows, topk_);
  }

  const CombineInput& in_;
  const CombineOutput& out_;
  int32_t topk_;
  CrossingChunk sums_;
  CrossingChunk weights_;
  CombineAreas areas_;
  size_t num_launched_ = 0;
};

}  // namespace

void DomainsCudaExchange::combine(
    const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
) {
  const CudaDeviceGuard guard(settings.device.index);
  settle();
  last_op = Op::kCombine;
  const cudaStream_t stream = stream_of(call);
  const PlanData& header = plan.header();
  const std::exception_ptr refusal = refusal_of([&] {
    Validator{far->context, settings, far->id}.combine(header, in, out);
    near->check_aligned("combine", "rows", in.rows);
    near->check_aligned("combine", "x", out.x);
    begin_call("combine", stream);
  });
  if (!refusal) {  // weights cross both ways
    make_room(Op::kCombine, in.rows.row_bytes() + 2 * kWeightBytes * header.shape.topk, stream);
  }
  const auto prepare = [&] {
    rethrow(refusal);
    const auto& device = static_cast<const DomainsPlan&>(*header.device);
    return std::make_unique<CombineAcross>(*this, device, in, out, stream, call);
  };
  far->run_call(Op::kCombine, prepare, [&](const auto& across) { across->run(); });
  end_call(call, stream);
}

}  // namespace weft
