// SPDX-License-Identifier: Apache-2.0
#include "core/gpu/device_memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/available_memory.hpp"
#include "core/check.hpp"

namespace weft {
namespace {

constexpr uint64_t kAlignment = 64;
constexpr uint64_t kCheckedBytes = 64 << 20;  // to look takes some tens of microseconds

}  // namespace

std::shared_ptr<std::byte> allocate_on(const Device& device, uint64_t bytes) {
  if (device.kind == Device::Kind::kCuda) {
    return allocate_on_gpu(device.index, std::max<uint64_t>(bytes, 1));
  }
  if (bytes >= kCheckedBytes) {
    check_available(bytes, "memory");
  }
  const uint64_t rounded =
      (std::max<uint64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  WEFT_CHECK(
      Context{}, data != nullptr, ErrorCode::kOutOfMemory, "allocate: no room for {} bytes", bytes
  );
  return {data, [](std::byte* memory) { std::free(memory); }};
}

void copy_between(
    std::byte* to,
    const Device& to_device,
    const std::byte* from,
    const Device& from_device,
    uint64_t bytes
) {
  if (bytes == 0) {
    return;
  }
  if (to_device.kind == Device::Kind::kCuda) {
    copy_by_gpu(to_device.index, to, from, bytes);
  } else if (from_device.kind == Device::Kind::kCuda) {
    copy_by_gpu(from_device.index, to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace weft
