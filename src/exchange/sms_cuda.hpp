// SPDX-License-Identifier: Apache-2.0
// How many multiprocessors a call occupies and how they share its two roles, from measurements.
#pragma once

#include <cstdint>

namespace weft {

struct RoleBlocks {
  int first = 1;   // push, or pre-reduce
  int second = 1;  // fan-out, or sum
};

// What decides the split of blocks between two roles; only Mover::kVector splits.
struct CallSize {
  int num_sms = 2;
  bool one_row = false;  // rank_major: nothing to fan out or to sum
  bool is_staged = false;
};

[[nodiscard]] int default_sms(int num_gpu_sms, int64_t num_tokens, int64_t row_bytes);
[[nodiscard]] RoleBlocks split_dispatch(const CallSize& size);
[[nodiscard]] RoleBlocks split_combine(const CallSize& size);

}  // namespace weft
