// SPDX-License-Identifier: Apache-2.0
// A plan that the host has made, brought to the GPUs of the domain. Previous in the data flow:
// src/hosts/plan_image.cpp; next: import.cu.
#include <algorithm>

#include "cuda/exchange/exchange.hpp"

namespace weft {
namespace {

// The image is read over the link to the host: enough threads to keep it busy.
constexpr int kImportBlocks = 16;

}  // namespace

Plan CudaExchange::import_plan(
    PlanData data,
    const std::byte* image,
    std::span<const ImportedRecords> records,
    int64_t number,
    cudaStream_t stream
) {
  return run_call(Op::kPlan, {.stream = stream}, [&](cudaStream_t /*stream*/) {
    ImportedPlanLaunch launch;
    launch.me = view_;
    launch.plan_address = take_plan(data, stream);
    launch.plan = view_of(data);
    launch.image = image;
    std::ranges::copy(records, std::begin(launch.to));
    launch.num_tokens = static_cast<int32_t>(data.shape.num_tokens);
    const Call imported = {
        .op = Op::kPlan,
        .plan_number = number,
        .options = data.shape.options,
        .topk = data.shape.topk};
    launch.signature = signature_of(imported);
    launch.num_blocks = std::min(kImportBlocks, num_gpu_sms_);
    launch_imported_plan(launch, stream);
    set_launched(stream);
    ++counters_.num_plans;
    return Plan(std::make_shared<const PlanData>(std::move(data)));
  });
}

}  // namespace weft
