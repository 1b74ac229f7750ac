// SPDX-License-Identifier: Apache-2.0
// Sums in a combine between domains of GPUs: made of what this domain's ranks have, for the tokens
// of others and for its own, swapped with other domains, and added up.
#include <algorithm>

#include "hosts/combine.hpp"

namespace weft {

std::vector<CrossingSend> CombineAcross::sum_carried(std::span<const CallWord> words) {
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
    launch.messages = owner_.messages.data + areas_.sum_messages[i];
    launch.done = owner_.done->get() + areas_.sum_chunks[i];
    launch.number = number;
    owner_.let_copies_follow(stream_);
    launch_pack(launch, owner_.copies.get());
    sends.push_back(
        {.to = static_cast<int>(source),
         .count = count,
         .target = words[source].rows,
         .first_signal = network_.signals().crossing(static_cast<uint32_t>(plan_.shape.rank), 0),
         .messages = launch.messages,
         .done = launch.done,
         .number = number}
    );
  }
  return sends;
}

void CombineAcross::sum_own() {
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

void CombineAcross::launch_round(size_t round, const CombineInput& in, const CombineOutput& out) {
  ++num_launched_;
  owner_.near->combine(device_.rounds[round], in, out, options_);
}

void CombineAcross::swap_sums(std::vector<CrossingSend> sends) {
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
           .first_signal =
               network_.signals().crossing(static_cast<uint32_t>(carrier_of(domain)), 0)}
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

void CombineAcross::copy_sums(size_t domain, int64_t c) const {
  const int64_t num = sums_.num_rows(c, num_sent(domain));
  const int64_t first = areas_.first_part[domain] + sums_.first_row(c);
  const std::byte* message =
      network_.staging() + areas_.staged_sums[domain] + static_cast<uint64_t>(c * sums_.stride());
  copy_in(
      areas_.parts + static_cast<uint64_t>(first * sums_.row_bytes), message, num * sums_.row_bytes
  );
  copy_in(
      areas_.part_weights + static_cast<uint64_t>(first * sums_.weight_bytes),
      message + sums_.weights_at(num),
      num * sums_.weight_bytes
  );
}

void CombineAcross::add_parts() const {
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

}  // namespace weft
