// SPDX-License-Identifier: Apache-2.0
// dispatch over several domains of GPUs: crossing tokens go to their carriers as messages,
// while this domain's executor moves the others; what arrives is dispatched here as if it
// were this rank's own. Previous in the data flow: plan_domains_cuda.cpp.
#include "call/validate.hpp"
#include "hosts/call.hpp"
#include "hosts/dispatch_areas.hpp"
#include "plan/device_plan.hpp"

namespace weft {
namespace {

Call dispatch_call(const PlanData& plan, const DispatchInput& in, const DispatchOutput& out) {
  return {
      .op = Op::kDispatch,
      .plan_number = static_cast<int64_t>(plan.call),
      .payload = payload_of(in, out, plan.shape.topk)};
}

class DispatchAcross : DomainsCall {
 public:
  DispatchAcross(
      DomainsCudaExchange& owner,
      const DomainsPlan& device,
      const DispatchInput& in,
      const DispatchOutput& out,
      cudaStream_t stream,
      const CallOptions& options
  )
      : DomainsCall("dispatch", owner, device, stream, options), in_(in), out_(out) {
    const PayloadFormat payload = payload_of(in, out, plan_.shape.topk);
    chunk_ = crossing_chunk(
        payload.row_bytes, payload.weight_bytes, payload.in_scale_bytes(), kChunkArrivals
    );
    areas_ = DispatchAreas(plan_, chunk_);
    check_room(areas_.room);
  }

  void run() {
    const CallWord word = network_.new_word(dispatch_call(plan_, in_, out_));
    std::vector<CallWord> to(static_cast<size_t>(network_.context().num_ranks), word);
    for (size_t i = 0; i < traffic_.carried.size(); ++i) {
      const CarriedSource& carried = traffic_.carried[i];
      if (carried.crossings.size() > 0) {
        to[static_cast<size_t>(carried.source)].rows = network_.staging_at(areas_.staged[i]);
      }
    }
    const std::vector<CallWord> words = network_.swap(to);
    try {
      move(words);
    } catch (const std::exception& error) {
      owner_.refuse_rounds(
          Op::kDispatch, next_round_, device_.rounds.size(), error.what(), stream_
      );
      throw;
    }
    network_.count(Op::kDispatch, count_sent(plan_), chunk_.row_bytes + chunk_.scale_bytes);
  }

 private:
  void move(std::span<const CallWord> words) {
    let_copies_begin();
    Transfer rows;
    rows.chunk = chunk_;
    rows.what = "rows";
    rows.sends = pack(words);
    for (const CarriedSource& carried : traffic_.carried) {
      rows.receives.push_back(
          {.from = carried.source,
           .count = carried.crossings.size(),
           .first_signal = network_.signals().crossing(static_cast<uint32_t>(carried.source), 0)}
      );
    }
    const size_t transfer = start(std::move(rows));
    launch_own();
    // All ranks of the domain launch the rounds in the same order.
    while (next_round_ < device_.rounds.size()) {
      const size_t i = next_round_ - 1;
      if (i < areas_.carried.size()) {
        copy_carried(transfer, i);
      }
      owner_.let_follow_copies(stream_);
      owner_.near->dispatch(device_.rounds[next_round_++], carried_input(i), out_, options_);
    }
    owner_.let_follow_copies(stream_);  // x is read there
  }

  // Each token once, to the carrier of its domain.
  std::vector<CrossingSend> pack(std::span<const CallWord> words) {
    std::vector<CrossingSend> sends;
    const auto own = static_cast<size_t>(traffic_.domains->own());
    const size_t num_domains = traffic_.sent.size();
    const uint32_t number = ++owner_.number;
    for (size_t step = 1; step < num_domains; ++step) {
      const size_t domain = (own + step) % num_domains;
      const int64_t count = num_sent(domain);
      if (count == 0) {
        continue;
      }
      const size_t carrier = carrier_of(domain);
      const CrossingSend send = {
          .to = static_cast<int>(carrier),
          .count = count,
          .target = words[carrier].rows,
          .first_signal = network_.signals().crossing(static_cast<uint32_t>(plan_.shape.rank), 0),
          .messages = owner_.messages.data + areas_.messages[domain],
          .done = owner_.done->get() + areas_.chunks[domain],
          .number = number};
      PackLaunch launch = pack_launch();
      launch.chunk = chunk_;
      launch.rows = in_.x.data;
      launch.scales = in_.scales.data;
      launch.index = device_.index.sent[domain];
      launch.count = count;
      launch.messages = owner_.messages.data + areas_.messages[domain];
      launch.done = owner_.done->get() + areas_.chunks[domain];
      launch.number = number;
      launch_pack(launch, owner_.copies.get());
      sends.push_back(send);
    }
    return sends;
  }

