// SPDX-License-Identifier: Apache-2.0
// How many multiprocessors a call occupies and how they share its two roles, from measurements.
#pragma once

#include <cstdint>

namespace weft {

struct RoleBlocks {
  int first = 1;   // push, or pre-reduce
  int second = 1;  // fan-out, or sum
};

// What decides the split. `num_sms` is the most that the call may occupy, at least 2.
struct CallSize {
  int num_sms = 2;
  int num_ranks = 1;
  int64_t num_tokens = 0;  // max_tokens
  int64_t row_bytes = 0;
  bool one_row = false;  // rank_major: nothing to fan out or to sum
  bool is_staged = false;
};

[[nodiscard]] int default_sms(int num_gpu_sms, int64_t num_tokens, int64_t row_bytes);
[[nodiscard]] RoleBlocks split_dispatch(const CallSize& size);
[[nodiscard]] RoleBlocks split_combine(const CallSize& size);

}  // namespace weft
