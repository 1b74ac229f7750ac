// SPDX-License-Identifier: Apache-2.0
#include "exchange/sms_cuda.hpp"

#include <algorithm>
#include <cstdlib>

#include "core/env.hpp"

namespace weft {
namespace {

RoleBlocks split(int num_sms, double share_of_first) {
  if (const char* s = std::getenv("WEFT_SPLIT")) {
    share_of_first = std::atof(s);
  }
  const int first =
      std::clamp(static_cast<int>(num_sms * share_of_first + 0.5), 1, std::max(1, num_sms - 1));
  return {first, std::max(1, num_sms - first)};
}

}  // namespace

int default_sms(int num_gpu_sms, int64_t /*num_tokens*/, int64_t /*row_bytes*/) {
  return num_gpu_sms;
}

RoleBlocks split_dispatch(const CallSize& size) {
  return split(size.num_sms, size.one_row && !size.is_staged ? 0.8 : 0.5);
}

RoleBlocks split_combine(const CallSize& size) {
  return split(size.num_sms, 0.66);
}

}  // namespace weft