  [[nodiscard]] PackLaunch pack_launch() const {
    PackLaunch launch;
    launch.weights = reinterpret_cast<const float*>(in_.weights.data);
    launch.weight_column = device_.index.weight_column;
    launch.topk = plan_.shape.topk;
    launch.weight_cols = static_cast<int32_t>(in_.weights.cols);
    return launch;
  }

  // The messages of one source, each once it has come, to where its tokens are dispatched from.
  void copy_carried(size_t transfer, size_t i) const {
    const int64_t count = traffic_.carried[i].crossings.size();
    for (int64_t c = 0; c < chunk_.num_chunks(count); ++c) {
      let_copies_await(transfer, i, c);
      const int64_t num = chunk_.num_rows(c, count);
      const int64_t first = chunk_.first_row(c);
      const std::byte* message =
          network_.staging() + areas_.staged[i] + static_cast<uint64_t>(c * chunk_.stride());
      const auto copy = [&](uint64_t area, int64_t each, int64_t from) {
        copy_in(area + static_cast<uint64_t>(first * each), message + from, num * each);
      };
      copy(areas_.carried[i].rows, chunk_.row_bytes, 0);
      copy(areas_.carried[i].weights, chunk_.weight_bytes, chunk_.weights_at(num));
      copy(areas_.carried[i].scales, chunk_.scale_bytes, chunk_.scales_at(num));
    }
  }

  void launch_own() {
    DispatchInput own = in_;
    if (plan_.shape.from_map && in_.weights.is_given()) {  // rounds know weights by k
      PackLaunch launch = pack_launch();
      launch.chunk = {
          .weight_bytes = chunk_.weight_bytes,
          .rows = std::max<int64_t>(plan_.shape.num_tokens, 1)};
      launch.count = plan_.shape.num_tokens;
      launch.messages = work_ + areas_.own_weights;
      launch_pack(launch, stream_);
      own.weights =
          view(areas_.own_weights, DType::kFloat32, plan_.shape.num_tokens, plan_.shape.topk);
    }
    next_round_ = 1;
    owner_.near->dispatch(device_.rounds[0], own, out_, options_);
  }

  [[nodiscard]] DispatchInput carried_input(size_t i) const {
    const bool is_carried = i < areas_.carried.size();
    const CarriedTokens tokens = is_carried ? areas_.carried[i] : CarriedTokens();
    const int64_t count = is_carried ? traffic_.carried[i].crossings.size() : 0;
    DispatchInput in;
    in.x = view(tokens.rows, in_.x.dtype, count, in_.x.cols);
    if (in_.weights.is_given()) {
      in.weights = view(tokens.weights, DType::kFloat32, count, plan_.shape.topk);
    }
    if (in_.scales.is_given()) {
      in.scales = view(tokens.scales, in_.scales.dtype, count, in_.scales.cols);
    }
    in.quantise = in_.quantise;
    return in;
  }

  const DispatchInput& in_;
  const DispatchOutput& out_;
  CrossingChunk chunk_;
  DispatchAreas areas_;
  size_t next_round_ = 0;
};

}  // namespace

void DomainsCudaExchange::dispatch(
    const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
) {
  const CudaDeviceGuard guard(settings.device.index);
  settle();
  last_op = Op::kDispatch;
  const cudaStream_t stream = stream_of(call);
  const PlanData& header = header_of(plan);
  const std::exception_ptr refusal = refusal_of([&] {
    network->validator(settings).dispatch(header, in, out);
    near->check_aligned("dispatch", "x", in.x);
    near->check_aligned("dispatch", "rows", out.rows);
    begin_call("dispatch", stream);
  });
  if (!refusal) {
    const Call ahead = dispatch_call(header, in, out);
    const PayloadFormat& payload = ahead.payload;
    make_room(ahead, payload.row_bytes + payload.weight_bytes + payload.in_scale_bytes(), stream);
  }
  const auto prepare = [&] {
    rethrow(refusal);
    const auto& device = device_plan_as<DomainsPlan>(header, network->context());
    return std::make_unique<DispatchAcross>(*this, device, in, out, stream, call);
  };
  network->run_call(Op::kDispatch, prepare, [&](const auto& across) { across->run(); });
  end_call(call, stream);
}

}  // namespace weft
