// SPDX-License-Identifier: Apache-2.0
// Stands for src/hosts/exchange.cpp and the local kernels of src/cuda/plan (count.cu, spread.cu) in
// a build without CUDA.
#include "call/executor.hpp"
#include "call/validate.hpp"
#include "core/check.hpp"
#include "cuda/plan/count.hpp"
#include "cuda/plan/spread.hpp"

namespace weft {

// Throws in the agreement, so that ranks with another build hear of it.
std::unique_ptr<Executor> make_cuda_exchange(
    const Group& group,
    const ExchangeConfig& config,
    const std::vector<std::vector<int>>& /*domains*/
) {
  const Context context = {.rank = group.rank(), .num_ranks = group.num_ranks()};
  agree_on_config(group, config, [&] {
    raise_error(
        ErrorCode::kUnsupported,
        context,
        fmt::format(
            "exchange: device cuda {} (this build has only the cpu executor)", config.device.index
        )
    );
  });
  raise_error(
      ErrorCode::kInternal, context, "exchange: the agreement let an unsupported device by"
  );
}

void launch_count_routing(const CountLaunch& /*call*/, int /*gpu*/, void* /*stream*/) {
  raise_error(
      ErrorCode::kUnsupported, {}, "count_routing: tensors on a GPU (this build has no CUDA)"
  );
}

void launch_spread_routing(const SpreadLaunch& /*call*/, int /*gpu*/, void* /*stream*/) {
  raise_error(
      ErrorCode::kUnsupported, {}, "spread_routing: tensors on a GPU (this build has no CUDA)"
  );
}

}  // namespace weft
