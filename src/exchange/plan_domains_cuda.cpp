// SPDX-License-Identifier: Apache-2.0
// plan over several domains of GPUs: the routing to the host, a plan of the whole group there, what
// each GPU needs of it back. Previous in the data flow: the router; next:
// dispatch_domains_cuda.cpp.
#include <algorithm>
#include <cstring>
#include <exception>

#include "exchange/exchange_domains_cuda.hpp"
#include "exchange/region_map.hpp"
#include "plan/build.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {
namespace {

constexpr uint64_t kAlignment = 256;
constexpr int64_t kMaxRounds = 4096;  // of a domain; tells the plans of one call apart

// A tensor of the GPU's in host memory, once the stream has passed.
class HostCopy {
 public:
  HostCopy(const ConstTensor& from, cudaStream_t stream, const Context& context) : tensor_(from) {
    if (!from.is_given()) {
      return;
    }
    bytes_.resize(static_cast<size_t>(from.num_bytes()));
    WEFT_CUDA(
        context,
        cudaMemcpyAsync(bytes_.data(), from.data, bytes_.size(), cudaMemcpyDeviceToHost, stream)
    );
    tensor_.data = bytes_.data();
    tensor_.device = {};
  }
  [[nodiscard]] const ConstTensor& tensor() const { return tensor_; }

 private:
  std::vector<std::byte> bytes_;
  ConstTensor tensor_;
};

// Which part of combine holds what a token gets from a domain (CrossingIndex).
class Parts {
 public:
  explicit Parts(const PlanData& plan) : traffic_(*plan.between) {
    int64_t next = plan.shape.num_tokens;
    for (const auto& tokens : traffic_.sent) {
      first_.push_back(next);
      next += static_cast<int64_t>(tokens.size());
    }
  }
  [[nodiscard]] int32_t row(int32_t token, const TokenPart& part) const {
    const bool is_here = part.index == TokenPart::kHere;
    return is_here ? token
                   : static_cast<int32_t>(first_[static_cast<size_t>(part.domain)]) + part.index;
  }
  // -1: nothing comes from there.
  [[nodiscard]] int32_t row_from(int32_t token, int domain) const {
    const auto begin = static_cast<size_t>(traffic_.token_begin[static_cast<size_t>(token)]);
    const auto end = static_cast<size_t>(traffic_.token_begin[static_cast<size_t>(token) + 1]);
    for (size_t i = begin; i < end; ++i) {
      if (traffic_.token_parts[i].domain == domain) {
        return row(token, traffic_.token_parts[i]);
      }
    }
    return -1;
  }

 private:
  const DomainTraffic& traffic_;
  std::vector<int64_t> first_;  // [num_domains]
};

std::vector<int32_t> part_rows(const PlanData& plan, const Parts& parts) {
  const DomainTraffic& traffic = *plan.between;
  std::vector<int32_t> rows;
  rows.reserve(traffic.token_parts.size());
  for (int32_t token = 0; token < plan.shape.num_tokens; ++token) {
    const auto begin = static_cast<size_t>(traffic.token_begin[static_cast<size_t>(token)]);
    const auto end = static_cast<size_t>(traffic.token_begin[static_cast<size_t>(token) + 1]);
    for (size_t i = begin; i < end; ++i) {
      rows.push_back(parts.row(token, traffic.token_parts[i]));
    }
  }
  return rows;
}

std::vector<int32_t> weight_rows(const PlanData& plan, const Parts& parts) {
  std::vector<int32_t> rows(plan.route_expert.size(), -1);
  const int per_rank = plan.shape.num_local_experts();
  for (size_t route = 0; route < rows.size(); ++route) {
    if (plan.route_slot[route] >= 0) {
      const int owner = plan.route_expert[route] / per_rank;
      const auto token = static_cast<int32_t>(route / static_cast<size_t>(plan.shape.topk));
      rows[route] = parts.row_from(token, plan.between->domains->domain_of(owner));
    }
  }
  return rows;
}

// Arrays one after the other in the image, and where they will lie on the GPU.
class IndexWriter {
 public:
  [[nodiscard]] uint64_t add(std::span<const int32_t> values) {
    const uint64_t offset = num_bytes_;
    arrays_.push_back({offset, values});
    num_bytes_ = align_up(offset + values.size_bytes(), kAlignment);
    return offset;
  }
  [[nodiscard]] uint64_t num_bytes() const { return num_bytes_; }
  void write(std::byte* to) const {
    for (const auto& [offset, values] : arrays_) {
      if (!values.empty()) {
        std::memcpy(to + offset, values.data(), values.size_bytes());
      }
    }
  }

