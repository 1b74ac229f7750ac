// SPDX-License-Identifier: Apache-2.0
// What a rank said in an all_gather, as a value.
#pragma once

#include <cstring>
#include <type_traits>

#include "core/check.hpp"
#include "weft/group.hpp"

namespace weft {

// The T at the begin of `rank`'s block. Throws Error (kPeerFailed) where there is less: ranks made
// different calls, or an application's own all_gather lost something.
template <class T>
T block_value(const Bytes& block, size_t rank, const Context& context) {
  static_assert(std::is_trivially_copyable_v<T>);
  WEFT_CHECK(
      context,
      block.size() >= sizeof(T),
      ErrorCode::kPeerFailed,
      "all_gather: rank {} sent {} B where {} B are expected (are all ranks in the same call, with "
      "the same options?)",
      rank,
      block.size(),
      sizeof(T)
  );
  T value;
  std::memcpy(&value, block.data(), sizeof value);
  return value;
}

}  // namespace weft
