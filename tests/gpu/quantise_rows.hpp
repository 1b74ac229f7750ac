// SPDX-License-Identifier: Apache-2.0
// A bf16 row as a GPU stores it when asked to quantise, computed on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "weft/exchange.hpp"

namespace weft::test {

struct QuantisedRow {
  std::vector<uint8_t> bytes;  // [hidden]
  std::vector<float> scales;   // [hidden / 128]
};

[[nodiscard]] QuantisedRow quantise_on_host(Quantise kind, const uint16_t* row, int64_t hidden);

}  // namespace weft::test
