// SPDX-License-Identifier: Apache-2.0
// How exchanges run beside computation on a GPU: the rules of python/weft/beside.py.
#pragma once

#include <algorithm>
#include <functional>

#include "moe/config.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"

namespace weft::moe {

// Whether copy engines carry the rows of exchanges beside computation; the same on every rank if
// WEFT_COPY_ENGINES is.
[[nodiscard]] bool copies_beside_computation(const TrainConfig& config, const Group& group);

// make(wanted); without room for copies if that is more than some rank has memory for.
[[nodiscard]] Exchange make_beside_computation(
    const ExchangeConfig& wanted, const std::function<Exchange(const ExchangeConfig&)>& make
);

// Multiprocessors of a call there, of those of its GPU (docs/overlap.md).
[[nodiscard]] constexpr int sms_beside_computation(int num_gpu_sms, bool is_copied_dispatch) {
  return std::max(2, num_gpu_sms * (is_copied_dispatch ? 16 : 8) / 33 / 2 * 2);
}

}  // namespace weft::moe
