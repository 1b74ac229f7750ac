// SPDX-License-Identifier: Apache-2.0
// A plan that the host has made, brought to the GPUs of the domain. Previous in the data flow:
// plan_image.cpp; next: kernels/plan_given.cu.
#include <algorithm>

#include "exchange/exchange_cuda.hpp"

namespace weft {
namespace {

// The image is read over the link to the host: enough threads to keep it busy.
constexpr int kGivenBlocks = 16;

}  // namespace

Plan CudaExchange::adopt_plan(
    PlanData data,
    const std::byte* image,
    std::span<const GivenRecords> records,
    int64_t number,
    const CallOptions& call
) {
  return run_call(DeviceOp::kPlan, call, [&](cudaStream_t stream) {
    const auto block = take_plan(stream);
    data.exchange_id = id;
    data.device = device_plan(block, data.shape);
    GivenPlanLaunch launch;
    launch.me = view;
    launch.plan = view_of(data);
    launch.plan_address = block->address;
    launch.image = image;
    std::ranges::copy(records, std::begin(launch.to));
    launch.num_tokens = static_cast<int32_t>(data.shape.num_tokens);
    const int64_t signature[] = {
        static_cast<int64_t>(data.shape.options.layout), number, data.shape.topk};
    std::copy(std::begin(signature), std::end(signature), launch.signature);
    launch.num_blocks = std::min(kGivenBlocks, num_gpu_sms);
    launch_given_plan(launch, stream);
    set_launched(stream);
    ++counters.num_plans;
    return Plan(std::make_shared<const PlanData>(std::move(data)));
  });
}

}  // namespace weft
