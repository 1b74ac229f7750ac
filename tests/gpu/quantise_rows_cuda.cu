// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "cuda/dispatch/quantise.cuh"
#include "gpu/quantise_rows.hpp"

namespace weft::test {

QuantisedRow quantise_on_host(Quantise kind, const uint16_t* row, int64_t hidden) {
  QuantisedRow out;
  for (int64_t begin = 0; begin < hidden; begin += kQuantiseGroup) {
    float largest = 0;
    for (int64_t i = begin; i < begin + kQuantiseGroup; ++i) {
      largest = std::max(largest, std::fabs(bf16_to_float(row[i])));
    }
    const float scale = scale_of(largest, kind);
    out.scales.push_back(scale);
    for (int64_t i = begin; i < begin + kQuantiseGroup; ++i) {
      out.bytes.push_back(to_fp8(bf16_to_float(row[i]), scale, kind));
    }
  }
  return out;
}

}  // namespace weft::test
