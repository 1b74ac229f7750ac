// SPDX-License-Identifier: Apache-2.0
// plan over several domains of GPUs: the routing to the host, a plan of the whole group there, what
// each GPU needs of it back. Previous in the data flow: the router; next: plan_image.cpp, then
// src/cuda/plan/call.cpp, and dispatch.cpp.
#include <algorithm>

#include "hosts/exchange.hpp"
#include "hosts/plan_image.hpp"
#include "plan/build.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {
namespace {

// Bytes of images from which writing takes longer than waking other threads.
constexpr uint64_t kMuchToWrite = uint64_t{1} << 18U;
constexpr int64_t kMaxRounds = 4096;  // of a domain; tells the plans of one call apart

// Copies a tensor of the GPU's to host memory; it is there once the stream has passed.
class HostCopy {
 public:
  void copy(const ConstTensor& from, cudaStream_t stream, const Context& context) {
    tensor = from;
    if (from.is_given()) {
      bytes_.resize(static_cast<size_t>(from.num_bytes()));
      void* const to = bytes_.data();
      const auto size = bytes_.size();
      WEFT_CUDA(context, cudaMemcpyAsync(to, from.data, size, cudaMemcpyDeviceToHost, stream));
      tensor.data = bytes_.data();
      tensor.device = {};
    }
  }
  ConstTensor tensor;

 private:
  std::vector<std::byte> bytes_;
};

// Returns what the plan says of this rank's output.
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

// Returns output_of() as a rank of its domain sees it, in one round.
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

Plan HostsExchange::make_plan(
    const Routing& routing, const PlanOptions& options, const CallOptions& call
) {
  const CudaDeviceGuard guard(settings_.device.index);
  settle();
  last_op_ = Op::kPlan;
  const cudaStream_t stream = stream_of(call);
  HostCopy idx;
  HostCopy map;
  HostCopy weights;
  HostCopy map_indices;
  try {
    begin_call(Op::kPlan, stream);
    check_options(options, context());
    check_options_between_gpus(options, context());
    static_cast<void>(check_routing(routing, settings_, context()));
    idx.copy(routing.topk_idx, stream, context());
    map.copy(routing.map, stream, context());
    weights.copy(routing.weights, stream, context());
    map_indices.copy(routing.map_indices, stream, context());
    wait_for(stream);
  } catch (const Error& error) {
    network_->refuse(Op::kPlan, error, {});
    throw;
  }
  const Routing copied = {
      idx.tensor, map.tensor, weights.tensor, routing.ignores_unknown, map_indices.tensor};
  const Plan host = network_->make_plan(copied, options, call);
  return bring_plan(host, stream);
}

Plan HostsExchange::bring_plan(const Plan& host, cudaStream_t stream) {
  const PlanData& plan = contents_of(host);
  const InterNodeIndex index(plan);
  std::vector<Round> rounds;
  for (size_t i = 0; i < num_rounds(plan); ++i) {
    rounds.push_back(find_round(plan, i));
  }
  std::vector<PlanImage> images;  // they refer to the rounds
  std::vector<uint64_t> begin;
  AreaMap areas(index.num_bytes());
  for (const Round& round : rounds) {
    images.emplace_back(node_->plan_map(), round, plan.shape.topk);
    begin.push_back(areas.add(images.back().num_bytes()));
  }
  reserve_image(areas.num_bytes());
  std::byte* const memory = image_->get();

  index.write(memory);
  const Buffer index_memory = take_bytes(index.num_bytes());
  std::byte* const on_gpu = index_memory.tensor().data;
  WEFT_CUDA(
      context(), cudaMemcpyAsync(on_gpu, memory, index.num_bytes(), cudaMemcpyHostToDevice, stream)
  );
  network_->parts()
      .workers.for_each(2 * rounds.size(), areas.num_bytes() >= kMuchToWrite, [&](size_t part) {
        const size_t i = part / 2;
        const std::span<std::byte> to(memory + begin[i], images[i].num_bytes());
        if (part % 2 == 0) {
          images[i].write_block(to, plan, i == 0);
        } else {
          images[i].write_records(to);
        }
      });
  std::vector<Plan> on_node;
  for (size_t i = 0; i < rounds.size(); ++i) {
    std::byte* const to = memory + begin[i];
    on_node.push_back(node_->import_plan(
        round_of(plan, rounds[i]),
        to,
        images[i].records(),
        static_cast<int64_t>(plan.call) * kMaxRounds + static_cast<int64_t>(i),
        stream
    ));
  }
  wait_for(stream);
  node_->check_faults();  // the image is the next plan's
  check_stopped();
  num_rounds_ += rounds.size();
  PlanData header = output_of(plan);
  header.device =
      std::make_shared<HostsPlan>(host, std::move(on_node), index_memory, index.at(on_gpu));
  return Plan(std::make_shared<const PlanData>(std::move(header)));
}

}  // namespace weft
