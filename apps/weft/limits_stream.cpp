// SPDX-License-Identifier: Apache-2.0
#include "limits_stream.hpp"

#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "limits_stream.cpp"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // compiles this file once for each vector width
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace weft::program::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

void copy_rows(uint8_t* to, const uint8_t* from, size_t bytes) {
  const hn::ScalableTag<uint8_t> wide;
  const hn::CappedTag<uint8_t, 16> narrow;
  const size_t width = hn::Lanes(wide);
  size_t i = 0;
  for (; i < bytes && reinterpret_cast<uintptr_t>(to + i) % width != 0; i += 16) {
    hn::Stream(hn::LoadU(narrow, from + i), narrow, to + i);
  }
  for (; i + width <= bytes; i += width) {
    hn::Stream(hn::LoadU(wide, from + i), wide, to + i);
  }
  for (; i < bytes; i += 16) {
    hn::Stream(hn::LoadU(narrow, from + i), narrow, to + i);
  }
}

}  // namespace weft::program::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::program {

HWY_EXPORT(copy_rows);

void copy_streaming(std::byte* to, const std::byte* from, size_t bytes) {
  HWY_DYNAMIC_DISPATCH(copy_rows)
  (reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(from), bytes);
}

void flush_streaming() {
  hwy::FlushStream();
}

}  // namespace weft::program
#endif
