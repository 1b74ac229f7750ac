// SPDX-License-Identifier: Apache-2.0
// Tests of what only happens after billions of calls.
#pragma once

#include "cuda/exchange/exchange.hpp"

namespace weft::test {

// Sets the exchange's state as if the calls up to this number had been made and had raised no
// signal. No rank may make a call meanwhile.
inline void set_epoch(Exchange& exchange, uint64_t epoch) {
  dynamic_cast<CudaExchange&>(Executor::of(exchange)).set_epoch(epoch);
}

}  // namespace weft::test
