// SPDX-License-Identifier: Apache-2.0
#include "core/check.hpp"
#include "survive_gpus.hpp"

namespace weft::bench {

void measure_gpu_deaths(int /*num_deaths*/, uint64_t /*seed*/, const TellRow& /*tell*/) {
  WEFT_RAISE(Context{}, ErrorCode::kUnsupported, "survive_bench: --gpus in a build without CUDA");
}

void measure_gpu_cost(int /*num_samples*/, bool /*is_small*/, const TellRow& /*tell*/) {
  measure_gpu_deaths(0, 0, {});
}

}  // namespace weft::bench