 private:
  std::vector<std::pair<uint64_t, std::span<const int32_t>>> arrays_;
  uint64_t num_bytes_ = 0;
};

// What the plan says of this rank's output.
PlanData output_of(const PlanData& plan) {
  PlanData header;
  header.shape = plan.shape;
  header.exchange_id = plan.exchange_id;
  header.call = plan.call;
  header.num_rows = plan.num_rows;
  header.required_rows = plan.required_rows;
  header.overflow = plan.overflow;
  header.rows_per_expert = plan.rows_per_expert;
  header.padded_rows_per_expert = plan.padded_rows_per_expert;
  header.expert_begin = plan.expert_begin;
  header.global_routes = plan.global_routes;
  return header;
}

// The same as a rank of its domain sees it, in one round.
PlanData round_of(const PlanData& plan, const Round& round) {
  const Domains& domains = *plan.between->domains;
  PlanData header = output_of(plan);
  header.shape.rank = domains.place_of(plan.shape.rank);
  header.shape.num_ranks = static_cast<int>(domains.near().size());
  header.shape.num_experts = plan.shape.num_local_experts() * header.shape.num_ranks;
  header.shape.num_tokens = round.num_tokens;
  header.shape.from_map = false;
  return header;
}

}  // namespace

Plan DomainsCudaExchange::make_plan(
    const Routing& routing, const PlanOptions& options, const CallOptions& call
) {
  const CudaDeviceGuard guard(settings.device.index);
  const cudaStream_t stream = stream_of(call);
  std::optional<HostCopy> idx;
  std::optional<HostCopy> map;
  std::optional<HostCopy> weights;
  const std::exception_ptr refusal = refusal_of([&] {
    begin_call("plan", stream);
    check_options(options, far->context);
    static_cast<void>(check_routing(
        routing,
        settings.num_experts,
        settings.max_topk,
        settings.max_tokens,
        settings.device,
        far->context
    ));
    idx.emplace(routing.topk_idx, stream, far->context);
    map.emplace(routing.map, stream, far->context);
    weights.emplace(routing.weights, stream, far->context);
    WEFT_CUDA(far->context, cudaStreamSynchronize(stream));
  });
  if (refusal) {
    far->run_call(
        Op::kPlan,
        [&] {
          rethrow(refusal);
          return 0;
        },
        [](int) {}
    );
  }
  const Plan host = far->make_plan({idx->tensor(), map->tensor(), weights->tensor()}, options, {});
  return bring_plan(host, stream);
}

Plan DomainsCudaExchange::bring_plan(const Plan& host, cudaStream_t stream) {
  const PlanData& plan = host.data();
  const auto device = std::make_shared<DomainsPlan>(host);
  std::vector<Round> rounds;
  std::vector<PlanImage> images;
  std::vector<uint64_t> image_begin;
  const size_t num = num_rounds(plan);
  rounds.reserve(num);  // images refer to them
  uint64_t bytes = 0;
  for (size_t i = 0; i < num; ++i) {
    rounds.push_back(find_round(plan, i));
    images.emplace_back(near->plan_map, rounds[i], plan.shape.topk);
    image_begin.push_back(bytes);
    bytes = align_up(bytes + images[i].num_bytes(), kAlignment);
  }

  const Parts parts(plan);
  const std::vector<int32_t> part_row = part_rows(plan, parts);
  const std::vector<int32_t> weight_row = weight_rows(plan, parts);
  IndexWriter index;
  std::vector<uint64_t> sent;
  for (const auto& tokens : plan.between->sent) {
    sent.push_back(index.add(tokens));
  }
  const uint64_t part_begin_at = index.add(plan.between->token_begin);
  const uint64_t part_row_at = index.add(part_row);
  const uint64_t weight_row_at = index.add(weight_row);
  const uint64_t column_at = plan.shape.from_map ? index.add(plan.route_expert) : index.num_bytes();

  reserve_image(bytes + index.num_bytes());
  std::byte* const memory = image->get();
  index.write(memory + bytes);
  device->index_block = near->buffers->take(std::max<uint64_t>(index.num_bytes(), 1));
  std::byte* const on_gpu = device->index_block->data;
  WEFT_CUDA(
      far->context,
      cudaMemcpyAsync(on_gpu, memory + bytes, index.num_bytes(), cudaMemcpyHostToDevice, stream)
  );
  const auto array = [&](uint64_t offset) {
    return reinterpret_cast<const int32_t*>(on_gpu + offset);
  };
  for (const uint64_t offset : sent) {
    device->index.sent.push_back(array(offset));
  }
  device->index.part_begin = array(part_begin_at);
  device->index.part_row = array(part_row_at);
  device->index.weight_row = array(weight_row_at);
  device->index.weight_column = plan.shape.from_map ? array(column_at) : nullptr;

  for (size_t i = 0; i < num; ++i) {
    std::byte* const to = memory + image_begin[i];
    images[i].write({to, images[i].num_bytes()}, plan, i == 0);
    device->rounds.push_back(near->adopt_plan(
        round_of(plan, rounds[i]),
        to,
        images[i].records(),
        static_cast<int64_t>(plan.call) * kMaxRounds + static_cast<int64_t>(i),
        {.stream = stream}
    ));
  }
  near->finish(stream);  // the image is the next plan's
  PlanData header = output_of(plan);
  header.device = device;
  return Plan(std::make_shared<const PlanData>(std::move(header)));
}

}  // namespace weft
