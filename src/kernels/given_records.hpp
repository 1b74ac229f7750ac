// SPDX-License-Identifier: Apache-2.0
// A plan whose slots the host has found: an image in host memory, laid out so that a kernel copies
// it into this rank's plan block and into those of its receivers.
#pragma once

#include <cstdint>

namespace weft {

// Of one receiver, as offsets in bytes into the image, multiples of 16. Arrays as in PlanMap.
struct GivenRecords {
  uint64_t chunk_begin = 0;  // [num_device_chunks(num_tokens) + 1]
  uint64_t heads = 0;        // [num_arrivals]
  uint64_t slots = 0;        // [num_arrivals, max_topk], as the two below
  uint64_t weights = 0;
  uint64_t origins = 0;
  int32_t num_arrivals = 0;
};

}  // namespace weft
