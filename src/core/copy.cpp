// SPDX-License-Identifier: Apache-2.0
#include "core/copy.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/copy.cpp"
#include <hwy/foreach_target.h>
// The line above must come first: it includes this file once per instruction set.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace weft::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// `to` is aligned to a cache line, `bytes` a multiple of one.
void stream_lines(uint8_t* HWY_RESTRICT to, const uint8_t* HWY_RESTRICT from, uint64_t bytes) {
  const hn::CappedTag<uint8_t, 64> d;
  const uint64_t step = hn::Lanes(d);
  for (uint64_t i = 0; i < bytes; i += step) {
    hn::Stream(hn::LoadU(d, from + i), d, to + i);
  }
}

}  // namespace weft::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft {
namespace {

constexpr uint64_t kLineBytes = 64;
constexpr uint64_t kMinBytes = 4 * kLineBytes;  // below this a line saved is not worth the edges

}  // namespace

HWY_EXPORT(stream_lines);

void copy_bytes(void* to, const void* from, uint64_t bytes) {
  if (bytes != 0) {  // a null pointer is legal then, but not for memcpy
    std::memcpy(to, from, bytes);
  }
}

void copy_streaming(void* to, const void* from, uint64_t bytes) {
  if (bytes < kMinBytes) {
    copy_bytes(to, from, bytes);
    return;
  }
  auto* target = static_cast<uint8_t*>(to);
  const auto* source = static_cast<const uint8_t*>(from);
  const uint64_t head = (0 - reinterpret_cast<uintptr_t>(target)) % kLineBytes;
  const uint64_t body = (bytes - head) / kLineBytes * kLineBytes;
  copy_bytes(target, source, head);
  HWY_DYNAMIC_DISPATCH(stream_lines)(target + head, source + head, body);
  copy_bytes(target + head + body, source + head + body, bytes - head - body);
}

void streaming_fence() {
  hwy::FlushStream();
}

}  // namespace weft
#endif  // HWY_ONCE
