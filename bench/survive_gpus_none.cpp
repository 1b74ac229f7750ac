// SPDX-License-Identifier: Apache-2.0
#include "core/check.hpp"
#include "survive_gpus.hpp"

namespace weft::bench {

void measure_gpu_deaths(
    const DeathCounts& /*counts*/, uint64_t /*seed*/, const TellRows& /*tell*/
) {
  WEFT_RAISE(Context{}, ErrorCode::kUnsupported, "survive_bench: --gpus in a build without CUDA");
}

nlohmann::ordered_json measure_gpu_cost(
    int /*num_samples*/, bool /*is_small*/, bool /*are_in_domains*/
) {
  measure_gpu_deaths({}, 0, {});
  return {};
}

}  // namespace weft::bench
