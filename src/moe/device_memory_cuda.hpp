// SPDX-License-Identifier: Apache-2.0
// Where the parameters lie on a GPU: the two flat vectors of parameters.hpp, each three times.
#pragma once

#include <cstdint>

#include "moe/parameters.hpp"

namespace weft::moe {

struct DeviceParameter {
  float* value = nullptr;
  float* grad = nullptr;        // cleared before each step; backward adds to it
  uint16_t* rounded = nullptr;  // `value` in bf16, for products

  [[nodiscard]] DeviceParameter at(const ParameterSpan& span) const {
    return {value + span.begin, grad + span.begin, rounded + span.begin};
  }
};

struct DeviceMemory {
  DeviceParameter replicated;
  DeviceParameter experts;
};

}  // namespace weft::moe
